"""A comparison as one self-contained page: nothing is fetched, and what comes from models and files is text, never markup.

The page's policy allows no request and no script but its own, by hash, so that even a mistake here could run nothing.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.comparison import plots
from gpt2.comparison.distributions import Estimate
from gpt2.errors import InputError
from gpt2.explore import attention_plots
from gpt2.pages import drawing

if TYPE_CHECKING:
    from torch import Tensor

    from gpt2.comparison.results import Comparison, Model
    from gpt2.comparison.words import Choice, Continuation, Passage, Word
    from gpt2.explore.attention import AttentionReport

LEGEND = 40  # characters of a name that fit a legend
VIEWED = 500_000  # weights that a page carries to be looked at one by one
LARGEST = math.log(2)  # Jensen-Shannon divergence, nats


def save(comparison: Comparison, path: Path) -> None:
    """Write the page.

    Raises:
        InputError: the file cannot be written.
    """
    write(path, page(comparison))


def write(path: Path, text: str) -> None:
    try:
        # A file's name may hold bytes that are no text.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def page(comparison: Comparison) -> str:
    """The page as text."""
    names = short_names(comparison.a, comparison.b)
    found, weights, activations, words = (
        comparison.distributions,
        comparison.weights,
        comparison.activations,
        comparison.words,
    )
    pictures: dict[str, Any] = dict.fromkeys(
        ("layers", "cka", "heat", "numerics", "histogram", "position", "confidence", "calibration")
    )
    if activations is not None:
        pictures["layers"] = [
            plots.divergence_by_layer(activations.points, activations.threshold, wide=wide) for wide in (True, False)
        ]
        pictures["cka"] = plots.similarity(activations.cka, names) if activations.cka else None
    if weights is not None and weights.total.unchanged < 1:
        pictures["heat"] = [plots.weight_heat(weights.tensors, wide=wide) for wide in (True, False)]
    if comparison.numerics is not None:
        pictures["numerics"] = [plots.numerics_by_layer(comparison.numerics.points, names, wide=wide) for wide in (True, False)]
    if found is not None:
        marks = {"median": found.kl_ab.percentiles["50"], "99 %": found.kl_ab.percentiles["99"]}
        bins = found.kl_ab.histogram, found.kl_ba.histogram
        pictures["histogram"] = plots.histogram(*bins, marks) if any(bins) else None
        pictures["position"] = plots.by_position(found.by_position)
        pictures["confidence"] = plots.by_confidence(found.by_confidence)
        sides = found.calibration_a, found.calibration_b
        labels = [f"{name}: off by {percent(side.ece)}" for name, side in zip(names, sides, strict=True)]
        pictures["calibration"] = plots.calibration(*sides, (labels[0], labels[1]))
    scale = js_scale([word.js for word in words.text]) if words is not None else LARGEST
    return render(
        "report",
        c=comparison,
        names=names,
        verdict=verdict(comparison),
        headline=headline(comparison),
        command=command(comparison),
        pictures=pictures,
        scale=scale,
        heat_scale=plots.heat_scale([tensor.distance for tensor in weights.tensors]) if weights is not None else None,
        tokens=[token(word, scale) for word in words.text] if words is not None else [],
        passages=[passage(part, scale) for part in words.passages] if words is not None else [],
        continuations=[said(row) for row in words.continuations] if words is not None else [],
        choices=choices([*words.text, *(word for part in words.passages for word in part.words)]) if words is not None else [],
    )


def render(name: str, **values: Any) -> str:
    """One of our templates with its script, everything escaped that is put into it."""
    import jinja2

    loader = jinja2.PackageLoader("gpt2.pages", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"n": number, "pct": percent, "between": between, "pct_between": percent_between}
    environment.filters |= {"svg": safe, "visible": visible}
    environment.globals |= {"heat_shade": plots.heat_shade, "levels": drawing.LEVELS, "zip": zip}
    script = loader.get_source(environment, f"{name}.js")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(f"{name}.html").render(script=safe(script), script_hash=digest, ramps=RAMPS, **values)


def safe(text: str) -> Any:
    """Our own markup: a picture, the script."""
    from markupsafe import Markup

    return Markup(text)


def _ramp(*stops: str) -> list[str]:
    """LEVELS colours through ``stops``, evenly."""
    rgb = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops]
    found = []
    for level in range(drawing.LEVELS):
        place = level / (drawing.LEVELS - 1) * (len(stops) - 1)
        low = min(int(place), len(stops) - 2)
        mixed = (round(x + (y - x) * (place - low)) for x, y in zip(rgb[low], rgb[low + 1], strict=True))
        found.append("#" + "".join(f"{part:02x}" for part in mixed))
    return found


RAMPS = {
    "light": _ramp("#fdfcfa", "#fbe6d3", "#f6bd93", "#ee9462", "#e07245"),
    "dark": _ramp("#171614", "#33221a", "#5c321c", "#8a441f", "#b85a28"),
}


def short_names(a: Model, b: Model) -> tuple[str, str]:
    """What both are called in a legend: the end of a path, or A and B where that is one and the same."""
    whole = [visible(model.name) for model in (a, b)]
    names = [name if len(name) <= 24 else "/".join(Path(name).parts[-2:])[-LEGEND:] for name in whole]
    return ("A", "B") if names[0] == names[1] else (names[0], names[1])


def number(value: float | None, form: str = "#.3g") -> str:
    """A figure as a person reads it: ∞, and a dash for what is not defined."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = format(value, form) if value else "0"
    digits, _, exponent = text.partition("e")
    text = digits = digits.removesuffix(".")
    if exponent:
        power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        text = f"{digits} × 10{power}"
    return text.replace("-", "−")


def percent(value: float | None, digits: int = 1) -> str:
    """A share; one that is not all or nothing is never rounded to it."""
    if value is None or not math.isfinite(value):
        return number(value)
    text = f"{value:.{digits}%}"
    if value < 1 and text == f"{1:.{digits}%}":
        text = f"> {1 - 10 ** (-digits - 2):.{digits}%}"
    elif value != 0 and float(text[:-1]) == 0:
        text = number(100 * value, ".1e") + "%"
    return text.replace("-", "−").replace("%", " %")


def between(estimate: Estimate, form: str = "#.3g") -> str:
    """An interval, or nothing where it is a point."""
    if estimate.low == estimate.high:
        return ""
    return f"{number(estimate.low, form)} to {number(estimate.high, form)}"


def percent_between(estimate: Estimate, digits: int = 1) -> str:
    return "" if estimate.low == estimate.high else f"{percent(estimate.low, digits)} to {percent(estimate.high, digits)}"


def verdict(comparison: Comparison) -> tuple[str, str]:
    """What is the matter, in one sentence that a person understands: its beginning, to be stressed, and its end."""
    weights, found = comparison.weights, comparison.distributions
    a, b = comparison.a, comparison.b
    if comparison.ok:
        return "Identical", ": nothing that was measured differs, not a weight, not an activation, not a probability."
    if weights is not None and weights.total.unchanged == 1:
        how = a.dtype != b.dtype and f"run in {a.dtype} and in {b.dtype}"
        how = how or (a.implementation != b.implementation and f"run by {a.implementation} and by {b.implementation}")
        subject = f"The same weights, {how or 'run in two ways'}"
    elif weights is not None and weights.same_numbers:
        subject = f"The same weights in another precision, {a.dtype} and {b.dtype}"
    elif weights is not None:
        subject = f"The weights moved by {percent(weights.total.distance)} of their size"
    else:
        differing = [field for field, *_ in comparison.compatibility.architecture]
        subject = f"Two models that differ in {', '.join(differing)}" if differing else "Two models"
    if found is not None:
        return subject, f": {_prediction(comparison)}."
    if comparison.alone:
        one, other = (score.bits_per_byte for score in comparison.alone)
        return subject, f": with tokenizers of their own, A needs {number(one)} and B {number(other)} bits per byte of this text."
    return subject, "."


def _prediction(comparison: Comparison) -> str:
    found = comparison.distributions
    same = f"both would choose the same next token {percent(found.same_top.value)} of the time"
    if found.undefined:
        return f"for {found.undefined:,} of {found.tokens:,} tokens a model gave no number at all"
    low, high = found.ratio.low, found.ratio.high
    if not low <= 1 <= high:
        better = "better" if found.ratio.value < 1 else "worse"
        perplexity = f"{number(found.a.perplexity.value, '#.4g')} → {number(found.b.perplexity.value, '#.4g')}"
        return f"B predicts this text {better} (perplexity {perplexity}), and {same}"
    return f"they predict this text equally well, as far as {found.tokens:,} tokens can tell, and {same}"


def ratio_form(ratio: float) -> str:
    """As many digits as tell a ratio from 1."""
    off = abs(ratio - 1)
    return f".{min(12, 1 - math.floor(math.log10(off)))}f" if 0 < off < 0.1 else "#.3g"


def headline(comparison: Comparison) -> list[dict[str, str]]:
    """The numbers under the verdict: label, value from and to, and an interval or a remark."""
    tiles = []
    found, weights = comparison.distributions, comparison.weights

    def tile(label: str, value: str, told: str, before: str = "") -> None:
        tiles.append({"label": label, "before": before, "value": value, "told": told})

    if found is not None:
        a, b = found.a, found.b
        form = ratio_form(found.ratio.value)
        interval = between(found.ratio, form)
        told = f"× {number(found.ratio.value, form)}" + (f" ({interval})" if interval else "")
        tile("perplexity", number(b.perplexity.value, "#.4g"), told, number(a.perplexity.value, "#.4g"))
        told = between(b.bits_per_byte, ".3f")
        tile(comparison.bits_per, number(b.bits_per_byte.value, ".3f"), told, number(a.bits_per_byte.value, ".3f"))
        tile("KL(A‖B), nats", number(found.kl_ab.mean.value), between(found.kl_ab.mean))
        tile("same first choice", percent(found.same_top.value), percent_between(found.same_top))
    elif comparison.alone:
        one, other = comparison.alone
        tile("bits per byte", number(other.bits_per_byte, ".3f"), "each over its own tokens", number(one.bits_per_byte, ".3f"))
        tile("perplexity", number(other.perplexity, "#.4g"), "not comparable", number(one.perplexity, "#.4g"))
    if comparison.last_words is not None:
        a, b, change = comparison.last_words.a, comparison.last_words.b, comparison.last_words.change
        told = f"of {a.n:,} passages; × {number(change.ratio.value)} perplexity"
        tile("last words right", percent(b.accuracy.value), told, percent(a.accuracy.value))
    if weights is not None:
        still, count = len(weights.unchanged), len(weights.tensors)
        if still == count:
            tile("weights", "equal", f"every entry of {count} tensors")
        else:
            told = f"{still} of {count} tensors unchanged" if still else f"all {count} tensors"
            tile("weights rounded" if weights.same_numbers else "weights moved", percent(weights.total.distance, 2), told)
    return tiles


def command(comparison: Comparison) -> str:
    """What makes this page again."""
    parts = ["gpt2", "compare", comparison.a.name, comparison.b.name]
    if comparison.text.sha256:
        parts += ["--on", comparison.text.name]
    parts += ["--tokens", str(comparison.text.tokens), "--seed", str(comparison.seed)]
    if comparison.activations is not None:
        parts += ["--threshold", f"{comparison.activations.threshold:g}"]
    return shlex.join([*parts, "--html", "report.html"])


def visible(text: str) -> str:
    """A token in a table: every control by a sign."""
    from gpt2.comparison.results import visible

    return visible(text)


def readable(text: str) -> str:
    """A token as it stands in running text: its line breaks kept, other controls replaced."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def js_scale(values: list[float]) -> float:
    """What the darkest colour means: log 2, the most there is, unless all values are so small that nothing would be seen."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    return LARGEST if largest > 0.02 or largest == 0 else largest


def token(word: Word, scale: float) -> dict[str, Any]:
    """How a token is coloured: by the root of the divergence, which is a distance, and by who found it likelier."""
    share = math.sqrt(word.js / scale) if word.js > 0 else word.js
    return {"text": readable(word.text), "shade": drawing.shade(share), "lean": lean(word)}


def lean(word: Word) -> int:
    """-4 .. 4: which model gave the token more, in doublings of its probability; negative is A."""
    a, b = word.probability_a, word.probability_b
    if a == b or math.isnan(a + b):
        return 0
    bits = math.log2(b / a) if a > 0 and b > 0 else math.copysign(math.inf, b - a)
    size = math.ceil(min(4, abs(bits))) if abs(bits) >= 0.25 else 0
    return int(math.copysign(size, bits)) if size else 0


def choices(words: list[Word]) -> list[list[Any]]:
    """What hovering shows of each coloured token: the token, divergence, both probabilities, and both models' first choices."""

    def listed(top: tuple[Choice, ...]) -> list[list[Any]]:
        return [[visible(choice.text), _rounded(choice.probability)] for choice in top]

    return [
        [visible(w.text), number(w.js), _rounded(w.probability_a), _rounded(w.probability_b), listed(w.top_a), listed(w.top_b)]
        for w in words
    ]


def _rounded(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def passage(part: Passage, scale: float) -> dict[str, Any]:
    """A passage with the few of its tokens that the models disagree about most, in the order of the text."""
    worst = sorted(range(len(part.words)), key=lambda at: -part.words[at].js)[:4]
    rows = [part.words[at] for at in sorted(worst)]
    return {"start": part.start, "js": part.js, "tokens": [token(word, scale) for word in part.words], "rows": rows}


def said(row: Continuation) -> dict[str, Any]:
    """A prompt and both continuations, each split where they part."""
    pairs = enumerate(zip(row.a, row.b, strict=False))
    same = next((place for place, (one, other) in pairs if one != other), min(len(row.a), len(row.b)))
    how = "greedy" if row.temperature == 0 else f"sampled at T = {number(row.temperature, 'g')}, the same random numbers"
    return {
        "prompt": row.prompt,
        "a": (row.a[:same], row.a[same:]),
        "b": (row.b[:same], row.b[same:]),
        "how": how,
        "at": row.parts_at,
    }


def attention_page(report: AttentionReport) -> str:
    """What each head looks at, as a page of its own."""
    maps = {"A": report.maps} if report.b is None else {"A": report.maps, "B": report.maps_b}
    pictures = [(side, attention_plots.attention_svg(found, report.tokens, signed=False)) for side, found in maps.items()]
    if report.b is not None:
        pictures.insert(0, ("B − A", attention_plots.attention_svg(report.difference, report.tokens, signed=True)))
    layers, heads, n, _ = report.maps.shape
    data = {"layers": layers, "heads": heads, "tokens": [visible(token) for token in report.tokens], "maps": {}}
    if len(maps) * layers * heads * n * (n + 1) // 2 <= VIEWED:
        data["maps"] = {side: pack_lower(found) for side, found in maps.items()}
    return render(
        "attention",
        report=report,
        names={"A": report.a, "B": report.b},
        pictures=pictures,
        tokens=[readable(token) for token in report.tokens],
        data=data,
        rows=list(zip(report.heads, report.heads_b or [None] * len(report.heads), strict=True)),
        notable=report.notable(),
    )


def pack_lower(maps: Tensor) -> str:
    """Weights as bytes, 255 for 1, of what lies on or below the diagonal, row by row, in base64."""
    low = maps.tril().nan_to_num().clamp(0, 1).mul(255).round().byte()
    rows, columns = low.new_ones(low.shape[-2:]).nonzero(as_tuple=True)
    inside = columns <= rows
    return base64.b64encode(low[..., rows[inside], columns[inside]].contiguous().numpy().tobytes()).decode()
