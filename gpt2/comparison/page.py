"""Build the HTML page of a comparison: the verdict in words, headline figures, charts, and coloured text."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

from gpt2.comparison import plots
from gpt2.measure.metrics import MAX_JS
from gpt2.pages import drawing
from gpt2.pages.rendering import between, number, percent, percent_between, readable, render, short_names, visible

if TYPE_CHECKING:
    from gpt2.comparison.distributions import Distributions
    from gpt2.comparison.results import Comparison
    from gpt2.comparison.words import Choice, Continuation, Passage, Word

CHARTS = ("layers", "cka", "heat", "numerics", "histogram", "position", "confidence", "calibration")


def page(comparison: Comparison) -> str:
    """The page as HTML text."""
    names = short_names(comparison.a.name, comparison.b.name)
    weights, words = comparison.weights, comparison.words
    text, worst, rows = (words.text, words.passages, words.continuations) if words is not None else ((), (), ())
    scale = js_scale([word.js for word in text]) if words is not None else MAX_JS
    return render(
        "report",
        c=comparison,
        names=names,
        verdict=verdict(comparison),
        headline=headline(comparison),
        command=command(comparison),
        pictures=charts(comparison, names),
        scale=scale,
        heat_shade=plots.heat_shade,
        heat_scale=plots.heat_scale([tensor.distance for tensor in weights.tensors]) if weights is not None else None,
        tokens=[token(word, scale) for word in text],
        passages=[passage(part, scale) for part in worst],
        continuations=[continuation(row) for row in rows],
        choices=choices([*text, *(word for part in worst for word in part.words)]),
    )


def charts(comparison: Comparison, names: tuple[str, str]) -> dict[str, str | list[str | None] | None]:
    """The page's charts by name; a list holds a wide and a narrow version, None is a chart with nothing to show."""
    both, weights, activations, numerics = (
        comparison.distributions,
        comparison.weights,
        comparison.activations,
        comparison.numerics,
    )
    drawn: dict[str, str | list[str | None] | None] = dict.fromkeys(CHARTS)
    if activations is not None:
        points, threshold = activations.points, activations.threshold
        drawn["layers"] = [plots.divergence_by_layer(points, threshold, wide=wide) for wide in (True, False)]
        drawn["cka"] = plots.similarity(activations.cka, names) if activations.cka else None
    if weights is not None and weights.total.unchanged < 1:
        drawn["heat"] = [plots.weight_heat(weights.tensors, wide=wide) for wide in (True, False)]
    if numerics is not None:
        drawn["numerics"] = [plots.numerics_by_layer(numerics.points, names, wide=wide) for wide in (True, False)]
    if both is not None:
        marks = {"median": both.kl_ab.percentiles["50"], "99 %": both.kl_ab.percentiles["99"]}
        bins = both.kl_ab.histogram, both.kl_ba.histogram
        drawn["histogram"] = plots.histogram(*bins, marks) if any(bins) else None
        drawn["position"] = plots.by_position(both.by_position)
        drawn["confidence"] = plots.by_confidence(both.by_confidence)
        sides = both.calibration_a, both.calibration_b
        label_a, label_b = (f"{name}: off by {percent(side.ece)}" for name, side in zip(names, sides, strict=True))
        drawn["calibration"] = plots.calibration(*sides, (label_a, label_b))
    return drawn


def verdict(comparison: Comparison) -> tuple[str, str]:
    """The result in one sentence: its beginning, printed bold, and its end."""
    weights, both = comparison.weights, comparison.distributions
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
    if both is not None:
        return subject, f": {_prediction(both)}."
    if comparison.alone:
        bits_a, bits_b = (number(score.bits_per_byte) for score in comparison.alone)
        return subject, f": with tokenizers of their own, A needs {bits_a} and B {bits_b} bits per byte of this text."
    return subject, "."


def _prediction(both: Distributions) -> str:
    if both.undefined:
        return f"for {both.undefined:,} of {both.tokens:,} tokens a model gave no number at all"
    same = f"both would choose the same next token {percent(both.same_top.value)} of the time"
    if not both.ratio.low <= 1 <= both.ratio.high:
        better = "better" if both.ratio.value < 1 else "worse"
        perplexity = f"{number(both.a.perplexity.value, '#.4g')} → {number(both.b.perplexity.value, '#.4g')}"
        return f"B predicts this text {better} (perplexity {perplexity}), and {same}"
    return f"they predict this text equally well, as far as {both.tokens:,} tokens can tell, and {same}"


def ratio_form(ratio: float) -> str:
    """A format with enough digits to distinguish a ratio from 1."""
    off = abs(ratio - 1)
    return f".{min(12, 1 - math.floor(math.log10(off)))}f" if 0 < off < 0.1 else "#.3g"


def headline(comparison: Comparison) -> list[dict[str, str]]:
    """The figures under the verdict: label, value before and after, and an interval or a remark (``told``)."""
    tiles = []
    both, weights, last_words = comparison.distributions, comparison.weights, comparison.last_words

    def tile(label: str, value: str, remark: str, before: str = "") -> None:
        tiles.append({"label": label, "before": before, "value": value, "told": remark})

    scores = (both.a.score, both.b.score) if both is not None else comparison.alone
    perplexities = [number(score.perplexity, "#.4g") for score in scores]
    bits = [number(score.bits_per_byte, ".3f") for score in scores]
    if both is not None:
        form = ratio_form(both.ratio.value)
        interval = between(both.ratio, form)
        ratio = f"× {number(both.ratio.value, form)}" + (f" ({interval})" if interval else "")
        tile("perplexity", perplexities[1], ratio, perplexities[0])
        tile(comparison.bits_per, bits[1], between(both.b.bits_per_byte, ".3f"), bits[0])
        tile("KL(A‖B), nats", number(both.kl_ab.mean.value), between(both.kl_ab.mean))
        tile("same first choice", percent(both.same_top.value), percent_between(both.same_top))
    elif scores:
        tile("bits per byte", bits[1], "each over its own tokens", bits[0])
        tile("perplexity", perplexities[1], "not comparable", perplexities[0])
    if last_words is not None:
        passages = f"of {last_words.a.n:,} passages; × {number(last_words.change.ratio.value)} perplexity"
        tile("last words right", percent(last_words.b.accuracy.value), passages, percent(last_words.a.accuracy.value))
    if weights is not None:
        unchanged, count = len(weights.unchanged), len(weights.tensors)
        if unchanged == count:
            tile("weights", "equal", f"every entry of {count} tensors")
        else:
            remark = f"{unchanged} of {count} tensors unchanged" if unchanged else f"all {count} tensors"
            tile("weights rounded" if weights.same_numbers else "weights moved", percent(weights.total.distance, 2), remark)
    return tiles


def command(comparison: Comparison) -> str:
    """The command that makes this page again."""
    parts = ["gpt2", "compare", comparison.a.name, comparison.b.name]
    if comparison.text.sha256:
        parts += ["--on", comparison.text.name]
    parts += ["--tokens", str(comparison.text.tokens), "--seed", str(comparison.seed)]
    if comparison.activations is not None:
        parts += ["--threshold", f"{comparison.activations.threshold:g}"]
    return shlex.join([*parts, "--html", "report.html"])


def js_scale(values: list[float]) -> float:
    """The divergence of the darkest colour: log 2, its maximum, or the largest value if all are below 0.02."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    return MAX_JS if largest > 0.02 or largest == 0 else largest


def token(word: Word, scale: float) -> dict[str, Any]:
    """A token's colours: the square root of the divergence, and which model gives it the higher probability."""
    share = math.sqrt(word.js / scale) if word.js > 0 else word.js
    return {"text": readable(word.text), "shade": drawing.shade(share), "lean": preference(word)}


def preference(word: Word) -> int:
    """Which model gives the token the higher probability, in factors of two: -4 (A) .. 4 (B)."""
    a, b = word.probability_a, word.probability_b
    if a == b or math.isnan(a + b):
        return 0
    bits = math.log2(b / a) if a > 0 and b > 0 else math.copysign(math.inf, b - a)
    size = math.ceil(min(4, abs(bits))) if abs(bits) >= 0.25 else 0
    return int(math.copysign(size, bits)) if size else 0


def choices(words: list[Word]) -> list[list[Any]]:
    """The tooltip of each token: its text, divergence, both probabilities, and both models' likeliest candidates."""

    def listed(top: tuple[Choice, ...]) -> list[list[Any]]:
        return [[visible(choice.text), _rounded(choice.probability)] for choice in top]

    return [
        [visible(w.text), number(w.js), _rounded(w.probability_a), _rounded(w.probability_b), listed(w.top_a), listed(w.top_b)]
        for w in words
    ]


def _rounded(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def passage(part: Passage, scale: float) -> dict[str, Any]:
    """A passage, and a table of its four tokens with the largest divergence, in the order of the text."""
    worst = sorted(range(len(part.words)), key=lambda at: -part.words[at].js)[:4]
    rows = [part.words[at] for at in sorted(worst)]
    return {"start": part.start, "js": part.js, "tokens": [token(word, scale) for word in part.words], "rows": rows}


def continuation(row: Continuation) -> dict[str, Any]:
    """A prompt and both continuations, each split at the first different character."""
    pairs = enumerate(zip(row.a, row.b, strict=False))
    same = next((index for index, (a, b) in pairs if a != b), min(len(row.a), len(row.b)))
    how = "greedy" if row.temperature == 0 else f"sampled at T = {number(row.temperature, 'g')}, the same random numbers"
    return {
        "prompt": row.prompt,
        "a": (row.a[:same], row.a[same:]),
        "b": (row.b[:same], row.b[same:]),
        "how": how,
        "at": row.parts_at,
    }
