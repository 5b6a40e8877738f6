"""A page that shows runs while they train: losses, rate, gradient norm, samples, and where held-out loss turned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.pages.drawing import MUTED, PAPER, both
from gpt2.pages.rendering import render
from gpt2.train.plot import draw_losses, finish, units
from gpt2.train.runs import Run, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHARTS = (("loss", "Loss, {units}", 1.0), ("lr", "Learning rate", 0.5), ("grad_norm", "Gradient norm before clipping", 0.5))


def page(folders: Sequence[str | Path], refresh: int = 0) -> str:
    """Return the runs' page as HTML, which reloads every ``refresh`` seconds and then may begin before its runs; 0: never."""
    runs = read(folders, waits=refresh > 0)
    shown = [(key, title.format(units=units(runs)), share) for key, title, share in CHARTS]
    charts = [(title, both(key, title, partial(_draw, key=key, runs=runs), share=share)) for key, title, share in shown]
    return render("watch", runs=runs, charts=charts, refresh=refresh, data={"refresh": refresh})


def _draw(axes: Axes, wide: bool, key: str, runs: Sequence[Run]) -> None:
    for run in runs:
        if key == "loss":
            draw_losses(axes, run, PAPER)
            if run.best and run.turned is not None:
                step, loss = run.best
                axes.axvline(step, color=run.colour, lw=0.9, ls=(0, (2, 2)))
                axes.annotate(f"turned at {step:,}", (step, loss), (6, 10), textcoords="offset points", color=MUTED, fontsize=8.5)
        elif points := run.points(key):
            axes.plot(*zip(*points, strict=True), color=run.colour, lw=1.2, ms=3, marker="" if points[1:] else "o")
    finish(axes, [run.points("val_loss") for run in runs] if key == "loss" else ())
