"""``metrics.jsonl``, and how fast a run goes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from gpt2.checkpoint.saving import write_file
from gpt2.errors import InputError
from gpt2.train.recipe import Recipe
from gpt2.train.state import METRICS, Progress, writing

PARTED = 0.02  # nats per token


class Metrics:
    """One line per logged step or evaluation. What was written after the checkpoint that a run goes on from is cut off.

    So no step is told twice; a line that a killed process wrote in part is cut off too. ``rows`` is what the file now says.
    ``tensorboard`` tells the same to TensorBoard, in the folder of that name. Without a ``folder`` nothing is written.
    """

    def __init__(self, folder: Path | None, found: Progress | None, *, tensorboard: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.file, self.board, self.folder = None, None, folder
        if folder is None:
            return
        path, kept = folder / METRICS, []
        with writing(folder):
            if found is not None and path.is_file():
                kept = [line for line in path.read_text(errors="replace").splitlines() if _step(line) <= found.step]
            write_file(path, "".join(f"{line}\n" for line in kept).encode())
            self.file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the run
        self.rows = [json.loads(line) for line in kept]
        self.board = _board(folder, found) if tensorboard else None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            self.board.close()

    def write(self, **row: Any) -> None:
        self.rows.append(row)
        if self.file is None:
            return
        with writing(self.folder):
            self.file.write(json.dumps(row) + "\n")
            for name, value in row.items():
                if self.board is not None and name != "step" and isinstance(value, int | float):
                    self.board.add_scalar(name, value, row["step"])

    def sync(self) -> None:
        """To the disk, before a checkpoint that counts on these lines gets there."""
        if self.file is None:
            return
        with writing(self.folder):
            os.fsync(self.file.fileno())


def _board(folder: Path, found: Progress | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "tensorboard is not installed: pip install 'gpt2-toolkit[tensorboard]', or --set tensorboard=false"
        ) from None
    with writing(folder):
        return SummaryWriter(folder / "tensorboard", purge_step=None if found is None else found.step + 1)


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return float("inf")


def parted(rows: Sequence[Mapping[str, Any]], best_step: int) -> str:
    """A warning where training and held-out loss go different ways, from the rows of a run's metrics; empty where they do not.

    They do if the held-out loss is now more than :data:`PARTED` nats above its best, of ``best_step``, while the mean training
    loss since the last evaluation is below what it was before that best one.
    """
    evaluated = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    at = [step for step, _ in evaluated]
    if len(at) < 2 or best_step not in at[1:-1]:
        return ""
    best = at.index(best_step)
    val, best_val = evaluated[-1][1], evaluated[best][1]
    now, then = (
        [row["loss"] for row in rows if "loss" in row and first < row["step"] <= last]
        for first, last in ((at[-2], at[-1]), (at[best - 1], at[best]))
    )
    if val <= best_val + PARTED or not now or not then or fmean(now) >= fmean(then):
        return ""
    return (
        f"overfitting: since step {best_step} the training loss fell from {fmean(then):.4f} to {fmean(now):.4f} "
        f"and the held-out loss rose from {best_val:.4f} to {val:.4f}"
    )


class Pace:
    """Tokens per second since the last log; the time left: steps at the pace of the whole run, and evaluations; and that speed
    as a share of ``peak`` tokens per second, where there is such a figure.
    """

    def __init__(self, step: int, recipe: Recipe, peak: float = 0.0) -> None:
        self.peak = peak
        self.recipe, self.began, self.first, self.last = recipe, step, step, step
        self.since, self.spent, self.evaluation = time.perf_counter(), 0.0, 0.0

    def __call__(self, step: int) -> tuple[float, float, float]:
        now = time.perf_counter()
        elapsed = max(now - self.since, 1e-9)
        left = self.seconds_left(step)
        self.spent += elapsed
        speed = (step - self.last) * self.recipe.batch_size * self.recipe.context / elapsed
        self.last, self.since = step, now
        return speed, left, speed / self.peak if self.peak else 0.0

    def seconds_left(self, step: int) -> float:
        """For the steps after ``step``, and as many evaluations as lie among them, each as long as the last one."""
        steps, every = self.recipe.steps, self.recipe.eval_every
        evaluations = -(-steps // every) - step // every
        spent = self.spent + time.perf_counter() - self.since
        return spent / (step - self.first) * (steps - step) + evaluations * self.evaluation

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """Around an evaluation, which is no training; unlogged steps up to here go uncounted."""
        began = time.perf_counter()
        yield
        self.first += step - self.last
        self.last, self.since = step, time.perf_counter()
        self.evaluation = self.since - began
