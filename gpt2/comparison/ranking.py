"""Several models on one text: each beside the first, their order from the best on, terminal tables and JSON."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gpt2.comparison import charts
from gpt2.comparison.distributions import Language, perplexity_ratio
from gpt2.comparison.noise import EXACT, equal
from gpt2.comparison.passage import Scored
from gpt2.comparison.results import Measured
from gpt2.comparison.sides.side import ComparedModel
from gpt2.measure.environment import Environment
from gpt2.measure.estimates import Bootstrap, Estimate, formatted
from gpt2.measure.last_words import LastWord
from gpt2.pages.reports import Column, Line, Printed, Section, as_json, bold, dim, numbers, yellow


@dataclass(frozen=True)
class Pair(Measured):
    """One of the models, and what was measured of it beside the first one; of the first, what it shows alone.

    ``size`` and ``tokens_per_second`` are those of its :class:`Side`. ``language`` is over its own tokens where these are not the
    first's. ``moved`` is the norm of the weights' change from the first model over the norm.
    """

    model: ComparedModel
    size: int | None
    tokens_per_second: float
    language: Language
    last_words: LastWord | None = None
    logp: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False)  # of tokens, the first's and its own
    moved: float | None = None
    rows: int = 0  # of the vocabulary more than the first model's
    step: int | None = None  # of a training run

    @property
    def figures(self) -> dict[str, object]:
        """What the JSON has of several models."""
        against: dict[str, object] | None = None
        if (both := self.distributions) is not None:
            against = {"ratio": both.ratio, "bits": both.bits, "kl": both.kl_ab.mean, "kl_max": both.kl_ab.max}
            against |= {"same_top": both.same_top, "only_first": both.only_a, "only_it": both.only_b}
        own = ("model", "step", "size", "tokens_per_second", "language", "last_words")
        beside = {"against": against, "weights": self.moved, "left_out": self.compatibility.impossible, "rows": self.rows}
        return {name: getattr(self, name) for name in own} | beside

    def described(self) -> tuple[str, ...]:
        """Return the cells of its row among the models: name, step, size, speed, and how far the weights moved."""
        size = "" if self.size is None else f"{self.size / 1e9:.2f} GB" if self.size >= 1e9 else f"{self.size / 1e6:.1f} MB"
        speed = "" if math.isnan(self.tokens_per_second) else f"{self.tokens_per_second:,.0f}"
        moved = "" if self.moved is None else "equal" if self.moved == 0 else f"{self.moved:.2%}"
        moved += f", {self.rows:+,} rows" if self.moved is not None and self.rows else ""
        return self.model.name, "" if self.step is None else str(self.step), size, speed, moved

    def scores(self) -> tuple[str, ...]:
        """Return perplexity and bits per byte, each with its distance from the first model's."""
        perplexity, bits = f"{self.language.perplexity.value:.2f}", f"{self.language.bits_per_byte.value:.4f}"
        if (found := self.distributions) is None:
            return perplexity, "", "", bits, "", ""
        return perplexity, *found.ratio.cells("#.4g"), bits, *found.bits.cells("+.4f")

    def distances(self) -> tuple[str, ...]:
        """Return the divergences from the first model; nothing where there are none."""
        if (found := self.distributions) is None:
            return ()
        return *found.kl_ab.mean.cells(".3g", ".2g"), f"{found.kl_ab.max:.3g}", *found.same_top.cells(".1%")

    def last(self) -> tuple[str, ...]:
        """Return the last words: how many are right, and their perplexity."""
        if (last := self.last_words) is None:
            return ()
        return f"{last.accuracy.value:.2%} ({last.accuracy.span('.2%')})", f"{last.perplexity.value:.2f}"


class Ranked(NamedTuple):
    """A model's place: the number of the candidate, and its perplexity over that of the one before, paired; None if unknown."""

    candidate: int
    behind: Estimate | None


def ranked(candidates: Sequence[Pair], bootstrap: Bootstrap, seed: int) -> tuple[Ranked, ...]:
    """Return the models from the best on, by what the text asks, each with its distance from the one before."""
    worth = [each.language.bits_per_byte.value for each in candidates]
    losses = [None if each.logp is None else -each.logp[1] for each in candidates]
    if all(words := [each.last_words for each in candidates]):
        losses = [torch.tensor(each.losses, dtype=torch.float64) for each in words if each]
        worth = [float(each.mean()) for each in losses if each is not None]
        bootstrap = Bootstrap(words[0].n if words[0] else 0, seed)
    order = sorted(range(len(worth)), key=lambda n: (math.isnan(worth[n]), worth[n]))
    places = [Ranked(order[0], None)]
    for before, n in itertools.pairwise(order):
        one, other = losses[before], losses[n]
        paired = None if one is None or other is None else perplexity_ratio(-one, -other, bootstrap)
        places.append(Ranked(n, paired))
    return tuple(places)


@dataclass(frozen=True)
class Comparisons(Printed):
    """Several models on one text, each compared with the first of ``candidates``."""

    command: ClassVar[str] = "gpt2 compare"

    candidates: tuple[Pair, ...]
    text: Scored
    environment: Environment
    seed: int
    seconds: float
    forward_seconds: float  # of them in the models' forward passes
    ranking: tuple[Ranked, ...] = ()  # from the best on
    gates: tuple[tuple[Any, ...], ...] = ()  # of --fail-if, for each candidate but the first

    @property
    def letters(self) -> tuple[str, ...]:
        """A short name for each model: A, B, C ... and numbers after Z."""
        count = len(self.candidates)
        return tuple(ascii_uppercase[:count]) if count <= 26 else tuple(str(number + 1) for number in range(count))

    @property
    def best(self) -> str:
        """The models in their order, best first, in words."""
        words = [self.letters[each.candidate] for each in self.ranking[:1]]
        floors = {0: EXACT} | {n: floor.ratio for n, each in enumerate(self.candidates) if (floor := each.floor_above)}
        for (before, _), (place, behind) in itertools.pairwise(self.ranking):
            over, under = (floors[place], floors[before]) if {before, place} <= floors.keys() else (EXACT, EXACT)
            explained = Estimate(over.value / under.value, over.low / under.high, over.high / under.low)
            how = "" if behind is None else " equal" if equal(behind, explained) else " worse"
            by = "" if behind is None else f"{how} (x {formatted(behind.value, '#.4g')}, {behind.span('#.4g') or 'exactly'})"
            words.append(f"{self.letters[place]}{by}")
        asked = "last words" if all(each.last_words for each in self.candidates) else self.bits_per
        return f"best by {asked}: {'; '.join(words)}; perplexity beside the one before" if len(words) > 1 else ""

    @property
    def bits_per(self) -> str:
        """The unit of the text's score: "bits per byte", or "bits per token" where bytes are not known."""
        return self.text.bits_per(each.language.score for each in self.candidates)

    def to_json(self) -> str:
        """Return everything as JSON, with the models, the text, versions and hashes."""
        return as_json({**vars(self), "letters": self.letters})

    def sections(self) -> Iterator[Section]:
        """Yield the models, a row for each in every table."""
        each = list(zip(self.letters, self.candidates, strict=True))

        def table(columns: Sequence[Column], cells: Callable[[Pair], Sequence[str]], note: Line | None = None) -> Section:
            return Section("", note, ("", *columns), [(letter, *row) for letter, one in each if (row := cells(one))])

        by_step, models = any(one.step is not None for one in self.candidates), [one.model for one in self.candidates]
        yield Section(note=(f"{len(models) - 1} models against ", bold(models[0].name)), for_pages=True)
        yield table((Column("model"), *numbers("step" * by_step, "size", "tokens/s", "weights moved")), Pair.described, "")
        yield Section(note=bold(self.best))
        cut = self.text.cut([self.candidates[0].language.score])
        yield Section(note=dim(f"{self.text.name}: {cut}; intervals are 95 %, paired with A's tokens\n"))
        yield table(numbers("perplexity", "x A's", "95 %", self.bits_per.replace(" per ", "/"), "- A's", "95 %"), Pair.scores)
        yield table(numbers("KL(A‖)", "95 %", "largest", "same top", "95 %"), Pair.distances)
        if any(one.last_words for one in self.candidates):
            yield table(numbers("last words right", "their perplexity"), Pair.last)
        for letter, one in each:
            for whose, lacks, share in one.distributions.lacking(letter) if one.distributions else ():
                yield Section(note=yellow(f"{lacks} lacks tokens that have {100 * share:.3g}% of {whose}'s probability"))
            for part, why in one.compatibility.impossible.items():
                if part != "activations":
                    yield Section(note=yellow(f"left out of {letter}: {part}: {why.partition(';')[0]}"))
        for letter, gates in zip(self.letters[1:], self.gates, strict=False):
            yield from (Section(note=f"{letter} {gate.verdict}", for_pages=True) for gate in gates)
        yield Section(note=dim(f"in {self.seconds:.1f} s, {self.forward_seconds:.1f} s of them forward passes\n"))

    def origin(self, page: str) -> Iterator[Section]:
        """Yield how to make the page again."""
        yield charts.made_with(page, [one.model for one in self.candidates], self.text, self.environment, seed=self.seed)
