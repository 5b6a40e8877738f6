"""The results of a comparison as frozen dataclasses, from which terminal text, JSON and HTML are made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.checkpoint.official_files import Official
from gpt2.comparison.activations import Activations
from gpt2.comparison.compatibility import Compatibility
from gpt2.comparison.distributions import Distributions, Estimate
from gpt2.comparison.last_words import LastWords
from gpt2.comparison.weights import WeightChanges
from gpt2.comparison.words import Words
from gpt2.measure.metrics import LanguageScore
from gpt2.pages.rendering import visible, write
from gpt2.pages.reports import Environment, Printed, add_texts, as_json, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType


SEEN = 0.005  # nats of Jensen-Shannon that two digits show


@dataclass(frozen=True)
class Model:
    """One side, as it was run. ``files`` are name -> sha256, ``official`` whether they are the official ones."""

    name: str
    implementation: str  # "gpt2" or "transformers 5.23.0"
    dtype: str
    revision: str | None
    parameters: int
    config: dict[str, Any]
    files: dict[str, str]
    official: Official | None = None


@dataclass(frozen=True)
class Scored:
    """The text that was used; ``sha256`` is of the whole of it, ``tokens`` were taken from its beginning."""

    name: str
    sha256: str
    tokens: int
    context: int
    stride: int
    told: str  # the protocol in words


@dataclass(frozen=True)
class Numerics:
    """The same weights run twice: each side's distance from a float64 run of our model, by traced point.

    ``points`` are (point, error of a, error of b), relative; ``logits`` are (what was run, error) for the fused and the
    spelt-out attention of our model, in each side's dtype.
    """

    points: tuple[tuple[str, float, float], ...]
    logits: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Comparison(Printed):
    """Two models, from weights to words; a part is None where it could not be measured, and ``compatibility`` says why."""

    a: Model
    b: Model
    compatibility: Compatibility
    text: Scored
    weights: WeightChanges | None
    activations: Activations | None
    distributions: Distributions | None
    alone: tuple[LanguageScore, ...]  # of each, where the distributions cannot be compared
    words: Words | None
    last_words: LastWords | None
    numerics: Numerics | None
    environment: Environment
    seed: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Nothing that was measured differs."""
        weights = self.weights is None or self.weights.total.unchanged == 1.0
        activations = self.activations is None or all(point.max_abs == 0 for point in self.activations.points)
        distributions = self.distributions is not None and self.distributions.js.max == 0
        return weights and activations and distributions and not self.compatibility.architecture

    @property
    def protocol(self) -> str:
        """How much was scored, from how much context; of each model where they read other tokens."""
        if self.alone:
            return " → ".join(f"{s.tokens:,} tokens scored, context {s.context}, stride {s.stride}" for s in self.alone)
        return f"{self.text.tokens:,} tokens, context {self.text.context}, stride {self.text.stride}"

    @property
    def bits_per(self) -> str:
        """What bits are counted by: random ids stand for no bytes, and count as one each."""
        return "bits per byte" if self.text.sha256 else "bits per token"

    def to_json(self) -> str:
        """Everything that was measured, with both models, the text, versions and hashes."""
        body = {"verdict": "identical" if self.ok else "different", "ok": self.ok, **asdict(self)}
        first = self.activations.first_past if self.activations else None
        body["first_past"] = None if first is None else {"point": first.point, "layer": first.layer, "error": first.error}
        if self.weights is not None:
            body["weights"] |= {
                "unchanged": self.weights.unchanged,
                "most_changed": [t.name for t in self.weights.most_changed()],
            }
        return as_json(body)

    def save_html(self, path: str | Path) -> None:
        """Write the report as one self-contained page; raises InputError where the file cannot be written."""
        from gpt2.comparison.page import page

        write(path, page(self))

    def parts(self) -> Iterator[RenderableType]:
        """Both models, the summary, and a table for each thing that was measured."""
        from rich.markup import escape

        yield f"\n[bold]{escape(self.a.name)}[/bold]  →  [bold]{escape(self.b.name)}[/bold]"
        yield f"[dim]{self._circumstances()}[/dim]\n"
        yield self._summary()
        for field, a, b in self.compatibility.architecture:
            yield f"[yellow]differs[/yellow]  {field}: {a} → {b}"
        for part, why in self.compatibility.impossible.items():
            yield f"[yellow]left out[/yellow]  {part}: {escape(why)}"
        if self.weights is not None and not self.weights.same_numbers:
            yield "\n[bold]Weights[/bold]  [dim]the ten that moved farthest for their size[/dim]"
            yield self._weights()
        if self.activations is not None and self.activations.points:
            yield "\n[bold]Activations[/bold]  [dim]relative error by block, at its worst point[/dim]"
            yield self._activations()
        if self.numerics is not None:
            yield "\n[bold]Numerics[/bold]  [dim]distance from float64, by block, at its worst point[/dim]"
            yield self._numerics()
        if self.distributions is not None:
            yield "\n[bold]Distributions[/bold]  [dim]per token, in nats; intervals are 95 %[/dim]"
            yield self._distributions()
        if self.words is not None and any(word.js >= SEEN for passage in self.words.passages for word in passage.words):
            yield "\n[bold]Words[/bold]  [dim]where they disagree most: the text, and what each expected instead[/dim]"
            yield self._passage()
        if self.words is not None and self.words.continuations:
            yield self._continuations()
        yield f"[dim]in {self.seconds:.1f} s[/dim]\n"

    def _circumstances(self) -> str:
        kind = {"equal": "one tokenizer", "merges": "one vocabulary, other merges", "none": "no tokenizer to compare"}
        vocabularies = self.compatibility.vocabularies
        tokenizer = kind.get(vocabularies.verdict, f"tokenizers differ in {vocabularies.differing:,} entries")
        sizes = f"{self.a.parameters:,}"
        sizes += f" → {self.b.parameters:,}" if self.a.parameters != self.b.parameters else ""
        dtypes = self.a.dtype + (f" → {self.b.dtype}" if self.a.dtype != self.b.dtype else "")
        return f"{sizes} parameters · {dtypes} · {tokenizer}\n{self.text.name}: {self.protocol}"

    def _summary(self) -> RenderableType:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
        for _ in range(3):
            table.add_column(overflow="fold")
        found = self.distributions
        if found is not None:
            a, b = found.a.score, found.b.score
            table.add_row("perplexity", f"{a.perplexity:.2f} → {b.perplexity:.2f}", f"× {_interval(found.ratio, '.3f')}")
            table.add_row(self.bits_per, f"{a.bits_per_byte:.4f} → {b.bits_per_byte:.4f}")
            spread = f"median {found.kl_ab.percentiles['50']:.3g}, 99 % below {found.kl_ab.percentiles['99']:.3g}"
            table.add_row("KL(a‖b)", f"{found.kl_ab.mean.value:.3g} nats", spread)
            table.add_row(
                "same top token", f"{found.same_top.value:.1%}", f"{found.same_top.low:.1%} .. {found.same_top.high:.1%}"
            )
        elif self.alone:
            a, b = self.alone
            table.add_row("bits per byte", f"{a.bits_per_byte:.4f} → {b.bits_per_byte:.4f}", "each over its own tokens")
            table.add_row("perplexity", f"{a.perplexity:.2f} → {b.perplexity:.2f}", "not comparable: other tokens")
        if self.last_words is not None:
            a, b, change = self.last_words.a, self.last_words.b, self.last_words.change
            told = f"{_interval(change.accuracy, '+.1%')} of {a.n:,} passages"
            table.add_row("last words right", f"{a.accuracy.value:.1%} → {b.accuracy.value:.1%}", told)
            of = f"× {_interval(change.ratio, '.3f')} per word"
            table.add_row("their perplexity", f"{a.perplexity.value:.2f} → {b.perplexity.value:.2f}", of)
        if self.weights is not None:
            total, most = self.weights.total, self.weights.most_changed(1)
            if most and self.weights.same_numbers:
                table.add_row("weights", "the same", f"rounded to {_coarser(self.a.dtype, self.b.dtype)}, and nothing else")
            elif most:
                told = f"most: {most[0].name}, {_moved(most[0].distance)}"
                table.add_row(
                    "weights moved", f"{total.distance:.2%}", f"{told}; {len(self.weights.unchanged)} tensors unchanged"
                )
            else:
                table.add_row("weights", "equal", f"all {len(self.weights.tensors)} tensors, every entry")
        if self.activations is not None and self.activations.points:
            first = self.activations.first_past
            past = f"first past {self.activations.threshold:g}"
            table.add_row(past, first.point if first else "nowhere", f"{first.error:.2g}" if first else "")
        if self.ok:
            table.add_row("[bold green]IDENTICAL[/bold green]", "in all that was measured")
        return table

    def _weights(self) -> RenderableType:
        table = data_table("tensor", "moved", "max", "cosine", "unchanged", "rank (effective)")
        for tensor in self.weights.most_changed():
            rank = "" if tensor.rank is None else f"{tensor.rank}/{tensor.full_rank} ({tensor.effective_rank:.0f})"
            add_texts(
                table,
                tensor.name,
                _moved(tensor.distance),
                f"{tensor.max_abs:.2g}",
                f"{tensor.cosine:.5f}",
                f"{tensor.unchanged:.1%}",
                rank,
            )
        return table

    def _activations(self) -> RenderableType:
        table = data_table("where", "error", "at", "SQNR", "cosine")
        for where, points in _by_block(self.activations.points, lambda point: point.point):
            worst = max(points, key=lambda point: point.error)
            add_texts(table, where, f"{worst.error:.2g}", _inside(worst.point), f"{worst.sqnr:.0f} dB", f"{worst.cosine:.6f}")
        return table

    def _numerics(self) -> RenderableType:
        table = data_table("where", self.a.name, self.b.name, "at")
        for where, points in _by_block(self.numerics.points, lambda point: point[0]):
            worst = max(points, key=lambda point: max(point[1:]))
            add_texts(table, where, f"{worst[1]:.1e}", f"{worst[2]:.1e}", _inside(worst[0]))
        for what, error in self.numerics.logits:
            add_texts(table, "logits", f"{error:.1e}", "", what)
        return table

    def _distributions(self) -> RenderableType:
        from rich.console import Group

        found = self.distributions
        table = data_table("", "KL(a‖b)", "KL(b‖a)", "Jensen-Shannon")
        divergences = (found.kl_ab, found.kl_ba, found.js)
        add_texts(table, "mean", *(f"{one.mean.value:.3g}" for one in divergences))
        add_texts(table, "95 % interval", *(f"{one.mean.low:.3g} .. {one.mean.high:.3g}" for one in divergences))
        for key, name in (("50", "median"), *((key, f"{key} %") for key in ("90", "95", "99", "99.9"))):
            add_texts(table, name, *(f"{one.percentiles[key]:.3g}" for one in divergences))
        add_texts(table, "max", *(f"{one.max:.3g}" for one in divergences))
        return Group(
            table,
            f"top {found.top} overlap {found.overlap.value:.1%} · correlation of log-probabilities {found.correlation:.4f} · "
            f"right token's probability {100 * found.change.mean.value:+.2f} percentage points on average, "
            f"{100 * found.change.rms.value:.2f} RMS",
            f"calibration error {found.calibration_a.ece:.2%} → {found.calibration_b.ece:.2%}",
        )

    def _passage(self) -> RenderableType:
        table = data_table("", "the text", "a", "b", "a expected", "b expected", "JS")
        for passage in self.words.passages[:2]:
            if all(word.js < SEEN for word in passage.words):
                continue
            for word in passage.words:
                tops = [f"{visible(top[0].text)} {top[0].probability:.0%}" if top else "" for top in (word.top_a, word.top_b)]
                chances = [f"{chance:.1%}" for chance in (word.probability_a, word.probability_b)]
                add_texts(table, "", visible(word.text), *chances, *tops, f"{word.js:.2f}")
            table.add_section()
        return table

    def _continuations(self) -> RenderableType:
        table = data_table("prompt", "a goes on", "b goes on", "parts", wrap=True)
        for row in self.words.continuations:
            how = "greedy" if row.temperature == 0 else f"T = {row.temperature:g}"
            parts = "nowhere" if row.parts_at is None else f"token {row.parts_at + 1}"
            add_texts(table, f"{row.prompt}\n({how})", row.a, row.b, parts)
            table.add_section()
        return table


def _moved(distance: float) -> str:
    return "from zero" if distance == math.inf else f"{distance:.2%}"  # a bias as it was initialised


def _coarser(*dtypes: str) -> str:
    return max(dtypes, key=["float64", "float32", "float16", "bfloat16", "int8"].index)


def _interval(estimate: Estimate, form: str) -> str:
    if estimate.low == estimate.high:
        return format(estimate.value, form)
    return f"{estimate.value:{form}} ({estimate.low:{form}} .. {estimate.high:{form}})"


def _by_block(points: tuple[Any, ...], name: Any) -> Iterator[tuple[str, list[Any]]]:
    """Traced points together with the others of their block, in order."""
    blocks: dict[str, list[Any]] = {}
    for point in points:
        parts = name(point).split(".")
        where = ".".join(parts[:2]) if parts[0] == "h" else "embed" if parts[0] in ("wte", "wpe", "embed") else "head"
        blocks.setdefault(where, []).append(point)
    yield from blocks.items()


def _inside(point: str) -> str:
    return point.split(".", 2)[2] if point.count(".") > 1 else point
