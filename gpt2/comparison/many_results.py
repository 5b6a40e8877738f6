"""The results of comparing several models: frozen dataclasses with a terminal table and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, NamedTuple

from gpt2.comparison.distributions import Language
from gpt2.comparison.noise import Floor
from gpt2.comparison.passage import Scored
from gpt2.comparison.sides.side import Model
from gpt2.measure.estimates import Estimate
from gpt2.measure.last_words import LastWord
from gpt2.pages.reports import Environment, Printed, as_json, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType

SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
# What the GPT-2 paper reports of them, to stand beside what was measured, and how it measured: Radford et al., "Language Models
# are Unsupervised Multitask Learners", 2019, table 3, zero-shot.
PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "wikitext2": {"perplexity": (29.41, 22.76, 19.93, 18.34)},
    "lambada": {"perplexity": (35.13, 15.60, 10.87, 8.63), "accuracy": (0.4599, 0.5548, 0.6012, 0.6324)},
}
PROTOCOLS = {
    "wikitext2": "detokenised by rules that were not published, and per original token",
    "lambada": "the last word with a filter of stop words, whose list was not published",
}


@dataclass(frozen=True)
class Against:
    """A model's distance from the first one, paired token by token; KL(first||model) in nats."""

    ratio: Estimate  # its perplexity over the first one's
    bits: Estimate  # its bits per byte minus the first one's
    kl: Estimate
    kl_max: float
    same_top: Estimate
    only_first: Estimate  # the probability that the first model gives to tokens that this one lacks
    only_it: Estimate  # and the other way around


@dataclass(frozen=True)
class Candidate:
    """One of the models.

    ``size`` is of its weights alone, in bytes as they are stored, or of the dtype in which it runs; of an engine, of its files.
    It is None where a side has no files here. ``tokens_per_second`` are of the forward passes over the text. ``weights`` is the
    norm of the change from the first model over the norm. ``left_out`` says why parts are None.
    """

    model: Model
    step: int | None  # of a training run
    size: int | None
    tokens_per_second: float
    language: Language
    last_words: LastWord | None
    against: Against | None
    weights: float | None
    left_out: dict[str, str]
    paper: dict[str, float]  # what the GPT-2 paper reports, by metric
    made_of: str = ""  # "A in q8_0": another one's weights, rounded
    rows: int = 0  # of the vocabulary more than the first model's

    @property
    def size_text(self) -> str:
        """``"7.7 MB"``."""
        if self.size is None:
            return ""
        return f"{self.size / 1e9:.2f} GB" if self.size >= 1e9 else f"{self.size / 1e6:.1f} MB"

    def lacks(self, letter: str) -> list[tuple[str, str, float]]:
        """Return who lacks tokens of whom, and what these have of its probability; A is the first model."""
        both = [] if self.against is None else [(letter, "A", self.against.only_first), ("A", letter, self.against.only_it)]
        return [(lacking, whose, share.value) for lacking, whose, share in both if share.value > 0]

    @property
    def weights_text(self) -> str:
        """How far the weights moved; empty for the first model, and where they cannot be compared."""
        if self.weights is None:
            return ""
        moved = "equal" if self.weights == 0 else f"{self.weights:.2%}"
        return f"{moved}, {self.rows:+,} rows" if self.rows else moved


class Ranked(NamedTuple):
    """A model's place: the number of the candidate, and its perplexity over that of the one before, paired; None if unknown."""

    candidate: int
    behind: Estimate | None


@dataclass(frozen=True)
class Comparisons(Printed):
    """Several models on one text, each compared with the first of ``candidates``."""

    candidates: tuple[Candidate, ...]
    text: Scored
    environment: Environment
    seed: int
    seconds: float
    forward_seconds: float  # of them in the models' forward passes
    ranking: tuple[Ranked, ...] = ()  # from the best on
    floor: Floor | None = None  # of noise, of the first model in its own dtype
    gates: tuple[tuple[object, ...], ...] = ()  # of --fail-if, for each candidate but the first

    @property
    def letters(self) -> tuple[str, ...]:
        """A short name for each model: A, B, C ... and numbers after Z."""
        count = len(self.candidates)
        return tuple(ascii_uppercase[:count]) if count <= 26 else tuple(str(number + 1) for number in range(count))

    @property
    def best(self) -> str:
        """The models in their order, best first, in words; equal ones have an interval that holds 1."""
        words = [self.letters[number] for number, _ in self.ranking[:1]]
        for number, behind in self.ranking[1:]:
            how = "" if behind is None else "equal" if behind.low <= 1 <= behind.high else "worse"
            by = "" if behind is None else f" {how} (x {behind.value:.3f}, {behind.span('.3f') or 'exactly'})"
            words.append(f"{self.letters[number]}{by}")
        asked = "last words" if all(each.last_words for each in self.candidates) else self.bits_per.replace("/", " per ")
        return f"best by {asked}: {'; '.join(words)}; perplexity beside the one before" if len(words) > 1 else ""

    @property
    def bits_per(self) -> str:
        """The unit of bits per byte; random ids have no bytes, so their unit is the token."""
        return "bits/byte" if self.text.sha256 else "bits/token"

    @property
    def above_floor(self) -> str:
        """The first model's floor of noise and the models whose KL is not above it, in words; "" without a number for it."""
        both = zip(self.letters, self.candidates, strict=True)
        lows = {letter: each.against.kl.low for letter, each in both if each.against is not None}
        if self.floor is None or math.isnan(self.floor.kl) or not lows:
            return ""
        which = {
            "not above it": [letter for letter, low in lows.items() if low <= self.floor.kl],
            "not a number": [letter for letter, low in lows.items() if math.isnan(low)],
        }
        words = "; ".join(f"{what}: {', '.join(few)}" for what, few in which.items() if few) or "every KL is above it"
        return f"floor of noise: {self.floor.kl:.2g} nats in {self.candidates[0].model.dtype} ({self.floor.way}); {words}"

    def to_json(self) -> str:
        """Return everything as JSON, with the models, the text, versions and hashes."""
        return as_json({**vars(self), "letters": self.letters})

    def parts(self) -> Iterator[RenderableType]:
        """Yield the models, a row for each, and the paper's figures."""
        from rich.text import Text

        each = list(zip(self.letters, self.candidates, strict=True))
        models, scores, far, words = [], [], [], []
        for letter, one in each:
            speed, step = one.tokens_per_second, "" if one.step is None else str(one.step)
            speed_text = "" if math.isnan(speed) else f"{speed:,.0f}"
            models.append((letter, one.model.name, step, one.size_text, speed_text, one.weights_text))
            perplexity, bits = f"{one.language.perplexity.value:.2f}", f"{one.language.bits_per_byte.value:.4f}"
            if (found := one.against) is None:
                scores.append((letter, perplexity, "", "", bits, "", ""))
            else:
                scores.append((letter, perplexity, *found.ratio.cells(".3f"), bits, *found.bits.cells("+.4f")))
                far.append((letter, *found.kl.cells(".3g", ".2g"), f"{found.kl_max:.3g}", *found.same_top.cells(".1%")))
            if (last := one.last_words) is not None:
                right = f"{last.accuracy.value:.2%} ({last.accuracy.span('.2%')})"
                words.append((letter, right, f"{last.perplexity.value:.2f}"))
        yield ""
        step = "step" if any(one.step is not None for one in self.candidates) else ""
        yield data_table("", "model", step, "size", "tokens/s", "weights moved", right=(2, 3, 4, 5), rows=models)
        if made := "; ".join(f"{letter} is {one.made_of}" for letter, one in each if one.made_of):
            yield Text(made)
        yield Text(self.best, style="bold")
        yield Text(f"{self.text.name}: {self.text.cut}; intervals are 95 %, paired with A's tokens\n", style="dim")
        titles = "", "perplexity", "x A's", "95 %", self.bits_per, "- A's", "95 %"
        yield data_table(*titles, right=range(1, 7), rows=scores)
        yield data_table("", "KL(A‖)", "95 %", "largest", "same top", "95 %", right=range(1, 6), rows=far)
        if self.above_floor:
            yield Text(self.above_floor, style="dim")
        if words:
            yield data_table("", "last words right", "their perplexity", right=(1, 2), rows=words)
        if papers := self.beside_paper():
            yield data_table("", "", "measured", "GPT-2 paper, table 3", right=(2, 3), rows=papers)
            yield Text(self.protocols, style="dim")
        for letter, one in each:
            for lacking, whose, share in one.lacks(letter):
                yield Text(f"{lacking} lacks tokens that have {100 * share:.3g}% of {whose}'s probability", style="yellow")
            for part, why in one.left_out.items():
                if part != "activations":
                    yield Text(f"left out of {letter}: {part}: {why.partition(';')[0]}", style="yellow")
        yield f"[dim]in {self.seconds:.1f} s, {self.forward_seconds:.1f} s of them forward passes[/dim]\n"

    def beside_paper(self) -> list[tuple[str, str, str, str]]:
        """Return the paper's figures of these models on this text: letter, metric, measured and reported."""
        rows = []
        for letter, each in zip(self.letters, self.candidates, strict=True):
            here = each.last_words or each.language
            for metric, value in each.paper.items():
                form, found = {"perplexity": ".2f", "accuracy": ".2%"}[metric], getattr(here, metric, None)
                rows += [] if found is None else [(letter, metric, f"{found.value:{form}}", f"{value:{form}}")]
        return rows

    @property
    def protocols(self) -> str:
        """How the text was measured, and how the paper did."""
        told = PROTOCOLS.get(self.text.name.partition(":")[0], "")
        return f"not the same protocol; measured: {self.text.told}; the paper: {told}"


def paper_figures(model: str, text: str) -> dict[str, float]:
    """Return what the paper reports of a model on a text, both by the names that compare takes; nothing for other names."""
    name, task = model.removeprefix("hf/").partition(":")[0].rpartition("openai-community/")[2], text.partition(":")[0]
    return {metric: row[SIZES.index(name)] for metric, row in PAPER.get(task, {}).items()} if name in SIZES else {}
