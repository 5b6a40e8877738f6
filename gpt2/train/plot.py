"""Draw runs from ``metrics.jsonl``: their loss curves as a picture.

Training loss is thin, held-out loss bold, the best step marked.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2.config import number
from gpt2.data.files import write_output
from gpt2.errors import InputError, user_path
from gpt2.options import PICTURE
from gpt2.pages.drawing import COLOURS, LIGHT, MUTED, matplotlib_of_our_own
from gpt2.train.runs import METRICS, Run, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
SMOOTHED_POINTS = 40  # of the averaged training curve, means of equal groups of neighbours; single points are drawn pale


def plot(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Draw the runs into the PNG or SVG ``out``; return its path. Several runs get a second panel in bits per byte."""
    out = user_path(out)
    if out.suffix.lower() not in FORMATS:
        raise InputError(f"{out}: a picture ends in {' or '.join(FORMATS)}; give such a name with --out")
    runs = read(folders)
    for folder, run in zip(folders, runs, strict=True):
        if not run.points("loss") and not run.points("val_loss"):
            raise InputError(f"{Path(folder) / METRICS}: no losses there yet; wait for the run's first evaluation")
    with matplotlib_of_our_own(**LIGHT | {"svg.hashsalt": "gpt2", "figure.dpi": 150, "figure.facecolor": "white"}):
        from matplotlib.figure import Figure

        panels = 2 if len(runs) > 1 and all(run.points("val_bits_per_byte") for run in runs) else 1
        figure = Figure(figsize=(6.6 * panels, 4.2), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for run in runs:
            _draw_losses(axes[0], run)
        if len(runs) == 1 and (expect := number(runs[0].recipe.get("expect"), float)):
            axes[0].axhline(expect, color=COLOURS[MUTED], lw=0.9, ls=(0, (4, 3)), label=f"expected {expect:g}")
        scored = {"document" if any("confusion" in row for row in run.rows) else "token" for run in runs}  # by a classifier
        _finish(axes[0], "Loss" if len(runs) > 1 else f"Loss of {runs[0].name}", f"nats per {' or '.join(sorted(scored))}")
        if panels == 2:
            held_out = [run.points("val_bits_per_byte") for run in runs]
            for run, bits in zip(runs, held_out, strict=True):
                axes[1].plot(*zip(*bits, strict=True), color=run.colour, lw=1.8, marker="o", ms=2.5, label=run.name)
            _finish(axes[1], "Across tokenizers", "bits per byte, held out")
        picture = io.BytesIO()
        metadata = {"Title": PICTURE} | ({"Date": None} if out.suffix.lower() == ".svg" else {})
        figure.savefig(picture, format=out.suffix[1:].lower(), metadata=metadata)
        write_output(out, picture.getvalue())
    return out


def _draw_losses(axes: "Axes", run: Run) -> None:
    if train := run.points("loss"):
        axes.plot(*zip(*train, strict=True), color=run.colour, lw=0.6, alpha=0.25)
        width = max(1, len(train) // SMOOTHED_POINTS)
        means = np.array([np.mean(train[at : at + width], axis=0) for at in range(0, len(train), width)])
        one = "." if len(train) == 1 else None  # a line of one point is not seen
        axes.plot(*means.T, marker=one, color=run.colour, lw=1.0, ls=(0, (3, 1.5)), label=f"{run.name}, training")
    if run.best:
        step, loss = run.best
        held_out = f"{run.name}, held out: best {loss:.4f} at step {step:,}"
        axes.plot(*zip(*run.points("val_loss"), strict=True), color=run.colour, lw=1.8, label=held_out)
        axes.plot([step], [loss], "o", color=run.colour, ms=5, mec="white", mew=1, zorder=5)


def _finish(axes: "Axes", title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.set(xlabel="step", ylabel=unit)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
