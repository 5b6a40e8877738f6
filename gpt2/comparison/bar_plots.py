"""Draw bars with their intervals: what each part of b carries, and how far each way of computing moves the logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpt2.pages.drawing import INK, MUTED, NARROW, WIDE, A, B, svg
from gpt2.pages.rendering import number, power_of_ten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gpt2.comparison.blame_result import Part
    from gpt2.comparison.noise_result import Way

ROW = 0.27  # inches of a bar and the space around it


def part_bars(parts: Sequence[Part], name: str = "blame") -> list[str]:
    """Draw the KL of each part alone with its interval, and as a line the KL with all parts before it; wide and narrow."""

    def draw(axes: Axes) -> None:
        places = range(len(parts))
        values = [_shown(part.alone.value) for part in parts]
        below = [max(0.0, value - _shown(part.alone.low)) for value, part in zip(values, parts, strict=True)]
        above = [max(0.0, _shown(part.alone.high) - value) for value, part in zip(values, parts, strict=True)]
        error = {"ecolor": INK, "elinewidth": 1.1, "capsize": 2}
        axes.barh(places, values, height=0.62, color=B, alpha=0.75, xerr=[below, above], error_kw=error, label="alone")
        ordered = [part.in_order for part in parts if part.in_order is not None]
        if len(ordered) == len(parts) > 1:
            steps = [_shown(each.value) for each in ordered]
            axes.plot(steps, places, color=A, linewidth=1.6, marker="o", markersize=4, label="with all before it")
            axes.figure.legend(loc="outside upper left", ncols=2, handlelength=1.4, columnspacing=1.6, borderpad=0)
        axes.set_yticks(places, [part.name for part in parts])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: number(value, ".3g"))
        axes.locator_params(axis="x", nbins=4)
        _along_x(axes)
        axes.set_xlabel("KL, nats a token")

    return _wide_and_narrow(name, "What each part of B carries", draw, len(parts)) if parts else []


def way_bars(ways: Sequence[Way]) -> list[str]:
    """Draw the largest difference of a logit under each way, on a logarithmic axis; ways that change no bit have no dot."""
    moved = [way.logit for way in ways if 0 < way.logit < math.inf]
    if not moved:
        return []

    def draw(axes: Axes) -> None:
        least = 10 ** math.floor(math.log10(min(moved)) - 0.5)
        for place, way in enumerate(ways):
            if 0 < way.logit < math.inf:
                colour = A if way.group == "dtype" else B
                axes.plot([least, way.logit], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
                axes.plot([way.logit], [place], color=colour, marker="o", markersize=6)
            else:
                axes.annotate("the same bits", (least, place), fontsize=7.5, color=MUTED, va="center")
        axes.set_xscale("log")
        axes.set_xlim(least, max(moved) * 3)
        axes.xaxis.set_major_formatter(lambda value, _: power_of_ten(round(math.log10(value))))
        axes.set_yticks(range(len(ways)), [_short(way.name) for way in ways])
        axes.invert_yaxis()
        _along_x(axes)
        axes.set_xlabel("largest difference of a logit")

    return _wide_and_narrow("noise", "How far each way of computing moves the logits", draw, len(ways))


def _short(name: str) -> str:
    return name.replace("attention kernel: ", "kernel: ").replace("with a cache, ", "cache, ").removesuffix(" on the left")


def _shown(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _along_x(axes: Axes) -> None:
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)


def _wide_and_narrow(name: str, title: str, draw: Callable[[Axes], None], rows: int) -> list[str]:
    height = ROW * rows + 0.75
    sizes = ((WIDE[0] * 0.8, height), (NARROW[0], height))
    return [svg(name, size, title, partial(_on_one, draw)) for size in sizes]


def _on_one(draw: Callable[[Axes], None], figure: Figure) -> None:
    draw(figure.subplots())
