"""Runs as their folders show them, also while they train: what the recipe says, and every line of ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from gpt2.config import number
from gpt2.data.files import read_all
from gpt2.errors import InputError, printable

METRICS, RECIPE = "metrics.jsonl", "recipe.json"
COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7e22ce", "#a16207", "#be185d", "#0f766e", "#57534e")  # distinct in grey too
SHOWN_SAMPLES = 4  # the newest ones
MARGIN = 0.02  # nats per token that the held-out loss may rise
ALIVE = 120.0  # seconds since the last line after which a run counts as stopped

Points = tuple[tuple[int, float], ...]  # step, value


@dataclass(frozen=True)
class Run:
    """A run; ``name`` is that of its folder, or the whole path where another one has that name."""

    name: str
    colour: str
    recipe: dict[str, Any]
    rows: list[dict[str, Any]]
    age: float  # seconds since the last line; inf: not begun

    def points(self, key: str) -> Points:
        """Return (step, value) of the finite values under ``key``."""
        found = ((row["step"], number(row.get(key), float)) for row in self.rows)
        return tuple((step, value) for step, value in found if value is not None)

    def last(self, key: str) -> float | None:
        return points[-1][1] if (points := self.points(key)) else None

    def setting(self, key: str) -> float | None:
        """Return a number of the recipe."""
        return number(self.recipe.get(key), float)

    @property
    def step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    @cached_property
    def best(self) -> tuple[int, float] | None:
        """The step and value of the lowest held-out loss."""
        return min(self.points("val_loss"), key=lambda point: point[1], default=None)

    @property
    def turned(self) -> int | None:
        """The step of the lowest held-out loss, if at least two later evaluations were all higher."""
        return self.best[0] if self.best and self._evaluations_since_best > 1 else None

    @property
    def _evaluations_since_best(self) -> int:
        return sum(step > self.best[0] for step, _ in self.points("val_loss")) if self.best else 0

    @property
    def state(self) -> str:
        if self.age == math.inf:
            return "waiting for the run to begin"
        steps, patience = self.setting("steps"), self.setting("patience")
        if steps is not None and self.step >= steps:
            return "finished"
        if patience and self._evaluations_since_best >= patience:
            return "stopped early"
        return "training" if self.age < ALIVE else f"no new line for {self.age / 60:.0f} min"

    @property
    def warnings(self) -> list[str]:
        """What went wrong: diverged steps, and overfitting at the last evaluation."""
        found = [f"step {row['step']}: diverged ({row['diverged']})" for row in self.rows if "diverged" in row][-3:]
        with suppress(KeyError, TypeError, ValueError):  # rows of another program
            found += [text for text in [overfitting(self.rows, self.best[0] if self.best else 0)] if text]
        return found

    @property
    def samples(self) -> list[tuple[int, str]]:
        """The newest samples, newest first."""
        found = [(row["step"], row["sample"]) for row in self.rows if isinstance(row.get("sample"), str) and row["sample"]]
        return found[::-1][:SHOWN_SAMPLES]


def overfitting(rows: Sequence[Mapping[str, Any]], best_step: int) -> str:
    """Return a warning if the held-out loss is :data:`MARGIN` above its best, and the training loss lower than then; else ""."""
    evaluated = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    steps = [step for step, _ in evaluated]
    if len(steps) < 2 or best_step not in steps[1:-1]:
        return ""
    best = steps.index(best_step)
    val, best_val = evaluated[-1][1], evaluated[best][1]
    spans = (steps[-2], steps[-1]), (steps[best - 1], steps[best])
    now, then = ([row["loss"] for row in rows if "loss" in row and first < row["step"] <= last] for first, last in spans)
    if val <= best_val + MARGIN or not now or not then or fmean(now) >= fmean(then):
        return ""
    fell = f"the training loss fell from {fmean(then):.4f} to {fmean(now):.4f}"
    return f"overfitting: since step {best_step} {fell} and the held-out loss rose from {best_val:.4f} to {val:.4f}"


def read(folders: Sequence[str | Path], *, waits: bool = False) -> list[Run]:
    """Read the runs, without incomplete last lines; with ``waits``, one that has not begun has no lines.

    Raises InputError: none given, or a folder without metrics.
    """
    if not folders:
        raise InputError("no runs: give the folders that gpt2 train wrote, such as out/mini out/chars")
    names = [Path(folder).resolve().name for folder in folders]
    runs = []
    for index, folder in enumerate(folders):
        path, recipe = Path(folder) / METRICS, {}
        lines, age = list[str](), math.inf
        if path.exists() or not waits:
            lines = lines_of(path)
            age = max(0.0, time.time() - path.stat().st_mtime)
        with suppress(OSError, UnicodeDecodeError):
            recipe = parsed(read_all(Path(folder) / RECIPE).decode())
        name = printable(names[index] if names.count(names[index]) == 1 else str(folder), one_line=True)
        rows = [row for row in map(row_of, lines) if row]
        runs.append(Run(name, COLOURS[index % len(COLOURS)], recipe, rows, age))
    return runs


def lines_of(path: Path) -> list[str]:
    """Return the lines of metrics.jsonl, the last of which may be cut. Raises InputError: it cannot be read."""
    try:
        return read_all(path).decode(errors="replace").splitlines()
    except OSError as error:
        why = f"cannot be read ({error.strerror}); give the folder of a run, as gpt2 train --out made it"
        raise InputError(f"{path}: {why}") from None


def row_of(line: str) -> dict[str, Any]:
    """Return a line of metrics.jsonl, without losses that are no finite numbers; {} if it has no step."""
    row = parsed(line)
    if "confusion" in row and not _square(row["confusion"]):
        del row["confusion"]
    losses = [key for key in row if key == "loss" or key.startswith("val_loss") or key.startswith("val_bits")]
    row = {key: value for key, value in row.items() if key not in losses or number(value, float) is not None}
    return row if number(row.get("step"), int, 0) is not None else {}


def _square(table: Any) -> bool:
    """Return whether a table counts documents by class and by what the model said, and has some."""
    rows = table if isinstance(table, list) and all(isinstance(row, list) and len(row) == len(table) for row in table) else []
    return all(number(count, int, 0) is not None for row in rows for count in row) and sum(map(sum, rows)) > 0


def parsed(text: str) -> dict[str, Any]:
    """Parse a JSON object; return {} for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
