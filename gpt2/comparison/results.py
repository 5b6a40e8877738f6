"""The result of comparing two models: a frozen dataclass with its terminal tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2.comparison.activations import Activations
from gpt2.comparison.blame_result import Blame
from gpt2.comparison.bounds_result import Bounds
from gpt2.comparison.cases import Cases
from gpt2.comparison.compatibility import Compatibility
from gpt2.comparison.distributions import Distributions
from gpt2.comparison.noise import Floor
from gpt2.comparison.subjects import Model, Numerics, Scored, Verdict
from gpt2.comparison.tables import (
    activations_table,
    continuations_table,
    distributions_tables,
    moved,
    numerics_table,
    titled,
    weights_table,
    words_table,
)
from gpt2.comparison.weights import WeightChanges
from gpt2.comparison.words import Words
from gpt2.measure.last_words import LastWords
from gpt2.measure.metrics import LanguageScore
from gpt2.pages.rendering import number
from gpt2.pages.reports import Environment, Printed, as_json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True)
class Comparison(Printed):
    """The result of a comparison; a part that could not be measured is None, and ``compatibility`` has the reason."""

    a: Model
    b: Model
    compatibility: Compatibility
    text: Scored
    weights: WeightChanges | None
    activations: Activations | None
    distributions: Distributions | None
    alone: tuple[LanguageScore, ...]  # one per model, if the distributions cannot be compared
    words: Words | None
    last_words: LastWords | None
    numerics: Numerics | None
    environment: Environment
    seed: int
    seconds: float
    gates: tuple[Verdict, ...] = ()  # of --fail-if
    blame: Blame | None = None
    floor: Floor | None = None
    cases: Cases | None = None  # of --cases
    bounds: Bounds | None = None  # where one side shows only the likeliest tokens

    @property
    def ok(self) -> bool:
        """Whether no measured part differs."""
        weights = self.weights is None or self.weights.total.unchanged == 1.0
        activations = self.activations is None or all(point.max_abs == 0 for point in self.activations.points)
        distributions = self.distributions is not None and self.distributions.js.max == 0
        program = not self.compatibility.architecture and not self.compatibility.departures
        return weights and activations and distributions and program

    @property
    def protocol(self) -> str:
        """Scored tokens, context and stride; one set per model if the tokenizers differ."""
        if self.alone:
            return " → ".join(f"{s.tokens:,} tokens scored, context {s.context}, stride {s.stride}" for s in self.alone)
        return f"{self.text.tokens:,} tokens, context {self.text.context}, stride {self.text.stride}"

    @property
    def bits_per(self) -> str:
        """The unit of bits per byte; ids without a tokenizer have no bytes, so their unit is the token."""
        known = self.text.sha256 or any(score.bytes != score.tokens for score in self.scores)
        return "bits per byte" if known else "bits per token"

    @property
    def above_floor(self) -> str:
        """Whether the measured KL is above what rounding makes of one model, in words; "" if either was not measured."""
        if self.floor is None or (self.distributions is None and self.bounds is None):
            return ""
        floor, bounded = self.floor, self.distributions is None
        kl = self.distributions.kl_ab.mean if self.distributions is not None else self.bounds.kl if self.bounds else None
        if kl is None or not all(map(math.isfinite, (kl.value, kl.low, floor.kl))):
            return ""
        if kl.value == 0 and not bounded:
            return f"KL is exactly 0; {floor.way} alone makes more" if floor.kl else "KL is exactly 0"
        if kl.low > floor.kl:
            least = "at least " if bounded else ""
            return f"KL is {least}{number(kl.value / floor.kl, '.2g')} times that" if floor.kl else "KL is above it"
        if bounded and kl.high > floor.kl:
            return "KL may be above it, or not: its bounds lie on both sides"
        return f"KL is not above it: {floor.way} alone makes as much"

    @property
    def scores(self) -> tuple[LanguageScore, ...]:
        """Each model's score on the text."""
        both = self.distributions
        return self.alone if both is None else (both.a.score, both.b.score)

    def to_json(self) -> str:
        """Return the whole comparison as JSON, with both models, the text, versions and hashes."""
        body = {"verdict": "identical" if self.ok else "different", "ok": self.ok, **vars(self)}
        first = self.activations.first_past if self.activations else None
        body["first_past"] = None if first is None else {"point": first.point, "layer": first.layer, "error": first.error}
        if (weights := self.weights) is not None:
            most_changed = [tensor.name for tensor in weights.most_changed()]
            body["weights"] = {**vars(weights), "unchanged": weights.unchanged, "most_changed": most_changed}
        return as_json(body)

    def parts(self) -> Iterator[RenderableType]:
        """Yield both models, the summary, and a table for each measured part."""
        from rich.markup import escape

        yield f"\n[bold]{escape(self.a.name)}[/bold]  →  [bold]{escape(self.b.name)}[/bold]"
        yield f"[dim]{escape(self._subjects())}[/dim]\n"
        yield self._summary()
        for field, a, b in (*self.compatibility.architecture, *self.compatibility.vocabularies.rules):
            yield f"[yellow]differs[/yellow]  {field}: {escape(f'{a} → {b}')}"
        if (parting := self.compatibility.vocabularies.parting) is not None:
            yield f"[yellow]differs[/yellow]  tokenizers: {escape(str(parting))}"
        for finding in self.bounds.findings if self.bounds else ():
            yield f"[yellow]found[/yellow]  {finding.id}: {escape(finding.evidence)}"
        for why in dict.fromkeys(self.compatibility.impossible.values()):
            parts = [part for part, reason in self.compatibility.impossible.items() if reason == why]
            yield f"[yellow]left out[/yellow]  {', '.join(parts)}: {escape(why)}"
        if self.weights is not None and not self.weights.same_numbers:
            yield from titled("Weights", "the ten with the largest relative change", weights_table(self.weights))
        if self.activations is not None and self.activations.points:
            yield from titled("Activations", "relative error by block, at its worst point", activations_table(self.activations))
        if self.numerics is not None:
            table = numerics_table(self.numerics)
            yield from titled("Numerics", "distance from float64, by block, at its worst point", table)
        if self.distributions is not None:
            tables = distributions_tables(self.distributions)
            yield from titled("Distributions", "per token, in nats; intervals are 95 %", *tables)
        if self.words is not None and (table := words_table(self.words)).row_count:
            yield from titled("Words", "where they disagree most, and what each expected instead", table)
        if self.words is not None and self.words.continuations:
            yield continuations_table(self.words)
        if self.cases is not None and (self.cases.lost or self.cases.gained):
            yield from titled("Cases", "right in one, wrong in the other; probability of the answer", self.cases.table())
        if self.blame is not None:
            yield from titled("Blame", "KL that each part of b brings into a, in nats a token", *self.blame.rows(self.a.name))
        yield f"[dim]in {self.seconds:.1f} s[/dim]\n"

    def _subjects(self) -> str:
        vocabularies = self.compatibility.vocabularies
        kind = {"equal": "one tokenizer", "none": "one tokenizer for both"}
        kind |= dict.fromkeys(("merges", "extended"), vocabularies.on_the_text)
        tokenizer = kind.get(vocabularies.verdict, f"tokenizers differ in {vocabularies.differing:,} entries")
        known = [each.parameters for each in (self.a, self.b) if each.parameters is not None]
        sizes = " → ".join(f"{size:,}" for size in dict.fromkeys(known)) + " parameters" if known else ""
        dtypes = " → ".join(dict.fromkeys(each.dtype for each in (self.a, self.b) if each.dtype))
        return f"{' · '.join(filter(None, (sizes, dtypes, tokenizer)))}\n{self.text.name}: {self.protocol}"

    def _summary(self) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
        for _ in range(3):
            table.add_column(overflow="fold")
        departures = ", ".join(self.compatibility.departures)
        beside = f"another program: see {departures}" if departures else "nothing else"
        both = self.distributions
        perplexities = " → ".join(f"{score.perplexity:.2f}" for score in self.scores)
        bits = " → ".join(f"{score.bits_per_byte:.4f}" for score in self.scores)
        if both is not None:
            table.add_row("perplexity", perplexities, f"× {both.ratio.text('.3f')}")
            table.add_row(self.bits_per, bits)
            spread = f"median {both.kl_ab.percentiles['50']:.3g}, 99 % below {both.kl_ab.percentiles['99']:.3g}"
            table.add_row("KL(a‖b)", f"{both.kl_ab.mean.value:.3g} nats", spread)
            table.add_row("same top token", f"{both.same_top.value:.1%}", both.same_top.span(".1%"))
        elif (bounds := self.bounds) is not None:
            high = "at most, if the tokens left out are like the shown" if bounds.assumed else "at most"
            table.add_row("KL(a‖b)", f"{bounds.kl_low.value:.3g} nats", f"at least; from {bounds.kl_low.text('.3g')}")
            table.add_row("", f"{bounds.kl_high.value:.3g} nats", high)
            table.add_row("same top token", f"{bounds.same_top.value:.1%}", bounds.same_top.span(".1%"))
            table.add_row("perplexity", "", f"× {bounds.ratio.text('.3f')}")
            if bounds.not_finite:
                table.add_row("not finite", f"{bounds.not_finite:,} places", "whose KL is infinite or NaN, not counted above")
            sent = f"; {bounds.sent:,} tokens sent" if bounds.sent else ""
            table.add_row(
                "shown", f"{bounds.shown:.1%}", f"of the probability, in {bounds.top} tokens, at {bounds.tokens:,} places{sent}"
            )
        elif self.alone:
            table.add_row("bits per byte", bits, "each over its own tokens")
            table.add_row("perplexity", perplexities, "not comparable: different tokens")
        if self.floor is not None and self.above_floor:
            table.add_row("floor of noise", f"{self.floor.kl:.2g} nats", self.above_floor)
        if self.last_words is not None:
            first, second, change = self.last_words.a, self.last_words.b, self.last_words.change
            gain = f"{change.accuracy.text('+.1%')} of {first.n:,} passages"
            table.add_row("last words right", f"{first.accuracy.value:.1%} → {second.accuracy.value:.1%}", gain)
            ratio = f"× {change.ratio.text('.3f')} per word"
            table.add_row("their perplexity", f"{first.perplexity.value:.2f} → {second.perplexity.value:.2f}", ratio)
        if (cases := self.cases) is not None:
            right = f"{cases.right_a.value:.1%} → {cases.right_b.value:.1%}"
            turned = f"{len(cases.lost):,} lost, {len(cases.gained):,} gained of {len(cases.cases):,}"
            table.add_row("cases right", right, f"{turned}: {cases.gain.text('+.1%')}")
            table.add_row("expected text", "", f"× {cases.likelier.text('.3g')} as likely")
        if self.weights is not None:
            for letter, damage in zip("ab", self.weights.damage, strict=True):
                if damage:
                    table.add_row("[bold red]DAMAGED[/bold red]", letter, damage)
            total, most = self.weights.total, self.weights.most_changed(1)
            if most and self.weights.same_numbers:
                coarser = max(self.a.dtype, self.b.dtype, key=["float64", "float32", "float16", "bfloat16", "int8"].index)
                table.add_row("weights", "the same", f"rounded to {coarser}, and {beside}")
            elif self.weights.rounded_to:
                moved_by = f"which moves them by {total.distance:.2%}, and {beside}"
                table.add_row("weights", f"a's, in {self.weights.rounded_to}", moved_by)
            elif self.weights.nearly:
                table.add_row(
                    "weights", f"a's, in {self.weights.nearly}", f"but not {self.weights.beyond_text}: more than rounding"
                )
            elif most:
                largest = f"most: {most[0].name}, {moved(most[0].distance)}"
                rest = f"{len(self.weights.unchanged)} tensors unchanged"
                table.add_row("weights moved", f"{total.distance:.2%}", f"{largest}; {rest}")
            else:
                table.add_row("weights", "equal", f"all {len(self.weights.tensors)} tensors, every entry")
        if self.activations is not None and self.activations.points:
            past = self.activations.first_past
            title = f"first past {self.activations.threshold:g}"
            table.add_row(title, past.point if past else "nowhere", f"{past.error:.2g}" if past else "")
        if self.ok:
            table.add_row("[bold green]IDENTICAL[/bold green]", "in all that was measured")
        return table
