"""The HTML page of a comparison."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

from gpt2.comparison import plots
from gpt2.measure.metrics import MAX_JS
from gpt2.pages import drawing
from gpt2.pages.rendering import between, number, percent, percent_between, readable, render, short_names, visible

if TYPE_CHECKING:
    from gpt2.comparison.results import Comparison
    from gpt2.comparison.words import Choice, Continuation, Passage, Word


def page(comparison: Comparison) -> str:
    """The page as text."""
    names = short_names(comparison.a.name, comparison.b.name)
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
    scale = js_scale([word.js for word in words.text]) if words is not None else MAX_JS
    return render(
        "report",
        c=comparison,
        names=names,
        verdict=verdict(comparison),
        headline=headline(comparison),
        command=command(comparison),
        pictures=pictures,
        scale=scale,
        heat_shade=plots.heat_shade,
        heat_scale=plots.heat_scale([tensor.distance for tensor in weights.tensors]) if weights is not None else None,
        tokens=[token(word, scale) for word in words.text] if words is not None else [],
        passages=[passage(part, scale) for part in words.passages] if words is not None else [],
        continuations=[said(row) for row in words.continuations] if words is not None else [],
        choices=choices([*words.text, *(word for part in words.passages for word in part.words)]) if words is not None else [],
    )


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


def js_scale(values: list[float]) -> float:
    """What the darkest colour means: log 2, the most there is, unless all values are so small that nothing would be seen."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    return MAX_JS if largest > 0.02 or largest == 0 else largest


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
