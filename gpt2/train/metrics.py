"""``metrics.jsonl``, and how fast a run goes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ..checkpoint.save import write_file
from .recipe import Recipe
from .state import METRICS, Progress, writing


class Metrics:
    """One line per logged step or evaluation. What was written after the checkpoint that a run goes on from is cut off.

    So no step is told twice; a line that a killed process wrote in part is cut off too.
    """

    def __init__(self, folder: Path, found: Progress | None) -> None:
        self.folder, path = folder, folder / METRICS
        kept = []
        with writing(folder):
            if found is not None and path.is_file():
                kept = [line for line in path.read_text(errors="replace").splitlines() if _step(line) <= found.step]
            write_file(path, "".join(f"{line}\n" for line in kept).encode())
            self.file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the run

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *raised: object) -> None:
        self.file.close()

    def write(self, **row: float) -> None:
        with writing(self.folder):
            self.file.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """To the disk, before a checkpoint that counts on these lines gets there."""
        with writing(self.folder):
            os.fsync(self.file.fileno())


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return float("inf")


class Pace:
    """Tokens per second since the last log, and the time left at the pace of the whole run; evaluations do not count."""

    def __init__(self, step: int, recipe: Recipe) -> None:
        self.recipe, self.first, self.last = recipe, step, step
        self.since, self.spent = time.perf_counter(), 0.0

    def __call__(self, step: int) -> tuple[float, float]:
        now = time.perf_counter()
        elapsed = max(now - self.since, 1e-9)
        self.spent += elapsed
        speed = (step - self.last) * self.recipe.batch_size * self.recipe.context / elapsed
        self.last, self.since = step, now
        return speed, self.spent / (step - self.first) * (self.recipe.steps - step)

    def pause(self, step: int) -> None:
        """Restart the clock after work that is not training; unlogged steps up to here go uncounted."""
        self.first += step - self.last
        self.last, self.since = step, time.perf_counter()
