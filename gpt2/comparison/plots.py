"""Draw the charts of a comparison's page: errors by layer, changes by weight, histograms, calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpt2.comparison.activations import ActivationChange
from gpt2.comparison.distributions import Bin, Calibration
from gpt2.comparison.weights import TensorChange
from gpt2.measure.tracing import layer_of
from gpt2.pages.drawing import INK, LEVELS, MUTED, NARROW, PAPER, RULE, SHADES, SMALL, WIDE, A, B, shade, svg
from gpt2.pages.rendering import power_of_ten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LineStyle = str | tuple[int, tuple[int, int]]
LEGEND_ROW = 48  # characters of two labels that fit a row of a small chart's legend
DASHED: LineStyle = (0, (4, 3))
Errors = Sequence[tuple[str, float]]  # (traced point, relative error), in the order of computation


def divergence_by_layer(points: Sequence[ActivationChange], threshold: float) -> list[str]:
    """Draw the relative error at each traced point, wide and narrow; nothing if no error is finite and above 0."""
    errors = [(point.point, point.error) for point in points]

    def draw(wide: bool, axes: Axes) -> None:
        _by_point(axes, errors, B, wide)
        low, high = axes.get_ylim()
        if low / 30 < threshold < high * 30:
            axes.axhline(threshold, color=MUTED, linewidth=1, linestyle=DASHED, label=f"threshold {threshold:g}")
        axes.set_ylabel("relative error")
        _legend(axes, 5 if wide else 2)

    return _wide_and_narrow("layers", "Relative error by layer", draw) if _drawable(error for _, error in errors) else []


def numerics_by_layer(points: Sequence[tuple[str, float, float]], names: tuple[str, str]) -> list[str]:
    """Draw the relative errors of both models against a float64 run, at each traced point, wide and narrow."""
    sides = ([(point, a) for point, a, _ in points], [(point, b) for point, _, b in points])
    shown = [side for side in zip((A, B), names, sides, strict=True) if _drawable(error for _, error in side[2])]

    def draw(wide: bool, axes: Axes) -> None:
        for colour, name, errors in shown:
            _by_point(axes, errors, colour, wide, name)
        axes.set_ylabel("distance from float64")
        _legend(axes)

    return _wide_and_narrow("numerics", "Distance from float64 by layer", draw) if shown else []


def _wide_and_narrow(name: str, title: str, draw: Callable[[bool, Axes], None], height: float | None = None) -> list[str]:
    """Draw the same chart for a wide and for a narrow screen."""
    sizes = ((WIDE, True), (NARROW, False))
    return [_chart(name, (width, height or usual), title, partial(draw, wide)) for (width, usual), wide in sizes]


def _chart(name: str, size: tuple[float, float], title: str, draw: Callable[[Axes], None]) -> str:
    return svg(name, size, title, lambda figure: draw(figure.subplots()))


def _drawable(values: Iterable[float]) -> bool:
    return any(math.isfinite(value) and value > 0 for value in values)


def _by_point(axes: Axes, errors: Errors, colour: str, wide: bool, name: str | None = None) -> None:
    """Plot a dot per point and a line along the stream; without a ``name``, also a line along each branch."""
    places = {point: place for place, (point, _) in enumerate(errors)}
    value = {point: error if math.isfinite(error) and error > 0 else math.nan for point, error in errors}
    axes.plot(list(places.values()), list(value.values()), ".", color=colour if name else MUTED, markersize=3, alpha=0.5)
    stream = [point for point in places if point == "embed" or (point.startswith("h.") and point.count(".") == 1)]
    lines: list[tuple[str, list[str], str, LineStyle, float, str]] = [(name or "stream", stream, colour, "-", 2.2, "o")]
    if name is None:
        attention, mlp = ([point for point in places if point.endswith(f"{part}.c_proj")] for part in ("attn", "mlp"))
        lines.append(("attention output", attention, INK, "-", 1.1, "s"))
        lines.append(("mlp output", mlp, INK, (0, (3, 2)), 1.1, "D"))
    for label, line, ink, style, width, marker in lines:
        axes.plot(
            [places[point] for point in line],
            [value[point] for point in line],
            marker="" if len(errors) > 300 else marker,
            markersize=4.5 if width > 2 else 3.2,
            color=ink,
            linewidth=width,
            linestyle=style,
            label=label,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_power)
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(_power if high < 10 * low else lambda value, at: "")  # else its own are formulas for TeX
    layers: dict[int, list[int]] = {}
    for point, place in places.items():
        if (layer := layer_of(point)) is not None:
            layers.setdefault(layer, []).append(place)
    axes.set_xticks([sum(inside) / len(inside) for inside in layers.values()], _layer_labels(layers, wide))
    axes.tick_params(axis="x", length=0)
    for inside in layers.values():
        axes.axvline(inside[0] - 0.5, color=RULE, linewidth=0.8)
    axes.set_xlim(-1, len(errors))


def _layer_labels(layers: Collection[int], wide: bool) -> list[str]:
    """Return layer labels for an axis, some of them empty if space is short."""
    step = math.ceil(len(layers) / (26 if wide else 9))
    return [f"h.{layer}" if layer % step == 0 else "" for layer in layers]


def _power(value: float, _: object = None) -> str:
    """Format a power of ten as 10⁻⁴, for an axis."""
    exponent = round(math.log10(value)) if value > 0 else 0
    plain = value <= 0 or abs(math.log10(value) - exponent) > 1e-6 or -3 < exponent < 4
    return f"{value:g}" if plain else power_of_ten(exponent)


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


def weight_heat(tensors: Sequence[TensorChange]) -> list[str]:
    """Draw the relative distance of each tensor: a row per family, a column per layer; wide and narrow."""
    distances = {(tensor.family, tensor.layer): tensor.distance for tensor in tensors if tensor.layer is not None}
    scale = heat_scale([tensor.distance for tensor in tensors])
    families = list(dict.fromkeys(family for family, _ in distances))
    layers = sorted({layer for _, layer in distances})
    cells = [[distances.get((family, layer), 0.0) for layer in layers] for family in families]
    labels = [family.removeprefix("h.{}.") for family in families]

    def draw(wide: bool, axes: Axes) -> None:
        text = _percent if len(layers) <= (16 if wide else 6) else None
        _heat(axes, [[heat_shade(cell, scale) for cell in row] for row in cells], cells, text, 8 if wide else 7)
        short = [label if wide else label.replace(".weight", ".w").replace(".bias", ".b") for label in labels]
        axes.set_yticks(range(len(labels)), short)
        axes.set_xticks(range(len(layers)), _layer_labels(layers, wide))

    return _wide_and_narrow("heat", "Relative weight change by layer and tensor", draw, 0.28 * len(families) + 0.4)


def similarity(cka: Sequence[Sequence[float]], names: tuple[str, str]) -> str:
    """Draw the linear CKA of two models' streams, layer by layer."""

    def draw(axes: Axes) -> None:
        text = (lambda value: f"{value:.2f}" if math.isfinite(value) else "–") if len(cka[0]) <= 13 else None
        _heat(axes, [[shade(value) for value in row] for row in cka], cka, text, 7.5)
        for axis, count, name in ((axes.yaxis, len(cka), names[0]), (axes.xaxis, len(cka[0]), names[1])):
            step = math.ceil(count / 16)
            ticks = ["embed", *(f"h.{layer}" for layer in range(count - 1))]
            axis.set_ticks(range(count), [tick if place % step == 0 else "" for place, tick in enumerate(ticks)])
            axis.set_label_text(name)

    height = max(1.6, 0.3 * len(cka) + 0.6) if len(cka) <= 20 else 6.0
    return _chart("cka", (max(4.0, min(8.0, 0.55 * len(cka[0]) + 1)), height), "Similarity of layers (CKA)", draw)


def _heat(
    axes: Axes,
    shades: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]],
    text: Callable[[float], str] | None,
    size: float,
) -> None:
    from matplotlib.colors import ListedColormap

    edges = [[place - 0.5 for place in range(count + 1)] for count in (len(shades[0]), len(shades))]
    axes.pcolormesh(*edges, shades, cmap=ListedColormap(SHADES), vmin=0, vmax=LEVELS - 1, edgecolors=PAPER, linewidth=1.2)
    axes.invert_yaxis()
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    if text:
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                axes.text(column, row, text(value), ha="center", va="center_baseline", fontsize=size, color=INK)


def _percent(distance: float) -> str:
    if distance == 0:
        return "="
    if not math.isfinite(distance):
        return "∞" if distance > 0 else "?"
    percent = 100 * distance
    return f"{percent:.0f}" if percent >= 99.5 else f"{percent:#.2g}".rstrip(".") if percent >= 0.01 else f"{percent:.0e}"


def histogram(
    kl_ab: Sequence[tuple[float, float, int]], kl_ba: Sequence[tuple[float, float, int]], marks: dict[str, float]
) -> str:
    """Draw how many tokens have each divergence, for the upper eight decades; ``marks`` are named vertical lines."""
    least = max(high for bins in (kl_ab, kl_ba) for _, high, _ in bins) / 1e8
    kl_ab, kl_ba = ([bar for bar in bins if bar[0] >= least] for bins in (kl_ab, kl_ba))

    def draw(axes: Axes) -> None:
        for bins, colour, filled, name in ((kl_ab, B, True, "KL(A‖B)"), (kl_ba, INK, False, "KL(B‖A)")):
            if bins:
                edges = [bins[0][0], *(high for _, high, _ in bins)]
                alpha, width = (0.75, 0) if filled else (None, 1.1)
                axes.stairs([n for *_, n in bins], edges, fill=filled, label=name, color=colour, alpha=alpha, linewidth=width)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_power)
        top = axes.get_ylim()[1] * 1.12
        axes.set_ylim(0, top)
        for place, (name, value) in enumerate(marks.items()):
            if least <= value <= 1e8 * least:
                axes.axvline(value, color=MUTED, linewidth=0.9, linestyle=DASHED)
                side = {"xytext": (3, -3)} if place else {"xytext": (-3, -3), "ha": "right"}  # the smaller label on the left
                axes.annotate(name, (value, top), textcoords="offset points", va="top", fontsize=7.5, color=MUTED, **side)
        axes.set(xlabel="nats", ylabel="tokens")
        _legend(axes)

    return _chart("histogram", SMALL, "How many tokens have which divergence", draw)


def by_position(bins: Sequence[Bin]) -> str | None:
    """Draw the mean KL by the number of preceding tokens."""

    def draw(axes: Axes) -> None:
        places = [math.sqrt(bin.low * bin.high) for bin in bins]
        axes.plot(places, [_finite(bin.kl) for bin in bins], color=B, linewidth=2, marker="o", markersize=4.5)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(bottom=0)
        axes.set(xlabel="tokens seen before", ylabel="mean KL(A‖B), nats")

    return _chart("position", SMALL, "Divergence by position", draw) if _drawable(bin.kl for bin in bins) else None


def by_confidence(bins: Sequence[Bin]) -> str | None:
    """Draw the mean KL by the reference's top probability."""

    def draw(axes: Axes) -> None:
        places = [(bin.low + bin.high) / 2 for bin in bins]
        width = 0.86 * (bins[0].high - bins[0].low)
        axes.bar(places, [_finite(bin.kl) for bin in bins], width=width, color=B, alpha=0.75)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set(xlabel="probability A gave its first choice", ylabel="mean KL(A‖B), nats")

    return _chart("confidence", SMALL, "Divergence by confidence", draw) if _drawable(bin.kl for bin in bins) else None


def calibration(a: Calibration, b: Calibration, labels: Sequence[str]) -> str:
    """Draw how often each model's top candidate was right, by its probability; a dot's area is its share of the tokens."""

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=DASHED)
        for side, colour, label in zip((a, b), (A, B), labels, strict=True):
            total = sum(bin.tokens for bin in side.bins) or 1
            where = [bin.confidence for bin in side.bins], [bin.accuracy for bin in side.bins]
            axes.plot(*where, color=colour, linewidth=1.6, label=label)
            axes.scatter(*where, s=[8 + 240 * bin.tokens / total for bin in side.bins], color=colour, alpha=0.85, linewidth=0)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the first choice", ylabel="how often it was right")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:.0%}")
        _legend(axes, 2 if sum(map(len, labels)) < LEGEND_ROW else 1)

    return _chart("calibration", SMALL, "Calibration of both models", draw)


def _legend(axes: Axes, columns: int = 2) -> None:
    axes.figure.legend(loc="outside upper left", ncols=columns, handlelength=1.4, columnspacing=1.6, borderpad=0)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan
