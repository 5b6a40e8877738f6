"""Draw loss curves from ``metrics.jsonl``: training loss thin, held-out loss bold, the best step marked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gpt2.errors import InputError, printable
from gpt2.pages.drawing import matplotlib_of_our_own

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7e22ce", "#a16207", "#be185d", "#0f766e", "#57534e")  # distinct in grey too
FORMATS = (".png", ".svg")
SMOOTHED_POINTS = 40  # points of the averaged training curve; single points are drawn pale
REACH = 0.8  # above the lowest held-out loss, in nats (or bits per byte)

METRICS, RECIPE = "metrics.jsonl", "recipe.json"  # as gpt2.train.state writes them, without its import of torch
Points = tuple[tuple[int, float], ...]  # step, loss


@dataclass(frozen=True)
class Curve:
    """A run's losses: of training batches and the held-out text in nats per token, of the latter also in bits per byte."""

    name: str
    train: Points
    val: Points
    bits: Points
    expect: float = 0.0


def read_run(folder: str | Path) -> Curve:
    """Read the curve of the run in ``folder``, without an incomplete last line; raise InputError if there is none."""
    rows = read_rows(folder)
    train, val, bits = (
        tuple((row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float) and math.isfinite(row[key]))
        for key in ("loss", "val_loss", "val_bits_per_byte")
    )
    if not train and not val:
        raise InputError(f"{Path(folder) / METRICS}: no losses there yet; wait for the run's first evaluation")
    recipe = Path(folder) / RECIPE
    expect = _parsed(recipe.read_text(encoding="utf-8")).get("expect") if recipe.is_file() else None
    return Curve(Path(folder).resolve().name, train, val, bits, expect if isinstance(expect, float) else 0.0)


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Read the lines of a run's metrics file, without an incomplete last one; raise InputError if there is none."""
    path = Path(folder) / METRICS
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); give the folder of a run, as gpt2 train --out made it"
        ) from None
    return [row for row in map(_parsed, lines) if isinstance(row.get("step"), int)]


def _parsed(text: str) -> dict[str, Any]:
    """Parse a JSON object; return {} for any other text."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def plot(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Draw the runs into the PNG or SVG ``out``; return its path. Several runs get a second panel in bits per byte."""
    out = Path(out)
    if not folders:
        raise InputError("no runs to plot: give the folders that gpt2 train wrote, as in gpt2 train plot out/mini out/chars")
    if out.suffix.lower() not in FORMATS:
        raise InputError(f"{out}: a picture ends in {' or '.join(FORMATS)}; give such a name with --out")
    curves = list(map(read_run, folders))
    names = [curve.name for curve in curves]
    labels = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
    labels = [printable(label, one_line=True) for label in labels]
    with matplotlib_of_our_own():
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        matplotlib.rcdefaults()  # the settings of pages are for pages
        own: dict[Any, Any] = {"svg.hashsalt": "gpt2", "font.size": 9.5, "svg.fonttype": "none", "text.parse_math": False}
        matplotlib.rcParams.update(own)
        panels = 2 if len(curves) > 1 and all(curve.bits for curve in curves) else 1
        figure = Figure(figsize=(6.6 * panels, 4.2), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for curve, label, colour in zip(curves, labels, COLOURS * len(curves), strict=False):
            _draw_losses(axes[0], curve, label, colour)
            if panels == 2:
                axes[1].plot(*zip(*curve.bits, strict=True), color=colour, lw=1.8, marker="o", ms=2.5, label=label)
        if len(curves) == 1 and curves[0].expect:
            axes[0].axhline(curves[0].expect, color="#888888", lw=0.9, ls=(0, (4, 3)), label=f"expected {curves[0].expect:g}")
        title = "Loss" if len(curves) > 1 else f"Loss of {labels[0]}"
        _finish(axes[0], "nats per token", title, [curve.val for curve in curves])
        if panels == 2:
            _finish(axes[1], "bits per byte, held out", "Across tokenizers", [curve.bits for curve in curves])
        try:
            figure.savefig(out, metadata={"Date": None} if out.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise InputError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None
    return out


def _draw_losses(axes: Axes, curve: Curve, label: str, colour: str) -> None:
    if curve.train:
        axes.plot(*zip(*curve.train, strict=True), color=colour, lw=0.6, alpha=0.25)
        axes.plot(*smoothed(curve.train), color=colour, lw=1.0, ls=(0, (3, 1.5)), label=f"{label}, training")
    if curve.val:
        step, loss = min(curve.val, key=lambda point: point[1])
        held_out = f"{label}, held out: best {loss:.4f} at step {step:,}"
        axes.plot(*zip(*curve.val, strict=True), color=colour, lw=1.8, label=held_out)
        axes.plot([step], [loss], "o", color=colour, ms=5, mec="white", mew=1, zorder=5)


def smoothed(points: Points) -> tuple[list[float], list[float]]:
    """Return the mean steps and mean losses of equal groups of neighbouring points."""
    width = max(1, len(points) // SMOOTHED_POINTS)
    groups = [zip(*points[at : at + width], strict=True) for at in range(0, len(points), width)]
    steps, losses = zip(*((fmean(steps), fmean(losses)) for steps, losses in groups), strict=True)
    return list(steps), list(losses)


def cut_off(axes: Axes, held_out: Iterable[Points]) -> None:
    """Cut off values far above the held-out losses after the first; a fine-tune's first, of its base, is mostly within reach."""
    held_out = list(held_out)
    later = [value for points in held_out for _, value in points[1:]]
    if len(later) > 2:
        bottom, top = axes.get_ylim()
        first = [points[0][1] for points in held_out if points and points[0][1] < min(later) + REACH]
        axes.set_ylim(bottom, min(top, max(max(later) + 0.4 * (max(later) - min(later)), *first, 0) + 0.05))


def _finish(axes: Axes, unit: str, title: str, held_out: Sequence[Points]) -> None:
    """Label the axes, and cut off what is far above."""
    cut_off(axes, held_out)
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.set(xlabel="step", ylabel=unit)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#e2e2e2", lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, fontsize=8.5)
