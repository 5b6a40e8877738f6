"""What a comparison's page alone shows: errors by layer, shaded texts and tables, and how it was made."""

import math
import shlex
from collections.abc import Sequence
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from gpt2.comparison.passage import Scored
from gpt2.comparison.sides.side import ComparedModel
from gpt2.comparison.sides.trace_side import PREFIX as TRACE
from gpt2.comparison.tensors import TensorChange
from gpt2.comparison.words import Word
from gpt2.measure.environment import Environment
from gpt2.measure.tracing import layer_of
from gpt2.pages.drawing import INK, LEVELS, MUTED, RULE, B, both, logarithmic, shade
from gpt2.pages.rendering import number, percent, readable, visible
from gpt2.pages.reports import Column, Section, Styled, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def errors_by_layer(errors: Sequence[tuple[str, float]], threshold: float) -> str:
    """Draw (traced point, relative error) in the order of computation, wide and narrow; nothing if no error is above 0."""
    value = {point: error if math.isfinite(error) and error > 0 else math.nan for point, error in errors}
    places = {point: place for place, point in enumerate(value)}
    stream = [point for point in value if point == "embed" or (point.startswith("h.") and point.count(".") == 1)]
    attn, mlp = ([point for point in value if point.endswith(f"{part}.c_proj")] for part in ("attn", "mlp"))
    lines: list[tuple[str, list[str], str, Any, float, str]] = [("stream", stream, B, "-", 2.2, "o")]
    lines += [("attention output", attn, INK, "-", 1.1, "s"), ("mlp output", mlp, INK, (0, (3, 2)), 1.1, "D")]

    def draw(axes: "Axes", wide: bool) -> None:
        axes.plot(list(places.values()), list(value.values()), ".", color=MUTED, markersize=3, alpha=0.5, label="every point")
        for text, points, ink, style, width, marker in lines:
            look: Any = {"color": ink, "linewidth": width, "linestyle": style, "markersize": 4.5 if width > 2 else 3.2}
            look["marker"] = "" if len(errors) > 300 else marker
            axes.plot([places[point] for point in points], [value[point] for point in points], label=text, **look)
        layers: dict[int, list[int]] = {}
        for place, point in enumerate(value):
            if (layer := layer_of(point)) is not None:
                layers.setdefault(layer, []).append(place)
        step = math.ceil(len(layers) / (26 if wide else 9))
        labels = [f"h.{layer}" if layer % step == 0 else "" for layer in layers]
        axes.set_xticks([sum(inside) / len(inside) for inside in layers.values()], labels)
        axes.tick_params(axis="x", length=0)
        for inside in layers.values():
            axes.axvline(inside[0] - 0.5, color=RULE, linewidth=0.8)
        axes.set(xlim=(-1, len(errors)), yscale="log", ylabel="relative error")
        low, high = axes.get_ylim()
        if low / 30 < threshold < high * 30:
            axes.axhline(threshold, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=f"threshold {threshold:g}")
        logarithmic(axes)
        legend: Any = {"ncols": 5 if wide else 2, "handlelength": 1.4, "columnspacing": 1.6, "borderpad": 0}
        axes.figure.legend(loc="outside upper left", **legend)

    return "" if all(map(math.isnan, value.values())) else both("layers", "Relative error by layer", draw)


def coloured(extracts: Sequence[tuple[str, Sequence[Word]]], scale: float, names: tuple[str, str]) -> str:
    """Return texts as HTML, each with a remark below it: a token's shade is its divergence, its tip what both expected."""
    from markupsafe import Markup

    token = Markup('<span class="tok s{}{}" tabindex="-1" data-tip="{}">{}</span>')
    text = Markup('<div><div class="text{}">{}</div><p class="remark">{}</p></div>')
    drawn = []
    for remark, words in extracts:
        shades = (shade(math.sqrt(word.js / scale) if word.js > 0 else word.js) for word in words)
        each = zip(shades, words, strict=True)
        tokens = (token.format(n, " nl" * ("\n" in word.text), tip(word, names), readable(word.text)) for n, word in each)
        drawn.append(text.format("" if remark else " long", Markup("").join(tokens), remark))
    key = Markup('<p class="key">equal<span class="ramp"></span>JS {}</p>').format(number(scale, ".2g"))
    return key + Markup('<div class="extracts">{}</div>').format(Markup("").join(drawn))


def tip(word: Word, names: tuple[str, str]) -> str:
    """Return what is shown of a token that is pointed at: its divergence, and both models' most likely candidates."""
    lines = [f"{visible(word.text)}   JS {number(word.js)}"]
    sides = zip(names, (word.probability_a, word.probability_b), (word.top_a, word.top_b), strict=True)
    for name, probability, top in sides:
        expected = ", ".join(f"“{visible(each.text)}” {percent(each.probability)}" for each in top)
        lines.append(f"{name}: {expected}; the text's {percent(probability)}")
    return "\n".join(lines)


def heat(tensors: Sequence[TensorChange]) -> Section:
    """Return the relative distances as a table for pages: a row for each kind of tensor, a column for each layer."""
    largest = max((each.distance for each in tensors if math.isfinite(each.distance)), default=0.0)
    shaded = [Styled(in_percent(each.distance), f"s{heat_shade(each.distance, largest)}") for each in tensors]
    cells = {(each.family, each.layer): cell for each, cell in zip(tensors, shaded, strict=True)}
    layers = sorted({each.layer for each in tensors if each.layer is not None})
    families = dict.fromkeys(family for family, _ in cells)
    rows = [(name.removeprefix("h.{}."), *(cells.get((name, layer), "") for layer in (None, *layers))) for name in families]
    shades = f"; shades are logarithmic, the darkest from {percent(largest)} up" * bool(largest)
    columns = Column(), *numbers("outside", *(f"h.{layer}" for layer in layers))
    return Section("Each tensor", f"the norm of the change in percent of the tensor's{shades}", columns, rows, for_pages=True)


def heat_shade(distance: float, largest: float) -> int:
    """Return the shade of a relative distance, of three decades below the ``largest``; only 0 has none."""
    if distance == 0 or not 0 < distance < largest:
        return 0 if distance == 0 else LEVELS - 1
    return shade(max(0.04, 1 + math.log10(distance / largest) / 3))


def in_percent(distance: float) -> str:
    """Format a relative distance in percent, without the sign, in a few characters."""
    if distance == 0 or not math.isfinite(distance):
        return "=" if distance == 0 else "∞" if distance > 0 else "?"
    share = 100 * distance
    return f"{share:.0f}" if share >= 99.5 else f"{share:#.2g}".rstrip(".") if share >= 0.01 else f"{share:.0e}"


def made_with(page: str, models: Sequence[ComparedModel], text: Scored, environment: Environment, **options: object) -> Section:
    """Return the section of a page that says how to make it again; of models in memory as a call in Python."""
    if not any(model.name.startswith(TRACE) for model in models):  # which hold their own text
        options = ({"on": text.name} if text.sha256 else {}) | {"tokens": text.tokens, **options}
    words = [word for name, value in options.items() for word in (f"--{name}", *([] if value is True else [str(value)]))]
    rows = [("command", shlex.join(["gpt2", "compare", *(model.name for model in models), *words, "--html", page]))]
    if any(model.in_memory for model in models):
        names = (letter if model.in_memory else repr(model.name) for letter, model in zip(ascii_lowercase, models, strict=False))
        rows = [("call", f"gpt2.compare({', '.join((*names, *(f'{name}={value!r}' for name, value in options.items())))})")]
    holders: dict[tuple[str, str], list[str]] = {}
    for model in models:
        size = "" if model.parameters is None else f"{model.parameters:,} parameters"
        known: tuple[object, ...] = f"run by {model.implementation}", model.dtype, size, model.revision, model.official
        rows.append((model.name, ", ".join(str(each) for each in known if each)))
        for file in model.files.items():
            holders.setdefault(file, []).append(model.name)
    for (name, digest), those in sorted(holders.items(), key=lambda each: each[0][0]):
        rows.append((f"{name} of {'each' if len(those) == len(models) > 1 else ', '.join(those)}", f"sha256 {digest}"))
    rows += [("text", " ".join(filter(None, (text.name, text.sha256 and f"sha256 {text.sha256}", text.told))))]
    rows += [("versions", ", ".join(f"{name} {version}" for name, version in environment.versions.items()))]
    threads = f"{environment.threads} thread{'s' * (environment.threads != 1)}"
    rows += [("machine", f"{environment.device}, {threads}; {environment.machine}")]
    return Section("Made with", columns=("", ""), rows=rows)
