"""Build the HTML page of several models: a picture of quality against size, the table, and the matrix of all pairs."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from gpt2.comparison.page import again
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
        command=again([each.model.name for each in comparisons.candidates], comparisons.text, comparisons.seed),
        data={},
    )


def quality(comparisons: Comparisons, *, by_step: bool) -> list[str]:
    """Draw bits per byte, wide and narrow, with the paired interval: against the size, or of a training run against the step.

    Nothing if fewer than two models have a place on both axes.
    """
    first = comparisons.candidates[0].language.bits_per_byte.value
    points = []
    for letter, each in zip(comparisons.letters, comparisons.candidates, strict=True):
        place, bits = (each.step if by_step else each.size), each.language.bits_per_byte.value
        if place is not None and math.isfinite(bits):
            x = place if by_step else place / 1e6
            span = (bits, bits) if each.against is None else (first + each.against.bits.low, first + each.against.bits.high)
            points.append((letter, x, bits, span))
    if len(points) < 2:
        return []
    across = {x: x if by_step else math.log(x) for _, x, *_ in points}
    width = max(across.values()) - min(across.values()) or 1.0
    height = max(bits for _, _, bits, _ in points) - min(bits for _, _, bits, _ in points) or 1.0
    labels: list[tuple[float, float, str]] = []  # models near one another have one label
    for letter, x, bits, _ in points:
        near = [at for at in labels if abs(across[at[0]] - across[x]) < 0.05 * width and abs(at[1] - bits) < 0.07 * height]
        if near:
            labels[labels.index(near[0])] = (*near[0][:2], f"{near[0][2]} {letter}")
        else:
            labels.append((x, bits, letter))

    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        for letter, place, bits, span in reversed(points):  # the first one on top
            colour = A if letter == comparisons.letters[0] else B
            if all(map(math.isfinite, span)):
                axes.plot([place, place], span, color=colour, linewidth=1.2, alpha=0.6)
            axes.plot([place], [bits], "o", color=colour, markersize=6)
        for place, bits, text in labels:
            axes.annotate(text, (place, bits), xytext=(7, 4), textcoords="offset points", color=INK)
        if by_step:
            axes.plot([place for _, place, *_ in points], [bits for _, _, bits, _ in points], color=B, linewidth=1, alpha=0.5)
        else:
            axes.set_xscale("log")
            ticks: list[float] = []
            for place in sorted(across):
                if not ticks or across[place] - across[ticks[-1]] > 0.6 / figure.get_figwidth() * width:
                    ticks.append(place)
            axes.set_xticks(ticks, labels=[f"{place:.3g}" for place in ticks])
            axes.xaxis.set_minor_locator(_no_ticks())
        axes.margins(x=0.12, y=0.15)
        axes.set(xlabel="training step" if by_step else "size, MB", ylabel=comparisons.bits_per)

    title = "Quality by training step" if by_step else "Quality against size"
    return [svg("quality", size, title, partial(draw)) for size in (WIDE, NARROW)]


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
