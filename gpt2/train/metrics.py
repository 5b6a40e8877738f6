"""Report a run's progress: events for a listener, ``metrics.jsonl``, a warning of overfitting, and its speed."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.checkpoint.saving import write_file
from gpt2.config import GPT2Config
from gpt2.measure.metrics import LanguageScore
from gpt2.train.bigram import BigramConfig
from gpt2.train.boards import boards
from gpt2.train.folders import writing
from gpt2.train.recipe import Recipe
from gpt2.train.runs import METRICS, lines_of, row_of
from gpt2.train.state import Progress


@dataclass(frozen=True)
class Started:
    """Reported once, before the first step."""

    recipe: Recipe
    config: GPT2Config | BigramConfig
    train_tokens: int
    val_tokens: int
    step: int
    memory: int = 0  # bytes, an estimate of the peak
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Estimated:
    """Reported once, after a few steps: the seconds left, including evaluations."""

    step: int
    seconds_left: float


@dataclass(frozen=True)
class Diverged:
    """A diverged step, which changed no weights; ``action`` is "stop", "skip" or "rewind"."""

    step: int
    why: str
    action: str


@dataclass(frozen=True)
class Logged:
    """A logged step: ``loss`` in nats per token; ``mfu`` is the achieved share of the GEMM rate (0: unknown)."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds_left: float
    mfu: float = 0.0


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: the score of the scored validation tokens, and of ``val_all``, prompts too (None: the same); a sample.

    ``rank_tokens_per_second`` is each rank's speed in this evaluation; empty for one.
    """

    step: int
    val: LanguageScore
    best: bool
    sample: str = ""
    warning: str = ""
    val_all: LanguageScore | None = None
    rank_tokens_per_second: tuple[float, ...] = ()
    confusion: list[list[int]] | None = None  # of each class, how often each was said


def accuracy(confusion: list[list[int]]) -> float:
    """Return the share on the diagonal of a confusion table: rows are the true classes, columns those that were said."""
    return sum(row[i] for i, row in enumerate(confusion)) / sum(map(sum, confusion))


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    best_loss: float
    best_step: int
    stopped: str  # "finished", "early" or "interrupted"


Event = Started | Logged | Evaluated | Estimated | Diverged


class Metrics:
    """Write one line per logged step or evaluation to the run's folder, and to the boards of the recipe; rank 0 alone has one.

    When a run resumes, lines after its checkpoint and partly written lines are removed, so no step appears twice.
    """

    def __init__(self, folder: Path, resumed: Progress | None, recipe: Recipe) -> None:
        self.folder, path, kept = folder, folder / METRICS, list[str]()
        with writing(folder):
            if resumed is not None and path.exists():
                kept = [line for line in lines_of(path) if (row := row_of(line)) and row["step"] <= resumed.step]
            write_file(path, "".join(f"{line}\n" for line in kept).encode())
            self.boards = boards(recipe, folder, None if resumed is None else resumed.step + 1)
            self.file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the run
        self.rows = [row_of(line) for line in kept]

    def close(self) -> None:
        with suppress(OSError):  # a line that a full disk did not take: the write has reported it
            self.file.close()
        for board in self.boards:
            board.close()

    def write(self, **row: Any) -> None:
        self.rows.append(row)
        with writing(self.folder):
            self.file.write(json.dumps(row) + "\n")
            numbers = {k: v for k, v in row.items() if k not in ("step", "val_tokens") and isinstance(v, int | float)}
            for board in self.boards:
                board.log(row["step"], numbers)

    def sync(self) -> None:
        """Flush to the disk, before a checkpoint that relies on these lines is written."""
        with writing(self.folder):
            os.fsync(self.file.fileno())


class Pace:
    """Tokens per second since the last log, their share of ``peak``, and the seconds left at the mean speed so far.

    The loop adds to ``tokens`` those that each step computed: behind a batch's longest document, filler is not.
    """

    def __init__(self, step: int, recipe: Recipe, peak: float = 0.0) -> None:
        self.peak = peak
        self.recipe, self.began, self.first, self.last = recipe, step, step, step
        self.since, self.spent, self.evaluation, self.tokens = time.perf_counter(), 0.0, 0.0, 0.0

    def __call__(self, step: int) -> tuple[float, float, float]:
        now = time.perf_counter()
        elapsed = max(now - self.since, 1e-9)
        left = self.seconds_left(step)
        self.spent += elapsed
        speed = self.tokens / elapsed
        self.last, self.since, self.tokens = step, now, 0
        return speed, left, speed / self.peak if self.peak else 0.0

    def seconds_left(self, step: int) -> float:
        """Return the seconds for the steps after ``step`` and their evaluations."""
        steps, every = self.recipe.steps, self.recipe.eval_every
        evaluations = -(-steps // every) - step // every
        spent = self.spent + time.perf_counter() - self.since
        return spent / (step - self.first) * (steps - step) + evaluations * self.evaluation

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """Exclude an evaluation, and the unlogged steps before it, from the training speed."""
        began = time.perf_counter()
        yield
        self.first += step - self.last
        self.last, self.since, self.tokens = step, time.perf_counter(), 0
        self.evaluation = self.since - began
