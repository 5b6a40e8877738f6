"""The result of comparing two models: what it says in words, its terminal tables, and its JSON."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from gpt2.comparison import charts
from gpt2.comparison.blame import Blame
from gpt2.comparison.cases import Cases
from gpt2.comparison.compatibility import Compatibility
from gpt2.comparison.distributions import Distributions
from gpt2.comparison.noise import EXACT, Floor, equal
from gpt2.comparison.passage import Scored
from gpt2.comparison.sides.side import ComparedModel
from gpt2.comparison.tensors import Activations, WeightChanges
from gpt2.comparison.words import NEW_TOKENS, Words
from gpt2.measure.environment import Environment
from gpt2.measure.last_words import LastWords
from gpt2.measure.metrics import MAX_JS, LanguageScore
from gpt2.measure.tracing import block_of, part_of
from gpt2.pages.rendering import number, percent, readable, short_names, visible
from gpt2.pages.reports import Column, Line, Printed, Section, Styled, as_json, bold, dim, yellow

VISIBLE_JS = 0.005  # nats; a smaller divergence is printed as 0.00


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of two models; a part that was not chosen, or is not possible, is None: ``compatibility`` says why."""

    compatibility: Compatibility
    distributions: Distributions | None = None
    weights: WeightChanges | None = None
    activations: Activations | None = None
    words: Words | None = None
    cases: Cases | None = None
    floor: Floor | None = None

    @property
    def floor_above(self) -> Floor | None:
        """The floor of noise where it is as large as the measured KL; None elsewhere."""
        floor, both = self.floor, self.distributions
        return floor if floor and both and -math.inf < both.kl_ab.mean.low <= floor.kl else None


@dataclass(frozen=True, kw_only=True)
class Comparison(Measured, Printed):
    """The result of comparing two models."""

    command: ClassVar[str] = "gpt2 compare"

    a: ComparedModel
    b: ComparedModel
    text: Scored
    alone: tuple[LanguageScore, ...]  # one per model, if the distributions cannot be compared
    last_words: LastWords | None
    environment: Environment
    seed: int
    seconds: float
    gates: tuple[Any, ...] = ()  # of --fail-if: what gates.py says of it
    blame: Blame | None = None

    @property
    def ok(self) -> bool:
        """Whether no measured part differs."""
        weights = self.weights is None or self.weights.total.unchanged == 1.0
        activations = self.activations is None or all(point.max_abs == 0 for point in self.activations.points)
        distributions = self.distributions is not None and self.distributions.js.max == 0
        other = self.compatibility.architecture or self.compatibility.departures or "heads" in self.compatibility.impossible
        return weights and activations and distributions and not other

    @property
    def moved(self) -> float | None:
        """The norm of the weights' change over the norm of a's."""
        return None if self.weights is None else self.weights.total.distance

    @property
    def above_floor(self) -> str:
        """Whether the measured KL is above what rounding makes of one model, in words; "" if either was not measured."""
        floor, both = self.floor, self.distributions
        if not floor or not both or not all(map(math.isfinite, ((kl := both.kl_ab.mean).value, kl.low, floor.kl))):
            return ""
        if kl.value == 0:
            return f"KL is exactly 0; {floor.way} alone makes more" if floor.kl else "KL is exactly 0"
        if self.floor_above:
            return f"KL is not above it: {floor.way} alone makes as much"
        return f"KL is {number(kl.value / floor.kl, '.2g')} times that" if floor.kl else "KL is above it"

    def sentence(self) -> tuple[str, str]:
        """Return the result in one sentence: its beginning, printed bold, and its end."""
        weights, a, b = self.weights, self.a, self.b
        differing = [what for what, *_ in self.compatibility.architecture]
        if self.ok:
            return "Identical", ": nothing that was measured differs, not a weight, not an activation, not a probability."
        if weights is None:
            subject = f"Two models that differ in {', '.join(differing)}" if differing else "Two models"
        elif weights.total.unchanged == 1 and weights.rows:
            subject = f"The same weights in the rows that both have, and {weights.rows_text}"
        elif weights.total.unchanged == 1:
            how = "heads" in self.compatibility.impossible and "with other heads, which are left out"
            how = how or (a.dtype != b.dtype and f"run in {a.dtype} and in {b.dtype}")
            how = how or (a.implementation != b.implementation and f"run by {a.implementation} and by {b.implementation}")
            subject = f"The same weights, {how or 'run in two ways'}"
        elif weights.same_numbers:
            subject = f"The same weights in another precision, {a.dtype} and {b.dtype}"
        else:
            kind, but = weights.nearly or weights.rounded_to, f", but not {weights.beyond_text}" if weights.nearly else ""
            rounded = f" (A’s, rounded to {kind}{but})" if kind else ""
            subject = f"The weights{rounded} moved by {percent(weights.total.distance)} of their size"
        if self.distributions is not None:
            text = "A's tokens of this text" if self.compatibility.vocabularies.parting else "this text"  # B's own are others
            return subject, f": {_prediction(text, self.distributions, self.floor_above)}."
        if self.alone:
            bits_a, bits_b = (number(score.bits_per_byte) for score in self.alone)
            return subject, f": with tokenizers of their own, A needs {bits_a} and B {bits_b} bits per byte of this text."
        return subject, "."

    def to_json(self) -> str:
        """Return the whole comparison as JSON, with both models, the text, versions and hashes."""
        body = {"verdict": "identical" if self.ok else "different", "ok": self.ok, "a": self.a, "b": self.b, **vars(self)}
        first = self.activations.first_past if self.activations else None
        body["first_past"] = None if first is None else {"point": first.point, "layer": first.layer, "error": first.error}
        if (weights := self.weights) is not None:
            most_changed = [tensor.name for tensor in weights.most_changed()]
            body["weights"] = {**vars(weights), "unchanged": weights.unchanged, "most_changed": most_changed}
        return as_json(body)

    def sections(self) -> Iterator[Section]:
        """Yield both models, the summary, and each measured part."""
        found, names = self.compatibility, short_names(self.a.name, self.b.name)
        subject, rest = self.sentence()
        yield Section(note=("\n", bold(self.a.name), "  →  ", bold(self.b.name)))
        yield Section(note=dim(self._subjects()))
        yield Section(note=(bold(subject), f"{rest}\n"))
        yield Section(columns=("", "", ""), rows=list(self._summary()), tiles=True)
        yield from (Section(note=gate.verdict, for_pages=True) for gate in self.gates)
        for what, a, b in (*found.architecture, *found.vocabularies.rules):
            yield Section(note=(yellow("differs"), f"  {what}: {a} → {b}"))
        if (parting := found.vocabularies.parting) is not None:
            yield Section(note=(yellow("differs"), f"  tokenizers: {parting}"))
        for why in dict.fromkeys(found.impossible.values()):
            parts = [part for part, reason in found.impossible.items() if reason == why]
            yield Section(note=(yellow("left out"), f"  {', '.join(parts)}: {why}"))
        if self.weights is not None and not self.weights.same_numbers:
            yield _weights(self.weights)
        if self.activations is not None:
            yield _activations(self.activations)
        if self.distributions is not None:
            yield from _distributions(self.distributions)
            if self.words is not None:
                yield from _words(self.words, names, self.distributions.tokens)
        if self.cases is not None:
            yield from self.cases.sections()
        if self.blame is not None:
            yield from self.blame.sections(", over the tokens that both have" * (found.vocabularies.verdict == "extended"))
        if self.weights is not None and self.weights.total.unchanged < 1:
            yield charts.heat(self.weights.tensors)
        if examples := found.vocabularies.examples:
            rows = [(str(id), a or "", b or "") for id, a, b in examples]
            yield Section("Tokens", "entries of the vocabularies that differ", ("id", "a", "b"), rows, for_pages=True)
        yield Section(note=dim(f"in {self.seconds:.1f} s\n"))

    def origin(self, page: str) -> Iterator[Section]:
        """Yield how to make the page again."""
        more: dict[str, object] = {} if self.activations is None else {"threshold": self.activations.threshold}
        more |= ({} if self.blame is None else {"blame": True}) | ({} if self.cases is None else {"cases": self.cases.file})
        yield charts.made_with(page, [self.a, self.b], self.text, self.environment, seed=self.seed, **more)

    def _subjects(self) -> str:
        vocabularies = self.compatibility.vocabularies
        kind = {"equal": "one tokenizer", "none": "one tokenizer for both"}
        kind |= dict.fromkeys(("merges", "extended"), vocabularies.on_the_text)
        tokenizer = kind.get(vocabularies.verdict, f"tokenizers differ in {vocabularies.differing:,} entries")
        known = [each.parameters for each in (self.a, self.b) if each.parameters is not None]
        sizes = " → ".join(f"{size:,}" for size in dict.fromkeys(known)) + " parameters" if known else ""
        dtypes = " → ".join(dict.fromkeys(each.dtype for each in (self.a, self.b) if each.dtype))
        scores = (both.a.score, both.b.score) if (both := self.distributions) else self.alone
        return f"{' · '.join(filter(None, (sizes, dtypes, tokenizer)))}\n{self.text.name}: {self.text.cut(scores)}"

    def _summary(self) -> Iterator[tuple[Line, str, str]]:
        """Yield what the figures say together: a name, a figure, and a remark."""
        scores = (both.a.score, both.b.score) if (both := self.distributions) else self.alone
        perplexities = " → ".join(f"{score.perplexity:.2f}" for score in scores)
        bits = " → ".join(f"{score.bits_per_byte:.4f}" for score in scores)
        if both is not None:
            yield "perplexity", perplexities, f"× {both.ratio.text('#.4g')}"
            yield self.text.bits_per(scores), bits, "of A's tokens" * bool(self.compatibility.vocabularies.parting)
            spread = f"median {both.kl_ab.percentiles['50']:.3g}, 99 % below {both.kl_ab.percentiles['99']:.3g}"
            yield "KL(a‖b)", f"{both.kl_ab.mean.value:.3g} nats", spread
            yield "same top token", *both.same_top.cells(".1%")
            for one, other, share in both.lacking():
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
            ratio = f"× {change.ratio.text('#.4g')} per word"
            yield "their perplexity", f"{first.perplexity.value:.2f} → {second.perplexity.value:.2f}", ratio
        if (cases := self.cases) is not None:
            turned = f"{', '.join(f'{len(cases.by_kind[kind]):,} {kind}' for kind in ('lost', 'gained'))} of {len(cases.cases):,}"
            right = f"{cases.right_a.value:.1%} → {cases.right_b.value:.1%}"
            yield "cases right" if cases.contains_a else "accuracy", right, f"{turned}: {cases.gain.text('+.1%')}"
            if cases.contains_a and cases.contains_b:
                yield "expected within", f"{cases.contains_a.value:.1%} → {cases.contains_b.value:.1%}", "of the answers"
            yield "expected text" if cases.contains_a else "right label", "", f"× {cases.likelier.text('.3g')} as likely"
        if self.weights is not None:
            departures = ", ".join(self.compatibility.departures)
            beside = f"another program: see {departures}" if departures else "nothing else"
            yield self.weights.summary((self.a.dtype, self.b.dtype), beside)
        if self.activations is not None:
            past = self.activations.first_past
            title = f"first past {self.activations.threshold:g}"
            yield title, past.point if past else "nowhere", f"{past.error:.2g}" if past else ""
        if self.ok:
            yield Styled("IDENTICAL", "bold green"), "in all that was measured", ""


def _prediction(text: str, both: Distributions, floor: Floor | None) -> str:
    same = f"both would choose the same next token {percent(both.same_top.value)} of the time"
    if both.js.max == 0:
        return f"they predict {text} alike, to the last bit, and {same}"
    if equal(both.ratio, floor.ratio if floor else EXACT):
        far = f"as far as {both.tokens:,} token{'s' * (both.tokens > 1)} can tell"
        why = f"for {floor.way} explains the difference" if floor else far
        return f"they predict {text} equally well, {why}, and {same}"
    values = both.a.perplexity.value, both.b.perplexity.value
    form = next((form for form in ("#.4g", "#.7g") if len({format(value, form) for value in values}) == 2), "#.17g")
    perplexity = " → ".join(number(value, form) for value in values)
    return f"B predicts {text} {'better' if both.ratio.value < 1 else 'worse'} (perplexity {perplexity}), and {same}"


def _weights(weights: WeightChanges) -> Section:
    rows = []
    for tensor in weights.most_changed():
        rank = "" if tensor.rank is None else f"{tensor.rank} of {min(tensor.shape)}"
        sizes = f"{tensor.max_abs:.2g}", f"{tensor.cosine:.5f}", f"{tensor.unchanged:.1%}"
        rows.append((tensor.name, tensor.moved, *sizes, rank))
    titles = "tensor", "moved", "max", "cosine", "unchanged", "rank of change"
    return Section("Weights", "the ten with the largest relative change", titles, rows)


def _activations(activations: Activations) -> Section:
    """Return the worst point of each block."""
    blocks = itertools.groupby(activations.points, lambda point: block_of(point.point))
    worst = ((block, max(points, key=lambda point: point.error)) for block, points in blocks)
    rows = [(block, f"{x.error:.2g}", part_of(x.point), f"{x.sqnr:z.0f} dB", f"{x.cosine:.6f}") for block, x in worst]
    chart = partial(charts.errors_by_layer, [(x.point, x.error) for x in activations.points], activations.threshold)
    what = "relative error by block, at its worst point"
    return Section("Activations", what, ("where", "error", "at", "SQNR", "cosine"), rows, chart)


def _distributions(both: Distributions) -> Iterator[Section]:
    divergences = both.kl_ab, both.kl_ba, both.js
    rows = [("mean", *(f"{each.mean.value:.3g}" for each in divergences))]
    rows += [("95 % interval", *(each.mean.span(".3g") for each in divergences))]
    names = {"50": "median"} | {key: f"{key} %" for key in ("90", "95", "99", "99.9")}
    rows += [(name, *(f"{each.percentiles[key]:.3g}" for each in divergences)) for key, name in names.items()]
    rows += [("max", *(f"{each.max:.3g}" for each in divergences))]
    titles = "", "KL(a‖b)", "KL(b‖a)", "Jensen-Shannon"
    yield Section("Distributions", "per token, in nats; intervals are 95 %", titles, rows)
    mean, rms = 100 * both.change.mean.value, 100 * both.change.rms.value
    yield Section(note=f"right token's probability {mean:+z.2f} percentage points on average, {rms:.2f} RMS")


def _words(words: Words, names: tuple[str, str], scored: int) -> Iterator[Section]:
    """Yield the text on pages, the first two of the passages, if they differ to be seen, and the continuations."""
    shown, largest = len(words.text), max((word.js for word in words.text if math.isfinite(word.js)), default=0.0)
    scale = largest if 0 < largest <= 0.02 else MAX_JS  # the divergence of the darkest colour
    what = f"its first {shown:,} of {scored:,} tokens; " * (shown < scored) + "point at a token, or tap it"
    yield Section("The text", what, chart=partial(charts.coloured, [("", words.text)], scale, names))
    rows = list[tuple[str, ...]]()
    for passage in words.passages[:2]:
        if any(word.js >= VISIBLE_JS for word in passage.words):
            for word in passage.words:
                tops = [f"{visible(top[0].text)} {top[0].probability:.0%}" if top else "" for top in (word.top_a, word.top_b)]
                probabilities = f"{word.probability_a:.1%}", f"{word.probability_b:.1%}"
                rows.append(("", visible(word.text), *probabilities, *tops, f"{word.js:.2f}"))
            rows.append(())
    extracts = [(f"from token {each.start + 1:,}; mean JS {number(each.js)}", each.words) for each in words.passages]
    titles = "", "the text", "a", "b", "a expected", "b expected", "JS"
    if words.passages:
        what = "where they disagree most: how probable each token was in a and b, and what they expected instead"
        yield Section("Words", what, titles, rows, partial(charts.coloured, extracts, scale, names))
    said = list[tuple[str, ...]]()
    for row in words.continuations:
        parts = "not at all" if row.parts_at is None else f"from token {row.parts_at + 1}"
        said += [(f"{readable(row.prompt)}\n(greedy, up to {NEW_TOKENS} tokens)", readable(row.a), readable(row.b), parts), ()]
    if said:
        yield Section(columns=(Column("prompt", wrap=True), "a goes on", "b goes on", "they differ"), rows=said)
