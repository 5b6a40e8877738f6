"""Draw the charts of a comparison's page: errors by layer, tokens by KL, what each part carries, quality against size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpt2.comparison.blame_result import Part
from gpt2.comparison.distributions import Divergence
from gpt2.comparison.many_results import Comparisons
from gpt2.measure.tracing import layer_of
from gpt2.pages.drawing import INK, MUTED, NARROW, RULE, WIDE, A, B, both, logarithmic
from gpt2.pages.rendering import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHED: Any = (0, (4, 3))
ROW = 0.27  # inches of a bar and the space around it
Errors = Sequence[tuple[str, float]]  # (traced point, relative error), in the order of computation


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _legend(axes: Axes, columns: int = 2) -> None:
    axes.figure.legend(loc="outside upper left", ncols=columns, handlelength=1.4, columnspacing=1.6, borderpad=0)


def errors_by_layer(name: str, lines: Sequence[tuple[str, str, Errors]], threshold: float | None = None) -> str:
    """Draw relative errors at each traced point, as (label, colour, errors), wide and narrow; nothing if none is above 0.

    A ``threshold`` is drawn where it is near, and then the branches of the blocks too.
    """
    shown = [each for each in lines if any(math.isfinite(error) and error > 0 for _, error in each[2])]
    what = "Distance from float64" if threshold is None else "Relative error"

    def draw(axes: Axes, wide: bool) -> None:
        for label, colour, errors in shown:
            _by_point(axes, errors, colour, label, branches=threshold is not None)
        layers: dict[int, list[int]] = {}
        for place, (point, _) in enumerate(shown[0][2]):
            if (layer := layer_of(point)) is not None:
                layers.setdefault(layer, []).append(place)
        step = math.ceil(len(layers) / (26 if wide else 9))
        labels = [f"h.{layer}" if layer % step == 0 else "" for layer in layers]
        axes.set_xticks([sum(inside) / len(inside) for inside in layers.values()], labels)
        axes.tick_params(axis="x", length=0)
        for inside in layers.values():
            axes.axvline(inside[0] - 0.5, color=RULE, linewidth=0.8)
        axes.set(xlim=(-1, len(shown[0][2])), yscale="log", ylabel=what.lower())
        low, high = axes.get_ylim()
        if threshold is not None and low / 30 < threshold < high * 30:
            axes.axhline(threshold, color=MUTED, linewidth=1, linestyle=DASHED, label=f"threshold {threshold:g}")
        logarithmic(axes, "y")
        _legend(axes, 5 if wide else 2)

    return both(name, f"{what} by layer", draw) if shown else ""


def _by_point(axes: Axes, errors: Errors, colour: str, label: str, branches: bool) -> None:
    """Plot a dot per point and a line along the stream, and one along each branch."""
    places = {point: place for place, (point, _) in enumerate(errors)}
    value = {point: error if math.isfinite(error) and error > 0 else math.nan for point, error in errors}
    axes.plot(list(places.values()), list(value.values()), ".", color=MUTED if branches else colour, markersize=3, alpha=0.5)
    stream = [point for point in places if point == "embed" or (point.startswith("h.") and point.count(".") == 1)]
    lines: list[tuple[str, list[str], str, Any, float, str]] = [(label, stream, colour, "-", 2.2, "o")]
    for part, style, marker in (("attn", "-", "s"), ("mlp", (0, (3, 2)), "D")) if branches else ():
        branch = [point for point in places if point.endswith(f"{part}.c_proj")]
        lines.append(("attention output" if part == "attn" else "mlp output", branch, INK, style, 1.1, marker))
    for text, points, ink, style, width, marker in lines:
        look: Any = {"color": ink, "linewidth": width, "linestyle": style, "markersize": 4.5 if width > 2 else 3.2}
        marker = "" if len(errors) > 300 else marker
        axes.plot([places[point] for point in points], [value[point] for point in points], label=text, marker=marker, **look)


def kl_by_token(kl_ab: Divergence, kl_ba: Divergence) -> str:
    """Draw how many tokens have each KL, for the upper eight decades, with the median and the 99th percentile."""
    if not (kl_ab.histogram or kl_ba.histogram):
        return ""
    least = max(high for each in (kl_ab, kl_ba) for _, high, _ in each.histogram) / 1e8

    def draw(axes: Axes, wide: bool) -> None:
        for each, colour, filled, label in ((kl_ab, B, True, "KL(A‖B)"), (kl_ba, INK, False, "KL(B‖A)")):
            if bins := [bar for bar in each.histogram if bar[0] >= least]:
                edges = [bins[0][0], *(high for _, high, _ in bins)]
                alpha, width = (0.75, 0) if filled else (None, 1.1)
                axes.stairs([n for *_, n in bins], edges, fill=filled, label=label, color=colour, alpha=alpha, linewidth=width)
        logarithmic(axes, "x")
        top = axes.get_ylim()[1] * 1.12
        axes.set_ylim(0, top)
        for text, key, side, at in (("median", "50", "right", -3), ("99 %", "99", "left", 3)):
            if least <= (value := kl_ab.percentiles[key]) <= 1e8 * least:
                axes.axvline(value, color=MUTED, linewidth=0.9, linestyle=DASHED)
                place: Any = {"xytext": (at, -3), "textcoords": "offset points", "ha": side, "va": "top"}
                axes.annotate(text, (value, top), fontsize=7.5, color=MUTED, **place)
        axes.set(xlabel="KL of a token, nats", ylabel="tokens")
        _legend(axes)

    return both("histogram", "How many tokens have which divergence", draw)


def part_bars(parts: Sequence[Part], name: str) -> str:
    """Draw the KL of each part alone with its interval, and as a line the KL with all parts before it; wide and narrow."""

    def draw(axes: Axes, wide: bool) -> None:
        places = range(len(parts))
        values = [_finite(part.alone.value) for part in parts]
        below = [max(0.0, value - _finite(part.alone.low)) for value, part in zip(values, parts, strict=True)]
        above = [max(0.0, _finite(part.alone.high) - value) for value, part in zip(values, parts, strict=True)]
        error = {"ecolor": INK, "elinewidth": 1.1, "capsize": 2}
        axes.barh(places, values, height=0.62, color=B, alpha=0.75, xerr=[below, above], error_kw=error, label="alone")
        steps = [_finite(part.in_order.value) for part in parts if part.in_order is not None]
        if len(steps) == len(parts) > 1:
            axes.plot(steps, places, color=A, linewidth=1.6, marker="o", markersize=4, label="with all before it")
            _legend(axes)
        axes.set_yticks(places, [part.name for part in parts])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: number(value, ".3g"))
        axes.locator_params(axis="x", nbins=4)
        axes.grid(False, axis="y")
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("KL, nats a token")

    return both(name, "What each part of B carries", draw, ROW * len(parts) + 0.75, 0.8) if parts else ""


def quality(comparisons: Comparisons, *, by_step: bool) -> str:
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
        return ""
    across = {x: x if by_step else math.log(x) for _, x, *_ in points}
    width = max(across.values()) - min(across.values()) or 1.0
    height = max(bits for _, _, bits, _ in points) - min(bits for _, _, bits, _ in points) or 1.0
    labels: dict[tuple[float, float], str] = {}  # models near one another have one label
    for letter, x, bits, _ in points:
        near = [at for at in labels if abs(across[at[0]] - across[x]) < 0.05 * width and abs(at[1] - bits) < 0.07 * height]
        at = near[0] if near else (x, bits)
        labels[at] = f"{labels[at]} {letter}" if near else letter

    def draw(axes: Axes, wide: bool) -> None:
        for letter, place, bits, span in reversed(points):  # the first one on top
            colour = A if letter == comparisons.letters[0] else B
            if all(map(math.isfinite, span)):
                axes.plot([place, place], span, color=colour, linewidth=1.2, alpha=0.6)
            axes.plot([place], [bits], "o", color=colour, markersize=6)
        for at, text in labels.items():
            axes.annotate(text, at, xytext=(7, 4), textcoords="offset points", color=INK)
        if by_step:
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
            axes.plot([place for _, place, *_ in points], [bits for _, _, bits, _ in points], color=B, linewidth=1, alpha=0.5)
        else:
            axes.set_xscale("log")
            ticks: list[float] = []
            for place in sorted(across):
                if not ticks or across[place] - across[ticks[-1]] > 0.6 / (WIDE if wide else NARROW)[0] * width:
                    ticks.append(place)
            axes.set_xticks(ticks, labels=[f"{place:.3g}" for place in ticks])
            axes.set_xticks([], minor=True)
        axes.margins(x=0.12, y=0.15)
        axes.set(xlabel="training step" if by_step else "size, MB", ylabel=comparisons.bits_per)

    return both("quality", "Quality by training step" if by_step else "Quality against size", draw)
