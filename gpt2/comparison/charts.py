"""Draw the charts of a comparison's page: errors by layer, tokens by KL, parts, quality against size, shaded texts and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpt2.measure.estimates import Estimate
from gpt2.measure.metrics import MAX_JS
from gpt2.measure.tracing import layer_of
from gpt2.pages.drawing import INK, LEVELS, MUTED, NARROW, RULE, WIDE, A, B, both, logarithmic, shade
from gpt2.pages.rendering import number, percent, readable, visible
from gpt2.pages.reports import Column, Section, Styled, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gpt2.comparison.distributions import Divergence
    from gpt2.comparison.weights import TensorChange
    from gpt2.comparison.words import Word

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


def part_bars(parts: Sequence[tuple[str, Estimate, Estimate | None]], name: str) -> str:
    """Draw the KL of each part alone with its interval, and as a line the KL with all parts before it; wide and narrow."""

    def draw(axes: Axes, wide: bool) -> None:
        places = range(len(parts))
        values = [_finite(alone.value) for _, alone, _ in parts]
        below = [max(0.0, value - _finite(alone.low)) for value, (_, alone, _) in zip(values, parts, strict=True)]
        above = [max(0.0, _finite(alone.high) - value) for value, (_, alone, _) in zip(values, parts, strict=True)]
        error = {"ecolor": INK, "elinewidth": 1.1, "capsize": 2}
        axes.barh(places, values, height=0.62, color=B, alpha=0.75, xerr=[below, above], error_kw=error, label="alone")
        steps = [_finite(in_order.value) for *_, in_order in parts if in_order is not None]
        if len(steps) == len(parts) > 1:
            axes.plot(steps, places, color=A, linewidth=1.6, marker="o", markersize=4, label="with all before it")
            _legend(axes)
        axes.set_yticks(places, [part for part, *_ in parts])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: number(value, ".3g"))
        axes.locator_params(axis="x", nbins=4)
        axes.grid(False, axis="y")
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("KL, nats a token")

    return both(name, "What each part of B carries", draw, ROW * len(parts) + 0.75, 0.8) if parts else ""


def quality(points: Sequence[tuple[str, float, float, tuple[float, float]]], by_step: bool, bits_per: str) -> str:
    """Draw (letter, place, bits, their interval) of several models, wide and narrow: against the size in MB, or the step.

    Nothing if fewer than two models have a place on both axes.
    """
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
            colour = A if letter in ("A", "1") else B
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
        axes.set(xlabel="training step" if by_step else "size, MB", ylabel=bits_per)

    return both("quality", "Quality by training step" if by_step else "Quality against size", draw)


def coloured(extracts: Sequence[tuple[str, Sequence[Word]]], scale: float, names: tuple[str, str]) -> str:
    """Return texts as HTML, each with a remark below it: a token's shade is its divergence, its tooltip what both expected."""
    from markupsafe import Markup

    token = Markup('<span class="tok s{}{}" tabindex="{}" data-tip="{}">{}</span>')
    text = Markup('<div><div class="text{}" data-names="{}">{}</div><p class="remark">{}</p></div>')
    drawn = []
    for remark, words in extracts:
        shades = (shade(math.sqrt(word.js / scale) if word.js > 0 else word.js) for word in words)
        tokens = (
            token.format(level, " nl" * ("\n" in word.text), -bool(at), json.dumps(tooltip(word)), readable(word.text))
            for at, (level, word) in enumerate(zip(shades, words, strict=True))
        )
        drawn.append(text.format("" if remark else " long", json.dumps(names), Markup("").join(tokens), remark))
    key = Markup('<p class="key">equal<span class="ramp"></span>JS {}</p>').format(number(scale, ".2g"))
    return key + Markup('<div class="extracts">{}</div>').format(Markup("").join(drawn))


def tooltip(word: Word) -> list[Any]:
    """Return a token's tooltip: its text, divergence, both probabilities, and both models' most likely candidates."""
    probabilities = _rounded(word.probability_a), _rounded(word.probability_b)
    tops = ([[visible(each.text), _rounded(each.probability)] for each in top] for top in (word.top_a, word.top_b))
    return [visible(word.text), number(word.js), *probabilities, *tops]


def _rounded(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def js_scale(values: Sequence[float]) -> float:
    """Return the divergence of the darkest colour: log 2, its maximum, or the largest value if all are below 0.02."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    return MAX_JS if largest > 0.02 or largest == 0 else largest


def heat(tensors: Sequence[TensorChange]) -> Section:
    """Return the relative distances as a table for pages: a row for each kind of tensor, a column for each layer."""
    scale = heat_scale([tensor.distance for tensor in tensors])
    shaded = [Styled(in_percent(each.distance), f"s{heat_shade(each.distance, scale)}") for each in tensors]
    cells = {(each.family, each.layer): cell for each, cell in zip(tensors, shaded, strict=True)}
    layers = sorted({each.layer for each in tensors if each.layer is not None})
    families = dict.fromkeys(family for family, _ in cells)
    rows = [(name.removeprefix("h.{}."), *(cells.get((name, layer), "") for layer in (None, *layers))) for name in families]
    shades = f"; shades are logarithmic, {percent(scale[0])} to {percent(scale[1])}" if scale else ""
    columns = Column(), *numbers("outside", *(f"h.{layer}" for layer in layers))
    return Section("Each tensor", f"the norm of the change in percent of the tensor's{shades}", columns, rows, for_pages=True)


def heat_scale(distances: Sequence[float]) -> tuple[float, float] | None:
    """Return both ends of a heat map's logarithmic scale: one to three decades up to the largest finite distance."""
    positive = sorted(distance for distance in distances if math.isfinite(distance) and distance > 0)
    if not positive:
        return None
    return min(max(positive[0], positive[-1] / 1000), positive[-1] / 10) or positive[-1], positive[-1]


def heat_shade(distance: float, scale: tuple[float, float] | None) -> int:
    """Return the shade of a relative distance; infinity has the darkest shade."""
    if distance == 0 or scale is None:
        return 0 if distance == 0 else LEVELS - 1
    if not math.isfinite(distance) or scale[0] == scale[1]:
        return LEVELS - 1
    return shade(max(0.04, math.log(distance / scale[0]) / math.log(scale[1] / scale[0])))


def in_percent(distance: float) -> str:
    """Format a relative distance in percent, without the sign, in a few characters."""
    if distance == 0 or not math.isfinite(distance):
        return "=" if distance == 0 else "∞" if distance > 0 else "?"
    share = 100 * distance
    return f"{share:.0f}" if share >= 99.5 else f"{share:#.2g}".rstrip(".") if share >= 0.01 else f"{share:.0e}"
