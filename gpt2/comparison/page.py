"""Build the HTML pages of comparisons, of two models and of several: the verdict in words, charts, and a coloured text."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from gpt2.comparison import charts
from gpt2.comparison.many_results import Comparisons
from gpt2.comparison.passage import Scored
from gpt2.comparison.results import Comparison
from gpt2.comparison.sides.trace_side import PREFIX as TRACE_PREFIX
from gpt2.comparison.weights import TensorChange
from gpt2.comparison.words import Extract, Word
from gpt2.measure.metrics import MAX_JS
from gpt2.pages import drawing
from gpt2.pages.drawing import A, B
from gpt2.pages.rendering import number, render, short_names, visible
from gpt2.pages.reports import page_of

CHARTS = ("layers", "numerics", "histogram", "blame", "halves")


@page_of(Comparison)
def page(comparison: Comparison) -> str:
    """Return the page of two models as HTML text."""
    names = short_names(comparison.a.name, comparison.b.name)
    weights, words = comparison.weights, comparison.words
    text, passages = (words.text, words.passages) if words is not None else ((), ())
    scale = js_scale([word.js for word in text]) if words is not None else MAX_JS
    choices = [choice(word) for word in (*text, *(word for passage in passages for word in passage.words))]
    tensors = weights.tensors if weights is not None and weights.total.unchanged < 1 else ()
    flags = [] if comparison.activations is None else ["--threshold", f"{comparison.activations.threshold:g}"]
    flags += [] if comparison.blame is None else ["--blame"]
    return render(
        "report",
        c=comparison,
        names=names,
        verdict=comparison.sentence(),
        command=again([comparison.a.name, comparison.b.name], comparison.text, comparison.seed, *flags),
        pictures=pictures(comparison, names),
        scale=scale,
        shade=lambda word: drawing.shade(math.sqrt(word.js / scale) if word.js > 0 else word.js),
        similar=drawing.shade,
        heat=heat(tensors),
        heat_shade=heat_shade,
        heat_scale=heat_scale([tensor.distance for tensor in tensors]),
        in_percent=in_percent,
        ratio_form=ratio_form,
        worst=worst,
        commonprefix=commonprefix,
        data={"names": names, "tokens": choices},
    )


@page_of(Comparisons)
def page_of_several(comparisons: Comparisons) -> str:
    """Return the page of several models as HTML text."""
    by_step = any(each.step is not None for each in comparisons.candidates)
    return render(
        "many",
        c=comparisons,
        by_step=by_step,
        picture=charts.quality(comparisons, by_step=by_step),
        command=again([each.model.name for each in comparisons.candidates], comparisons.text, comparisons.seed),
        data={},
    )


def pictures(comparison: Comparison, names: tuple[str, str]) -> dict[str, str]:
    """Draw the page's charts, by name, each wide and narrow; empty where there is nothing to show."""
    drawn = dict.fromkeys(CHARTS, "")
    if (activations := comparison.activations) is not None:
        errors = [(point.point, point.error) for point in activations.points]
        drawn["layers"] = charts.errors_by_layer("layers", [("stream", B, errors)], activations.threshold)
    if (numerics := comparison.numerics) is not None:
        sides = ([(point, a) for point, a, _ in numerics.points], [(point, b) for point, _, b in numerics.points])
        drawn["numerics"] = charts.errors_by_layer("numerics", list(zip(names, (A, B), sides, strict=True)))
    if (both := comparison.distributions) is not None:
        drawn["histogram"] = charts.kl_by_token(both.kl_ab, both.kl_ba)
    if (blame := comparison.blame) is not None:
        shown = {
            "blame": blame.parts,
            "halves": blame.halves[1:] and blame.halves,
        }
        drawn |= {name: charts.part_bars(parts, name) for name, parts in shown.items()}
    return drawn


def heat(tensors: Sequence[TensorChange]) -> tuple[list[int], list[tuple[str, list[float]]]] | None:
    """Return the layers, and for each family of tensors its relative distances in them; None if no tensor changed."""
    distances = {(tensor.family, tensor.layer): tensor.distance for tensor in tensors if tensor.layer is not None}
    families, layers = dict.fromkeys(family for family, _ in distances), sorted({layer for _, layer in distances})
    rows = [(family.removeprefix("h.{}."), [distances.get((family, layer), 0.0) for layer in layers]) for family in families]
    return (layers, rows) if tensors else None


def heat_scale(distances: Sequence[float]) -> tuple[float, float] | None:
    """Return both ends of a heat map's logarithmic scale: one to three decades up to the largest finite distance."""
    positive = sorted(distance for distance in distances if math.isfinite(distance) and distance > 0)
    if not positive:
        return None
    return min(max(positive[0], positive[-1] / 1000), positive[-1] / 10) or positive[-1], positive[-1]


def heat_shade(distance: float, scale: tuple[float, float] | None) -> int:
    """Return the shade of a relative distance; infinity has the darkest shade."""
    if distance == 0 or scale is None:
        return 0 if distance == 0 else drawing.LEVELS - 1
    if not math.isfinite(distance) or scale[0] == scale[1]:
        return drawing.LEVELS - 1
    return drawing.shade(max(0.04, math.log(distance / scale[0]) / math.log(scale[1] / scale[0])))


def in_percent(distance: float) -> str:
    """Format a relative distance in percent, without the sign, in a few characters."""
    if distance == 0 or not math.isfinite(distance):
        return "=" if distance == 0 else "∞" if distance > 0 else "?"
    share = 100 * distance
    return f"{share:.0f}" if share >= 99.5 else f"{share:#.2g}".rstrip(".") if share >= 0.01 else f"{share:.0e}"


def ratio_form(ratio: float) -> str:
    """Return a format with enough digits to distinguish a ratio from 1."""
    off = abs(ratio - 1)
    return f".{min(12, 1 - math.floor(math.log10(off)))}f" if 0 < off < 0.1 else "#.3g"


def again(names: Sequence[str], text: Scored, seed: int, *flags: str) -> str:
    """Return the command that compares these models on this text again, for a page."""
    parts = ["gpt2", "compare", *names]
    if not any(name.startswith(TRACE_PREFIX) for name in names):  # which hold their own text
        parts += ["--on", text.name] if text.sha256 else []
        parts += ["--tokens", str(text.tokens)]
    return shlex.join([*parts, "--seed", str(seed), *flags, "--html", "report.html"])


def js_scale(values: list[float]) -> float:
    """Return the divergence of the darkest colour: log 2, its maximum, or the largest value if all are below 0.02."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    return MAX_JS if largest > 0.02 or largest == 0 else largest


def worst(passage: Extract) -> list[Word]:
    """Return the four tokens of a passage with the largest divergence, in the order of the text."""
    places = sorted(range(len(passage.words)), key=lambda at: -passage.words[at].js)[:4]
    return [passage.words[at] for at in sorted(places)]


def choice(word: Word) -> list[Any]:
    """Return a token's tooltip: its text, divergence, both probabilities, and both models' most likely candidates."""
    probabilities = _rounded(word.probability_a), _rounded(word.probability_b)
    tops = ([[visible(each.text), _rounded(each.probability)] for each in top] for top in (word.top_a, word.top_b))
    return [visible(word.text), number(word.js), *probabilities, *tops]


def _rounded(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None
