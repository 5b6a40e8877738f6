"""The result of comparing two models: a frozen dataclass with its terminal tables and JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2.comparison.activations import Activations, Numerics
from gpt2.comparison.blame_result import Blame
from gpt2.comparison.cases import Cases
from gpt2.comparison.compatibility import Compatibility
from gpt2.comparison.distributions import Distributions
from gpt2.comparison.noise import Floor
from gpt2.comparison.passage import Scored
from gpt2.comparison.sides.side import Model
from gpt2.comparison.weights import WeightChanges
from gpt2.comparison.words import Words
from gpt2.measure.last_words import LastWords
from gpt2.measure.metrics import LanguageScore
from gpt2.measure.tracing import block_of, part_of
from gpt2.pages.rendering import number, percent, readable, visible
from gpt2.pages.reports import Environment, Printed, add_texts, as_json, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

VISIBLE_JS = 0.005  # nats; a smaller divergence is printed as 0.00


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
    gates: tuple[object, ...] = ()  # of --fail-if: what gates.py says of it
    blame: Blame | None = None
    floor: Floor | None = None
    cases: Cases | None = None  # of --cases

    @property
    def ok(self) -> bool:
        """Whether no measured part differs."""
        weights = self.weights is None or self.weights.total.unchanged == 1.0
        activations = self.activations is None or all(point.max_abs == 0 for point in self.activations.points)
        distributions = self.distributions is not None and self.distributions.js.max == 0
        program = not self.compatibility.architecture and not self.compatibility.departures
        program = program and "heads" not in self.compatibility.impossible
        return weights and activations and distributions and program

    @property
    def protocol(self) -> str:
        """Scored tokens, context and stride; one set per model if the tokenizers differ."""
        if self.alone:
            each = " → ".join(f"{s.tokens:,} tokens scored, context {s.context}, stride {s.stride}" for s in self.alone)
            return "; ".join(filter(None, (each, self.text.reading)))
        return self.text.cut

    @property
    def bits_per(self) -> str:
        """The unit of bits per byte; ids without a tokenizer have no bytes, so their unit is the token."""
        known = self.text.sha256 or any(score.bytes != score.tokens for score in self.scores)
        return "bits per byte" if known else "bits per token"

    @property
    def above_floor(self) -> str:
        """Whether the measured KL is above what rounding makes of one model, in words; "" if either was not measured."""
        if self.floor is None or self.distributions is None:
            return ""
        floor, kl = self.floor, self.distributions.kl_ab.mean
        if not all(map(math.isfinite, (kl.value, kl.low, floor.kl))):
            return ""
        if kl.value == 0:
            return f"KL is exactly 0; {floor.way} alone makes more" if floor.kl else "KL is exactly 0"
        if kl.low > floor.kl:
            return f"KL is {number(kl.value / floor.kl, '.2g')} times that" if floor.kl else "KL is above it"
        return f"KL is not above it: {floor.way} alone makes as much"

    @property
    def lacking(self) -> list[tuple[str, str, float]]:
        """Who gives probability to tokens that the other lacks: (one, other, share)."""
        both = self.distributions
        shares = () if both is None else (("A", "B", both.only_a.value), ("B", "A", both.only_b.value))
        return [each for each in shares if each[2] > 0]

    @property
    def scores(self) -> tuple[LanguageScore, ...]:
        """Each model's score on the text."""
        both = self.distributions
        return self.alone if both is None else (both.a.score, both.b.score)

    def sentence(self) -> tuple[str, str]:
        """Return the result in one sentence: its beginning, printed bold, and its end."""
        weights, both, a, b = self.weights, self.distributions, self.a, self.b
        if self.ok:
            return "Identical", ": nothing that was measured differs, not a weight, not an activation, not a probability."
        if weights is not None and weights.total.unchanged == 1:
            how = "heads" in self.compatibility.impossible and "with other heads, which are left out"
            how = how or (a.dtype != b.dtype and f"run in {a.dtype} and in {b.dtype}")
            how = how or (a.implementation != b.implementation and f"run by {a.implementation} and by {b.implementation}")
            subject = f"The same weights, {how or 'run in two ways'}"
            subject = f"The same weights in the rows that both have, and {weights.rows_text}" if weights.rows else subject
        elif weights is not None and weights.same_numbers:
            subject = f"The same weights in another precision, {a.dtype} and {b.dtype}"
        elif weights is not None:
            rounded = f" (A’s, rounded to {weights.rounded_to})" if weights.rounded_to else ""
            if weights.nearly:
                rounded = f" (A’s, rounded to {weights.nearly}, but not {weights.beyond_text})"
            subject = f"The weights{rounded} moved by {percent(weights.total.distance)} of their size"
        else:
            differing = [field for field, *_ in self.compatibility.architecture]
            subject = f"Two models that differ in {', '.join(differing)}" if differing else "Two models"
        if both is not None:
            return subject, f": {_prediction(both)}."
        if self.alone:
            bits_a, bits_b = (number(score.bits_per_byte) for score in self.alone)
            return subject, f": with tokenizers of their own, A needs {bits_a} and B {bits_b} bits per byte of this text."
        return subject, "."

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
        from rich.table import Table

        yield f"\n[bold]{escape(self.a.name)}[/bold]  →  [bold]{escape(self.b.name)}[/bold]"
        yield f"[dim]{escape(self._subjects())}[/dim]"
        subject, rest = self.sentence()
        yield f"[bold]{escape(subject)}[/bold]{escape(rest)}\n"
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
        for _ in range(3):
            table.add_column(overflow="fold")
        for row in self._summary():
            table.add_row(*row)
        yield table
        for field, a, b in (*self.compatibility.architecture, *self.compatibility.vocabularies.rules):
            yield f"[yellow]differs[/yellow]  {field}: {escape(f'{a} → {b}')}"
        if (parting := self.compatibility.vocabularies.parting) is not None:
            yield f"[yellow]differs[/yellow]  tokenizers: {escape(str(parting))}"
        for why in dict.fromkeys(self.compatibility.impossible.values()):
            parts = [part for part, reason in self.compatibility.impossible.items() if reason == why]
            yield f"[yellow]left out[/yellow]  {', '.join(parts)}: {escape(why)}"
        for title, what, tables in self._tables():
            if title:
                yield f"\n[bold]{title}[/bold]  [dim]{what}[/dim]"
            yield from tables
        yield f"[dim]in {self.seconds:.1f} s[/dim]\n"

    def _tables(self) -> Iterator[tuple[str, str, Iterable[RenderableType]]]:
        """Yield each measured part's title ("" if it goes on with the last), what it shows, and its tables."""
        if self.weights is not None and not self.weights.same_numbers:
            yield "Weights", "the ten with the largest relative change", [_weights_table(self.weights)]
        if self.activations is not None and self.activations.points:
            yield "Activations", "relative error by block, at its worst point", [_activations_table(self.activations)]
        if self.numerics is not None:
            yield "Numerics", "distance from float64, by block, at its worst point", [_numerics_table(self.numerics)]
        if self.distributions is not None:
            tables = _distributions_tables(self.distributions)
            yield "Distributions", "per token, in nats; intervals are 95 %", tables
        if self.words is not None and (rows := _words_table(self.words)).row_count:
            yield "Words", "where they disagree most, and what each expected instead", [rows]
        if self.words is not None and self.words.continuations:
            yield "", "", [_continuations_table(self.words)]
        if self.cases is not None and any(case.kind != "right" for case in self.cases.cases):
            yield "Cases", "those that turned, and the wrong ones; --html and --json have every answer", [self.cases.table()]
        if self.blame is not None:
            shared = ", over the tokens that both have" * (self.compatibility.vocabularies.verdict == "extended")
            yield "Blame", f"KL that each part of b brings into a, in nats a token{shared}", self.blame.rows()

    def _subjects(self) -> str:
        vocabularies = self.compatibility.vocabularies
        kind = {"equal": "one tokenizer", "none": "one tokenizer for both"}
        kind |= dict.fromkeys(("merges", "extended"), vocabularies.on_the_text)
        tokenizer = kind.get(vocabularies.verdict, f"tokenizers differ in {vocabularies.differing:,} entries")
        known = [each.parameters for each in (self.a, self.b) if each.parameters is not None]
        sizes = " → ".join(f"{size:,}" for size in dict.fromkeys(known)) + " parameters" if known else ""
        dtypes = " → ".join(dict.fromkeys(each.dtype for each in (self.a, self.b) if each.dtype))
        return f"{' · '.join(filter(None, (sizes, dtypes, tokenizer)))}\n{self.text.name}: {self.protocol}"

    def _summary(self) -> Iterator[tuple[str, str, str]]:
        """Yield what the figures say together: a name, a figure, and a remark."""
        perplexities = " → ".join(f"{score.perplexity:.2f}" for score in self.scores)
        bits = " → ".join(f"{score.bits_per_byte:.4f}" for score in self.scores)
        if (both := self.distributions) is not None:
            yield "perplexity", perplexities, f"× {both.ratio.text('.3f')}"
            yield self.bits_per, bits, ""
            spread = f"median {both.kl_ab.percentiles['50']:.3g}, 99 % below {both.kl_ab.percentiles['99']:.3g}"
            yield "KL(a‖b)", f"{both.kl_ab.mean.value:.3g} nats", spread
            yield "same top token", *both.same_top.cells(".1%")
            for one, other, share in self.lacking:
                yield f"{other} lacks", f"{100 * share:.3g}%", f"of {one}'s probability, which is on tokens that only {one} has"
        elif self.alone:
            yield "bits per byte", bits, "each over its own tokens"
            yield "perplexity", perplexities, "not comparable: different tokens"
        if self.floor is not None and self.above_floor:
            yield "floor of noise", f"{self.floor.kl:.2g} nats", self.above_floor
        if self.last_words is not None:
            first, second, change = self.last_words.a, self.last_words.b, self.last_words.change
            gain = f"{change.accuracy.text('+.1%')} of {first.n:,} passages"
            yield "last words right", f"{first.accuracy.value:.1%} → {second.accuracy.value:.1%}", gain
            ratio = f"× {change.ratio.text('.3f')} per word"
            yield "their perplexity", f"{first.perplexity.value:.2f} → {second.perplexity.value:.2f}", ratio
        if (cases := self.cases) is not None:
            turned = f"{len(cases.lost):,} lost, {len(cases.gained):,} gained of {len(cases.cases):,}"
            right = f"{cases.right_a.value:.1%} → {cases.right_b.value:.1%}"
            yield "cases right" if cases.contains_a else "accuracy", right, f"{turned}: {cases.gain.text('+.1%')}"
            if cases.contains_a and cases.contains_b:
                yield "expected within", f"{cases.contains_a.value:.1%} → {cases.contains_b.value:.1%}", "of the answers"
            yield "expected text" if cases.contains_a else "right label", "", f"× {cases.likelier.text('.3g')} as likely"
        if self.weights is not None:
            departures = ", ".join(self.compatibility.departures)
            beside = f"another program: see {departures}" if departures else "nothing else"
            yield self.weights.summary((self.a.dtype, self.b.dtype), beside)
        if self.activations is not None and self.activations.points:
            past = self.activations.first_past
            title = f"first past {self.activations.threshold:g}"
            yield title, past.point if past else "nowhere", f"{past.error:.2g}" if past else ""
        if self.ok:
            yield "[bold green]IDENTICAL[/bold green]", "in all that was measured", ""


def _prediction(both: Distributions) -> str:
    same = f"both would choose the same next token {percent(both.same_top.value)} of the time"
    if not both.ratio.low <= 1 <= both.ratio.high:
        better = "better" if both.ratio.value < 1 else "worse"
        perplexity = f"{number(both.a.perplexity.value, '#.4g')} → {number(both.b.perplexity.value, '#.4g')}"
        return f"B predicts this text {better} (perplexity {perplexity}), and {same}"
    return f"they predict this text equally well, as far as {both.tokens:,} tokens can tell, and {same}"


def _weights_table(weights: WeightChanges) -> Table:
    rows = []
    for tensor in weights.most_changed():
        rank = "" if tensor.rank is None else f"{tensor.rank} of {tensor.full_rank}"
        sizes = f"{tensor.max_abs:.2g}", f"{tensor.cosine:.5f}", f"{tensor.unchanged:.1%}"
        rows.append((tensor.name, tensor.moved, *sizes, rank))
    return data_table("tensor", "moved", "max", "cosine", "unchanged", "rank of change", rows=rows)


def _activations_table(activations: Activations) -> Table:
    blocks = itertools.groupby(activations.points, lambda point: block_of(point.point))
    worst = ((block, max(points, key=lambda point: point.error)) for block, points in blocks)
    rows = ((block, f"{x.error:.2g}", part_of(x.point), f"{x.sqnr:.0f} dB", f"{x.cosine:.6f}") for block, x in worst)
    return data_table("where", "error", "at", "SQNR", "cosine", rows=rows)


def _numerics_table(numerics: Numerics) -> Table:
    blocks = itertools.groupby(numerics.points, lambda point: block_of(point[0]))
    worst = ((block, *max(points, key=lambda point: max(point[1:]))) for block, points in blocks)
    rows = [(block, f"{error_a:.1e}", f"{error_b:.1e}", part_of(name)) for block, name, error_a, error_b in worst]
    rows += [("logits", f"{error:.1e}", "", description) for description, error in numerics.logits]
    return data_table("where", "a", "b", "at", rows=rows)


def _distributions_tables(both: Distributions) -> tuple[RenderableType, ...]:
    divergences = (both.kl_ab, both.kl_ba, both.js)
    rows = [("mean", *(f"{each.mean.value:.3g}" for each in divergences))]
    rows += [("95 % interval", *(each.mean.span(".3g") for each in divergences))]
    names = {"50": "median"} | {key: f"{key} %" for key in ("90", "95", "99", "99.9")}
    rows += [(name, *(f"{each.percentiles[key]:.3g}" for each in divergences)) for key, name in names.items()]
    rows += [("max", *(f"{each.max:.3g}" for each in divergences))]
    return (
        data_table("", "KL(a‖b)", "KL(b‖a)", "Jensen-Shannon", rows=rows),
        f"top {both.top} overlap {both.overlap.value:.1%} · correlation of log-probabilities {both.correlation:.4f} · "
        f"right token's probability {100 * both.change.mean.value:+.2f} percentage points on average, "
        f"{100 * both.change.rms.value:.2f} RMS",
        f"calibration error {both.calibration_a.ece:.2%} → {both.calibration_b.ece:.2%}",
    )


def _words_table(words: Words) -> Table:
    """Return the first two of the passages, if they differ to be seen."""
    table = data_table("", "the text", "a", "b", "a expected", "b expected", "JS")
    for passage in words.passages[:2]:
        if any(word.js >= VISIBLE_JS for word in passage.words):
            for word in passage.words:
                tops = [f"{visible(top[0].text)} {top[0].probability:.0%}" if top else "" for top in (word.top_a, word.top_b)]
                probabilities = f"{word.probability_a:.1%}", f"{word.probability_b:.1%}"
                add_texts(table, "", visible(word.text), *probabilities, *tops, f"{word.js:.2f}")
            table.add_section()
    return table


def _continuations_table(words: Words) -> Table:
    rows = []
    for row in words.continuations:
        sampling = "greedy" if row.temperature == 0 else f"T = {row.temperature:g}"
        parts = "not at all" if row.parts_at is None else f"from token {row.parts_at + 1}"
        rows.append((f"{readable(row.prompt)}\n({sampling})", readable(row.a), readable(row.b), parts))
    return data_table("prompt", "a goes on", "b goes on", "they differ", rows=rows, wrap=True, apart=True)
