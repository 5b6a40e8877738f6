"""A page that shows runs while they train: losses, rate, gradient norm, samples, and where held-out loss turned."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.errors import InputError, printable
from gpt2.pages.drawing import MUTED, PAPER, svg
from gpt2.pages.rendering import render
from gpt2.train.overfitting import overfitting
from gpt2.train.plot import COLOURS, METRICS, RECIPE, Points, cut_off, read_rows, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_SAMPLES = 4  # the newest ones of each run
CHARTS = (("loss", "Loss, nats per token"), ("lr", "Learning rate"), ("grad_norm", "Gradient norm before clipping"))
SIZES = {"loss": (10.6, 3.6), "lr": (5.2, 2.4), "grad_norm": (5.2, 2.4)}  # inches of 100 px
ALIVE = 120.0  # seconds since the last line after which a run counts as stopped


@dataclass(frozen=True)
class Watched:
    """A run as its folder shows it now. ``turned`` is the step of the lowest held-out loss if it only rose since, else None."""

    name: str
    colour: str
    steps: int | None  # of the recipe
    patience: int  # evaluations without improvement after which the run stops; 0: never
    step: int
    age: float  # seconds since the last line
    rows: list[dict[str, Any]]

    def points(self, key: str) -> Points:
        """Return (step, value) of the finite values under ``key``."""
        found = ((row["step"], row[key]) for row in self.rows if isinstance(row.get(key), int | float))
        return tuple((step, float(value)) for step, value in found if math.isfinite(value))

    def last(self, key: str) -> float | None:
        return points[-1][1] if (points := self.points(key)) else None

    @property
    def best(self) -> tuple[int, float] | None:
        return min(self.points("val_loss"), key=lambda point: point[1], default=None)

    @property
    def turned(self) -> int | None:
        """The step of the lowest held-out loss, if at least two later evaluations were all higher."""
        points = self.points("val_loss")
        later = [value for step, value in points if self.best and step > self.best[0]]
        return self.best[0] if self.best and len(later) > 1 else None

    @property
    def state(self) -> str:
        if self.steps is not None and self.step >= self.steps:
            return "finished"
        if self.patience and self.best and sum(step > self.best[0] for step, _ in self.points("val_loss")) >= self.patience:
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


def read(folders: Sequence[str | Path]) -> list[Watched]:
    """Read the runs. Raises InputError: none given, or a folder without metrics."""
    if not folders:
        raise InputError("no runs to watch: give the folders that gpt2 train writes, as in gpt2 train watch out/mini")
    names = [Path(folder).resolve().name for folder in folders]
    runs = []
    for index, folder in enumerate(folders):
        rows = read_rows(folder)
        recipe: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError):
            recipe = dict(json.loads((Path(folder) / RECIPE).read_text(encoding="utf-8")))
        steps, patience = (value if isinstance(value := recipe.get(key), int) else None for key in ("steps", "patience"))
        name = printable(names[index] if names.count(names[index]) == 1 else str(folder), one_line=True)
        age = max(0.0, time.time() - (Path(folder) / METRICS).stat().st_mtime)
        last = max((row["step"] for row in rows), default=0)
        runs.append(Watched(name, COLOURS[index % len(COLOURS)], steps, patience or 0, last, age, rows))
    return runs


def page(folders: Sequence[str | Path], refresh: int = 0) -> str:
    """Return the page of the runs as HTML, which loads itself again every ``refresh`` seconds (0: never)."""
    runs = read(folders)
    charts = [(title, svg(key, SIZES[key], title, partial(_draw, key=key, runs=runs))) for key, title in CHARTS]
    return render("watch", runs=runs, charts=charts, refresh=refresh, data={"refresh": refresh})


def _draw(figure: Figure, key: str, runs: Sequence[Watched]) -> None:
    axes = figure.subplots()
    for run in runs:
        points = run.points(key)
        if key != "loss" and points:
            axes.plot(*zip(*points, strict=True), color=run.colour, lw=1.2, label=run.name)
        elif points:
            axes.plot(*zip(*points, strict=True), color=run.colour, lw=0.6, alpha=0.25)
            axes.plot(*smoothed(points), color=run.colour, lw=1.0, ls=(0, (3, 1.5)), label=f"{run.name}, training")
        if key == "loss":
            _draw_held_out(axes, run)
    if key == "loss":
        cut_off(axes, (run.points("val_loss") for run in runs))
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_held_out(axes: Axes, run: Watched) -> None:
    if not run.best:
        return
    points, (step, loss) = run.points("val_loss"), run.best
    axes.plot(*zip(*points, strict=True), color=run.colour, lw=1.9, marker="o", ms=2.5, label=f"{run.name}, held out")
    axes.plot([step], [loss], "o", color=run.colour, ms=6, mec=PAPER, mew=1, zorder=5)
    if run.turned is not None:
        axes.axvline(step, color=run.colour, lw=0.9, ls=(0, (2, 2)))
        axes.annotate(f"turned at {step:,}", (step, loss), (6, 10), textcoords="offset points", color=MUTED, fontsize=8.5)
