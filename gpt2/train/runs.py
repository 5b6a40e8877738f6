"""Runs as their folders show them: what the recipe says, and every line of ``metrics.jsonl``."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from gpt2.config import number
from gpt2.data.files import read_all, reading
from gpt2.errors import InputError, printable

METRICS, RECIPE = "metrics.jsonl", "recipe.json"
COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7e22ce", "#a16207", "#be185d", "#0f766e", "#57534e")  # distinct in grey too
MARGIN = 0.02  # nats per token that the held-out loss may rise


@dataclass(frozen=True)
class Run:
    """A run; ``name`` is that of its folder, or the whole path where another one has that name."""

    name: str
    colour: str
    recipe: dict[str, Any]
    rows: list[dict[str, Any]]

    def points(self, key: str) -> tuple[tuple[int, float], ...]:
        """Return (step, value) of the finite values under ``key``."""
        found = ((row["step"], number(row.get(key), float)) for row in self.rows)
        return tuple((step, value) for step, value in found if value is not None)

    @cached_property
    def best(self) -> tuple[int, float] | None:
        """The step and value of the lowest held-out loss."""
        return min(self.points("val_loss"), key=lambda point: point[1], default=None)


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


def read(folders: Sequence[str | Path]) -> list[Run]:
    """Read the runs, without incomplete last lines. Raises InputError: none given, or a folder without metrics."""
    if not folders:
        raise InputError("no runs: give the folders that gpt2 train wrote, such as out/mini out/chars")
    names = [Path(folder).resolve().name for folder in folders]
    runs = []
    for index, folder in enumerate(folders):
        lines, recipe = lines_of(Path(folder) / METRICS), {}
        with suppress(OSError, UnicodeDecodeError):
            recipe = parsed(read_all(Path(folder) / RECIPE).decode())
        name = printable(names[index] if names.count(names[index]) == 1 else str(folder), one_line=True)
        runs.append(Run(name, COLOURS[index % len(COLOURS)], recipe, [row for row in map(row_of, lines) if row]))
    return runs


def lines_of(path: Path) -> list[str]:
    """Return the lines of metrics.jsonl, the last of which may be cut. Raises InputError: it cannot be read."""
    with reading(path, "give the folder of a run, as gpt2 train --out made it"):
        return read_all(path).decode(errors="replace").splitlines()


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
