"""The pictures of a report: SVG by matplotlib, drawn once and coloured by the page.

Colours are drawn as placeholders and become CSS variables, so that one picture suits a light and a dark page, and text stays
text, in the page's own font. The same data make the same bytes.

matplotlib is imported at the first picture, with a configuration of our own: no ``matplotlibrc`` of the user's has a say, and
nothing is written to the home folder.
"""

from __future__ import annotations

import io
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .activations import ActivationChange
from .distributions import Bin, Calibration
from .report import layer_of
from .weights import TensorChange

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

LEVELS = 17  # shades from "equal" to "as different as can be"
Bar = tuple[float, float, int]  # from, to, how many

WIDE, NARROW, SMALL = (10.6, 3.2), (3.6, 2.9), (4.4, 2.7)  # inches of 100 px

INK, MUTED, RULE, PAPER, A, B = (f"#00000{n}" for n in range(1, 7))
SHADES = [f"#0001{level:02x}" for level in range(LEVELS)]
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper", A: "--a", B: "--b"} | {
    shade: f"--s{level}" for level, shade in enumerate(SHADES)
}

SETTINGS = {
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.linewidth": 1.0,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.dpi": 100,
    "figure.facecolor": "none",
    "font.size": 8.5,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": RULE,
    "xtick.labelcolor": MUTED,
    "xtick.labelsize": 8,
    "xtick.minor.size": 0,
    "ytick.color": RULE,
    "ytick.labelcolor": MUTED,
    "ytick.labelsize": 8,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


def shade(share: float) -> int:
    """0 .. 1 to one of the LEVELS; 0 is kept for nothing at all."""
    if math.isnan(share):
        return LEVELS - 1
    return 0 if share <= 0 else max(1, math.ceil(min(share, 1.0) * (LEVELS - 1)))


@contextmanager
def matplotlib_of_our_own(**settings: object) -> Iterator[None]:
    """matplotlib with our settings only, for as long as something is drawn."""
    with tempfile.TemporaryDirectory() as folder:
        before = {name: os.environ.get(name) for name in ("MPLCONFIGDIR", "MATPLOTLIBRC")}
        empty = os.path.join(folder, "matplotlibrc")
        open(empty, "w").close()
        os.environ |= {"MPLCONFIGDIR": folder, "MATPLOTLIBRC": empty}
        try:
            import matplotlib
            import matplotlib.figure
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        with matplotlib.rc_context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the page's font has it, or the reader's
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(SETTINGS | settings)
            yield


def svg(name: str, size: tuple[float, float], title: str, draw: Callable[[Figure], None]) -> str:
    """One picture as an inline ``<svg>`` element; ``name`` keeps its ids apart from those of others on the page."""
    with matplotlib_of_our_own(**{"svg.hashsalt": name}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return _inline(file.getvalue(), title)


def _inline(text: str, title: str) -> str:
    from markupsafe import escape

    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]+)"', text).group(1)
    width = float(box.split()[2]) * 100 / 72
    opening = f'<svg viewBox="{box}" style="--w:{width:.0f}px" role="img" aria-label="{escape(title)}"'
    text = opening + ' xmlns:xlink="http://www.w3.org/1999/xlink">' + text[text.index(">") + 1 :]
    text = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var({VARIABLES[m[0]]})" if m[0] in VARIABLES else m[0], text)
    return re.sub(r"\s*\n\s*", "\n", text)


def divergence_by_layer(points: Sequence[ActivationChange], threshold: float, *, wide: bool) -> str | None:
    """Relative error at each traced point in the order of computation; None where none differs by a finite amount."""
    errors = [(point.point, point.error) for point in points]
    if not _drawable(error for _, error in errors):
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _by_point(axes, errors, B, wide)
        low, high = axes.get_ylim()
        if low / 30 < threshold < high * 30:
            axes.axhline(threshold, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=f"threshold {threshold:g}")
        axes.set_ylabel("relative error")
        _legend(axes, 5 if wide else 2)

    return svg("layers", WIDE if wide else NARROW, "Relative error by layer", draw)


def numerics_by_layer(points: Sequence[tuple[str, float, float]], names: tuple[str, str], *, wide: bool) -> str | None:
    """Distance of both sides from a float64 run, at each traced point."""
    if not _drawable(error for _, *both in points for error in both):
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for side, (colour, name) in enumerate(zip((A, B), names, strict=True)):
            errors = [(point[0], point[1 + side]) for point in points]
            if _drawable(error for _, error in errors):
                _by_point(axes, errors, colour, wide, name)
        axes.set_ylabel("distance from float64")
        _legend(axes)

    return svg("numerics", WIDE if wide else NARROW, "Distance from float64 by layer", draw)


def _drawable(values: Iterator[float]) -> bool:
    return any(math.isfinite(value) and value > 0 for value in values)


def _by_point(axes: Axes, errors: Sequence[tuple[str, float]], colour: str, wide: bool, name: str | None = None) -> None:
    """A dot per point and a line through the stream; also, unless ``name`` says whose they are, through both branches."""
    places = {point: place for place, (point, _) in enumerate(errors)}
    value = {point: error if math.isfinite(error) and error > 0 else math.nan for point, error in errors}
    axes.plot(list(places.values()), list(value.values()), ".", color=colour if name else MUTED, markersize=3, alpha=0.5)
    lines = [("stream", lambda p: p == "embed" or (p.startswith("h.") and p.count(".") == 1), colour, "-", 2.2, "o")]
    if name is None:
        lines += [
            ("attention output", lambda p: p.endswith("attn.c_proj"), INK, "-", 1.1, "s"),
            ("mlp output", lambda p: p.endswith("mlp.c_proj"), INK, (0, (3, 2)), 1.1, "D"),
        ]
    many = len(errors) > 300
    for label, chosen, ink, style, width, marker in lines:
        at = [point for point in places if chosen(point)]
        axes.plot(
            [places[point] for point in at],
            [value[point] for point in at],
            marker="" if many else marker,
            markersize=4.5 if width > 2 else 3.2,
            color=ink,
            linewidth=width,
            linestyle=style,
            label=name or label,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_power)
    layers: dict[int, list[int]] = {}
    for point, place in places.items():
        if (layer := layer_of(point)) is not None:
            layers.setdefault(layer, []).append(place)
    step = math.ceil(len(layers) / (26 if wide else 9))
    axes.set_xticks([sum(at) / len(at) for at in layers.values()], [f"h.{n}" if n % step == 0 else "" for n in layers])
    axes.tick_params(axis="x", length=0)
    for at in layers.values():
        axes.axvline(at[0] - 0.5, color=RULE, linewidth=0.8)
    axes.set_xlim(-1, len(errors))


def _power(value: float, _: object = None) -> str:
    """A power of ten as it is written by hand."""
    exponent = round(math.log10(value)) if value > 0 else 0
    if value <= 0 or abs(math.log10(value) - exponent) > 1e-6:
        return f"{value:g}"
    if -3 < exponent < 4:
        return f"{value:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def heat_scale(distances: Sequence[float]) -> tuple[float, float] | None:
    """Both ends of the logarithmic scale of a heat map: one to three decades, the upper end the largest finite distance."""
    positive = sorted(distance for distance in distances if math.isfinite(distance) and distance > 0)
    if not positive:
        return None
    return min(max(positive[0], positive[-1] / 1000), positive[-1] / 10) or positive[-1], positive[-1]


def heat_shade(distance: float, scale: tuple[float, float] | None) -> int:
    """The shade of a relative distance; an infinite one is as dark as the largest."""
    if distance == 0 or scale is None:
        return 0 if distance == 0 else LEVELS - 1
    if not math.isfinite(distance) or scale[0] == scale[1]:
        return LEVELS - 1
    return shade(max(0.04, math.log(distance / scale[0]) / math.log(scale[1] / scale[0])))


def weight_heat(tensors: Sequence[TensorChange], *, wide: bool) -> str | None:
    """Relative distance of each tensor of each layer: a row per family, a column per layer."""
    inside = [tensor for tensor in tensors if tensor.layer is not None]
    if not inside:
        return None
    scale = heat_scale([tensor.distance for tensor in tensors])
    families = list(dict.fromkeys(tensor.family for tensor in inside))
    layers = sorted({tensor.layer for tensor in inside})
    found = {(tensor.family, tensor.layer): tensor.distance for tensor in inside}
    cells = [[found.get((family, layer), 0.0) for layer in layers] for family in families]
    labels = [family.removeprefix("h.{}.") for family in families]
    if not wide:
        labels = [label.replace(".weight", ".w").replace(".bias", ".b") for label in labels]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        told = (lambda distance: _percent(distance)) if len(layers) <= (16 if wide else 6) else None
        _heat(axes, [[heat_shade(cell, scale) for cell in row] for row in cells], cells, told, 8 if wide else 7)
        axes.set_yticks(range(len(labels)), labels)
        step = math.ceil(len(layers) / (26 if wide else 9))
        axes.set_xticks(range(len(layers)), [f"h.{layer}" if layer % step == 0 else "" for layer in layers])

    height = 0.28 * len(families) + 0.4
    return svg("heat", ((WIDE if wide else NARROW)[0], height), "Relative weight change by layer and tensor", draw)


def similarity(cka: Sequence[Sequence[float]], names: tuple[str, str]) -> str:
    """Linear CKA of the streams of two models of different widths, layer by layer."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        told = (lambda value: f"{value:.2f}" if math.isfinite(value) else "–") if len(cka[0]) <= 13 else None
        _heat(axes, [[shade(value) for value in row] for row in cka], cka, told, 7.5)
        for axis, count, name in ((axes.yaxis, len(cka), names[0]), (axes.xaxis, len(cka[0]), names[1])):
            step = math.ceil(count / 16)
            ticks = ["embed", *(f"h.{layer}" for layer in range(count - 1))]
            axis.set_ticks(range(count), [tick if place % step == 0 else "" for place, tick in enumerate(ticks)])
            axis.set_label_text(name)

    height = max(1.6, 0.3 * len(cka) + 0.6) if len(cka) <= 20 else 6.0
    return svg("cka", (max(4.0, min(8.0, 0.55 * len(cka[0]) + 1)), height), "Similarity of layers (CKA)", draw)


def _heat(
    axes: Axes,
    shades: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]],
    told: Callable[[float], str] | None,
    size: float,
) -> None:
    from matplotlib.colors import ListedColormap

    edges = [[place - 0.5 for place in range(count + 1)] for count in (len(shades[0]), len(shades))]
    axes.pcolormesh(*edges, shades, cmap=ListedColormap(SHADES), vmin=0, vmax=LEVELS - 1, edgecolors=PAPER, linewidth=1.2)
    axes.invert_yaxis()
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    if told:
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                axes.text(column, row, told(value), ha="center", va="center_baseline", fontsize=size, color=INK)


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
    """How many tokens have which divergence, the last eight decades; ``marks`` are named lines across, percentiles."""
    least = max(high for bins in (kl_ab, kl_ba) for _, high, _ in bins) / 1e8
    kl_ab, kl_ba = ([bar for bar in bins if bar[0] >= least] for bins in (kl_ab, kl_ba))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for bins, colour, filled, name in ((kl_ab, B, True, "KL(A‖B)"), (kl_ba, INK, False, "KL(B‖A)")):
            if not bins:
                continue
            edges = [bins[0][0], *(high for _, high, _ in bins)]
            counts = [count for *_, count in bins]
            style = {"facecolor": colour, "alpha": 0.75} if filled else {"edgecolor": colour, "linewidth": 1.1}
            axes.stairs(counts, edges, fill=filled, label=name, **style)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_power)
        top = axes.get_ylim()[1] * 1.12
        axes.set_ylim(0, top)
        for place, (name, value) in enumerate(marks.items()):
            if least <= value <= 1e8 * least:
                axes.axvline(value, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
                side = {"xytext": (3, -3)} if place else {"xytext": (-3, -3), "ha": "right"}  # the smaller to the left
                axes.annotate(name, (value, top), textcoords="offset points", va="top", fontsize=7.5, color=MUTED, **side)
        axes.set(xlabel="nats", ylabel="tokens")
        _legend(axes)

    return svg("histogram", SMALL, "How many tokens have which divergence", draw)


def by_position(bins: Sequence[Bin]) -> str | None:
    """Mean KL by how many tokens were seen before."""
    if not _drawable(found.kl for found in bins):
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places = [math.sqrt(found.low * found.high) for found in bins]
        axes.plot(places, [_finite(found.kl) for found in bins], color=B, linewidth=2, marker="o", markersize=4.5)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(bottom=0)
        axes.set(xlabel="tokens seen before", ylabel="mean KL(A‖B), nats")

    return svg("position", SMALL, "Divergence by position", draw)


def by_confidence(bins: Sequence[Bin]) -> str | None:
    """Mean KL by how sure the reference was of its likeliest token."""
    if not _drawable(found.kl for found in bins):
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places = [(found.low + found.high) / 2 for found in bins]
        width = 0.86 * (bins[0].high - bins[0].low)
        axes.bar(places, [_finite(found.kl) for found in bins], width=width, color=B, alpha=0.75)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set(xlabel="probability A gave its first choice", ylabel="mean KL(A‖B), nats")

    return svg("confidence", SMALL, "Divergence by confidence", draw)


def calibration(a: Calibration, b: Calibration, labels: tuple[str, str]) -> str:
    """How often the first choice was right against how sure the model was; a dot's area is its share of the tokens."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
        for side, colour, label in ((a, A, labels[0]), (b, B, labels[1])):
            total = sum(found.tokens for found in side.bins) or 1
            where = [found.confidence for found in side.bins], [found.accuracy for found in side.bins]
            axes.plot(*where, color=colour, linewidth=1.6, label=label)
            axes.scatter(*where, s=[8 + 240 * found.tokens / total for found in side.bins], color=colour, alpha=0.85, linewidth=0)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the first choice", ylabel="how often it was right")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:.0%}")
        _legend(axes)

    return svg("calibration", SMALL, "Calibration of both models", draw)


def _legend(axes: Axes, columns: int = 2) -> None:
    axes.figure.legend(loc="outside upper left", ncols=columns, handlelength=1.4, columnspacing=1.6, borderpad=0)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


LIGHT = {INK: "#23211d", MUTED: "#716b61", RULE: "#e6e1d8", PAPER: "#fdfcfa"}
POSITIVE, NEGATIVE = (0xD8, 0x62, 0x28), (0x3F, 0x7F, 0xC4)  # seen on a light page and on a dark one
LABELLED = 24  # tokens that are named along the edges


def attention_svg(maps: Tensor, tokens: Sequence[str], *, signed: bool) -> str:
    """Small multiples of (layers, heads, T, T): a row per layer, a column per head.

    Colour is laid on in proportion to the root of a weight, so that small ones are seen; ``signed`` differences in two colours,
    scaled by the largest.
    """
    size, draw = _attention(maps, tokens, signed)
    return svg("attention-difference" if signed else "attention", size, "Attention weights of every head", draw)


def attention_png(maps: Tensor, tokens: Sequence[str], *, signed: bool) -> bytes:
    """The same as a picture on light ground."""
    light = {name: LIGHT.get(value, value) if isinstance(value, str) else value for name, value in SETTINGS.items()}
    with matplotlib_of_our_own(**light):
        from matplotlib.figure import Figure

        size, draw = _attention(maps, tokens, signed)
        figure = Figure(figsize=size)
        draw(figure)
        file = io.BytesIO()
        pixels = size[0] * size[1] * 200**2
        dpi = 200 if pixels < 4e7 else 100
        figure.savefig(file, format="png", dpi=dpi, facecolor=LIGHT[PAPER], metadata={"Software": None})
    return file.getvalue()


def _attention(maps: Tensor, tokens: Sequence[str], signed: bool) -> tuple[tuple[float, float], Callable[[Figure], None]]:
    """Size in inches, and how to draw it: all heads are one image, for a thousand axes would take a minute."""
    import numpy as np

    layers, heads, n, _ = maps.shape
    named = n <= LABELLED
    cell = 9 if n <= LABELLED else max(1, 150 // n)  # pixels
    while cell > 3 and heads * n * cell > 2400:
        cell -= 1
    named = named and cell >= 7
    gap = max(1, round(10 / cell))
    step = n + gap
    values = maps.double().numpy()
    scale = np.abs(values[np.isfinite(values)]).max(initial=0) or 1.0
    image = np.zeros((layers * step - gap, heads * step - gap, 4), dtype=np.uint8)
    for layer in range(layers):
        for head in range(heads):
            value = np.nan_to_num(values[layer, head])
            panel = image[layer * step : layer * step + n, head * step : head * step + n]
            panel[..., :3] = np.where(value[..., None] < 0, NEGATIVE, POSITIVE)
            share = np.sqrt(np.clip(np.abs(value) / (scale if signed else 1.0), 0, 1))
            panel[..., 3] = 5 * np.rint(51 * share)  # fewer shades than the eye tells apart, in half the bytes
    texts = [_label(token) for token in tokens] if named else []
    longest = max(map(len, texts), default=0)
    left, top, bottom = 34 + 6 * longest, 24, (8 + 6 * longest if named else 8)
    width, height = image.shape[1] * cell, image.shape[0] * cell
    size = ((left + width + 4) / 100, (top + height + bottom) / 100)

    def draw(figure: Figure) -> None:
        import matplotlib
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Rectangle

        figure.set_layout_engine("none")
        across, down = size[0] * 100, size[1] * 100
        axes = figure.add_axes((left / across, bottom / down, width / across, height / down))
        axes.imshow(image, interpolation="none", aspect="auto", extent=(0, image.shape[1], image.shape[0], 0))
        frames = [Rectangle((h * step, r * step), n, n) for r in range(layers) for h in range(heads)]
        edge = matplotlib.rcParams["axes.edgecolor"]
        axes.add_collection(PatchCollection(frames, facecolor="none", edgecolor=edge, linewidth=0.6))
        axes.set(xlim=(-0.1, image.shape[1] + 0.1), ylim=(image.shape[0] + 0.1, -0.1))
        axes.grid(False)
        axes.axis("off")
        ink, muted = matplotlib.rcParams["text.color"], matplotlib.rcParams["axes.labelcolor"]
        for head in range(heads):
            name = f"head {head}" if n * cell >= 48 else str(head)
            axes.text(head * step + n / 2, -5 / cell, name, ha="center", va="bottom", fontsize=7, color=ink)
        for layer in range(layers):
            place = layer * step + n / 2
            axes.text(-(left - 2) / cell, place, f"h.{layer}", ha="left", va="center", fontsize=7, color=ink)
            for row, text in enumerate(texts):
                where = -4 / cell, layer * step + row + 0.5
                axes.text(*where, text, ha="right", va="center", fontsize=5.6, color=muted)
        for head in range(heads):
            for column, text in enumerate(texts):
                where = head * step + column + 0.5, image.shape[0] + 4 / cell
                axes.text(*where, text, ha="center", va="top", fontsize=5.6, color=muted, rotation=90)

    return size, draw


def _label(token: str) -> str:
    from .comparison import visible

    text = visible(token)
    return text if len(text) <= 10 else text[:9] + "…"
