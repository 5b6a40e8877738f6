"""Build the HTML page of several models: a picture of quality against size, the table, and the matrix of all pairs."""

from __future__ import annotations

import math
import shlex
from functools import partial
from typing import TYPE_CHECKING

from gpt2.comparison.reference_file import TRACE_PREFIX
from gpt2.pages import drawing
from gpt2.pages.drawing import INK, NARROW, WIDE, A, B, svg
from gpt2.pages.rendering import render

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gpt2.comparison.many_results import Comparisons


def page(comparisons: Comparisons) -> str:
    """Return the page as HTML text."""
    largest = max((value for row in comparisons.pairs.kl for value in row if value and math.isfinite(value)), default=0.0)

    def shade(value: float | None) -> int:
        return 0 if not value or not largest else drawing.shade(math.sqrt(value / largest))

    by_step = any(each.step is not None for each in comparisons.candidates)
    return render(
        "many",
        c=comparisons,
        by_step=by_step,
        picture=quality(comparisons, by_step=by_step),
        shade=shade,
        command=command(comparisons),
        data={},
    )


def quality(comparisons: Comparisons, *, by_step: bool) -> list[str]:
    """Draw bits per byte with its interval, wide and narrow: against the size, or of a training run against the step.

    Nothing if fewer than two models have a place on both axes.
    """
    points = []
    for letter, each in zip(comparisons.letters, comparisons.candidates, strict=True):
        place, bits = (each.step if by_step else each.size), each.language.bits_per_byte
        if place is not None and math.isfinite(bits.value):
            points.append((letter, place if by_step else place / 1e6, bits))
    if len(points) < 2:
        return []

    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        for letter, place, bits in points:
            colour = A if letter == comparisons.letters[0] else B
            if math.isfinite(bits.low) and math.isfinite(bits.high):
                axes.plot([place, place], [bits.low, bits.high], color=colour, linewidth=1.2, alpha=0.6)
            axes.plot([place], [bits.value], "o", color=colour, markersize=6)
            axes.annotate(letter, (place, bits.value), xytext=(7, 4), textcoords="offset points", color=INK)
        if by_step:
            steps = [(place, bits.value) for _, place, bits in points]
            axes.plot(*zip(*steps, strict=True), color=B, linewidth=1, alpha=0.5)
        else:
            axes.set_xscale("log")
            axes.set_xticks(sorted({place for _, place, _ in points}), minor=False)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
            axes.xaxis.set_minor_locator(_no_ticks())
        axes.margins(x=0.12, y=0.15)
        axes.set(xlabel="training step" if by_step else "size, MB", ylabel=comparisons.bits_per)

    title = "Quality by training step" if by_step else "Quality against size"
    return [svg("quality", size, title, partial(draw)) for size in (WIDE, NARROW)]


def _no_ticks() -> object:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def command(comparisons: Comparisons) -> str:
    """Return the command that makes this page again."""
    names = [each.model.name for each in comparisons.candidates]
    parts = ["gpt2", "compare", *names]
    if not any(name.startswith(TRACE_PREFIX) for name in names):  # which hold their own text
        parts += ["--on", comparisons.text.name] if comparisons.text.sha256 else []
        parts += ["--tokens", str(comparisons.text.tokens)]
    return shlex.join([*parts, "--seed", str(comparisons.seed), "--html", "report.html"])
