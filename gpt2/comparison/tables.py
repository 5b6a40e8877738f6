"""Draw the terminal tables of a comparison: one function for each part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpt2.measure.tracing import block_of, part_of
from gpt2.pages.rendering import visible
from gpt2.pages.reports import add_texts, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from gpt2.comparison.activations import Activations
    from gpt2.comparison.distributions import Distributions
    from gpt2.comparison.subjects import Numerics
    from gpt2.comparison.weights import WeightChanges
    from gpt2.comparison.words import Words

VISIBLE_JS = 0.005  # nats; a smaller divergence is printed as 0.00


def titled(title: str, what: str, *tables: RenderableType) -> Iterator[RenderableType]:
    """Yield a heading and what follows it."""
    yield f"\n[bold]{title}[/bold]  [dim]{what}[/dim]"
    yield from tables


def weights_table(weights: WeightChanges) -> Table:
    table = data_table("tensor", "moved", "max", "cosine", "unchanged", "rank of change")
    for tensor in weights.most_changed():
        rank = "" if tensor.rank is None else f"{tensor.rank} of {tensor.full_rank}"
        sizes = f"{tensor.max_abs:.2g}", f"{tensor.cosine:.5f}", f"{tensor.unchanged:.1%}"
        add_texts(table, tensor.name, moved(tensor.distance), *sizes, rank)
    return table


def activations_table(activations: Activations) -> Table:
    table = data_table("where", "error", "at", "SQNR", "cosine")
    for block, points in itertools.groupby(activations.points, lambda point: block_of(point.point)):
        worst = max(points, key=lambda point: point.error)
        add_texts(table, block, f"{worst.error:.2g}", part_of(worst.point), f"{worst.sqnr:.0f} dB", f"{worst.cosine:.6f}")
    return table


def numerics_table(numerics: Numerics) -> Table:
    table = data_table("where", "a", "b", "at")
    for block, points in itertools.groupby(numerics.points, lambda point: block_of(point[0])):
        name, error_a, error_b = max(points, key=lambda point: max(point[1:]))
        add_texts(table, block, f"{error_a:.1e}", f"{error_b:.1e}", part_of(name))
    for description, error in numerics.logits:
        add_texts(table, "logits", f"{error:.1e}", "", description)
    return table


def distributions_tables(both: Distributions) -> tuple[RenderableType, ...]:
    table = data_table("", "KL(a‖b)", "KL(b‖a)", "Jensen-Shannon")
    divergences = (both.kl_ab, both.kl_ba, both.js)
    add_texts(table, "mean", *(f"{each.mean.value:.3g}" for each in divergences))
    add_texts(table, "95 % interval", *(each.mean.span(".3g") for each in divergences))
    for key, name in (("50", "median"), *((key, f"{key} %") for key in ("90", "95", "99", "99.9"))):
        add_texts(table, name, *(f"{each.percentiles[key]:.3g}" for each in divergences))
    add_texts(table, "max", *(f"{each.max:.3g}" for each in divergences))
    return (
        table,
        f"top {both.top} overlap {both.overlap.value:.1%} · correlation of log-probabilities {both.correlation:.4f} · "
        f"right token's probability {100 * both.change.mean.value:+.2f} percentage points on average, "
        f"{100 * both.change.rms.value:.2f} RMS",
        f"calibration error {both.calibration_a.ece:.2%} → {both.calibration_b.ece:.2%}",
    )


def words_table(words: Words) -> Table:
    table = data_table("", "the text", "a", "b", "a expected", "b expected", "JS")
    for passage in words.passages[:2]:
        if not any(word.js >= VISIBLE_JS for word in passage.words):
            continue
        for word in passage.words:
            tops = [f"{visible(top[0].text)} {top[0].probability:.0%}" if top else "" for top in (word.top_a, word.top_b)]
            probabilities = f"{word.probability_a:.1%}", f"{word.probability_b:.1%}"
            add_texts(table, "", visible(word.text), *probabilities, *tops, f"{word.js:.2f}")
        table.add_section()
    return table


def continuations_table(words: Words) -> Table:
    table = data_table("prompt", "a goes on", "b goes on", "they differ", wrap=True)
    for row in words.continuations:
        sampling = "greedy" if row.temperature == 0 else f"T = {row.temperature:g}"
        parts = "not at all" if row.parts_at is None else f"from token {row.parts_at + 1}"
        add_texts(table, f"{row.prompt}\n({sampling})", row.a, row.b, parts)
        table.add_section()
    return table


def moved(distance: float) -> str:
    """Format the norm of a change over the norm."""
    return "from zero" if distance == math.inf else f"{distance:.2%}"  # biases are initialised to zero
