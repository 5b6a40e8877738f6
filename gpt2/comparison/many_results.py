"""The results of comparing several models: frozen dataclasses with a terminal table and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gpt2.comparison.distributions import Language
from gpt2.comparison.noise import Floor
from gpt2.comparison.paper import PaperFigure
from gpt2.comparison.subjects import Model, Scored, Verdict
from gpt2.measure.estimates import Estimate
from gpt2.measure.last_words import LastWord
from gpt2.pages.reports import Environment, Printed, add_texts, as_json, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Against:
    """A model's distance from the first one, paired token by token; KL(first||model) in nats."""

    ratio: Estimate  # its perplexity over the first one's
    bits: Estimate  # its bits per byte minus the first one's
    kl: Estimate
    kl_max: float | None  # None of a side that shows only the likeliest tokens
    same_top: Estimate


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
    paper: tuple[PaperFigure, ...]
    made_of: str = ""  # "A in q8_0": another one's weights, rounded

    @property
    def size_text(self) -> str:
        return "" if self.size is None else megabytes(self.size)

    @property
    def weights_text(self) -> str:
        """How far the weights moved; empty for the first model, and where they cannot be compared."""
        if self.weights is None:
            return ""
        return "equal" if self.weights == 0 else f"{self.weights:.2%}"


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
    gates: tuple[tuple[Verdict, ...], ...] = ()  # of --fail-if, for each candidate but the first

    @property
    def letters(self) -> tuple[str, ...]:
        """A short name for each model: A, B, C ... and numbers after Z."""
        return letters_of(len(self.candidates))

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

        yield ""
        names = data_table("", "model", "step", "size", "tokens/s", "weights moved", right=(2, 3, 4, 5))
        if all(each.step is None for each in self.candidates):
            names.columns[2].header = ""
        for letter, each in zip(self.letters, self.candidates, strict=True):
            speed = "" if math.isnan(each.tokens_per_second) else f"{each.tokens_per_second:,.0f}"
            step = "" if each.step is None else str(each.step)
            add_texts(names, letter, each.model.name, step, each.size_text, speed, each.weights_text)
        yield names
        if made := [
            f"{letter} is {each.made_of}" for letter, each in zip(self.letters, self.candidates, strict=True) if each.made_of
        ]:
            yield Text("; ".join(made))
        yield Text(self.best, style="bold")
        protocol = f"{self.text.tokens:,} tokens, context {self.text.context}, stride {self.text.stride}"
        yield Text(f"{self.text.name}: {protocol}; intervals are 95 %, paired with A's tokens", style="dim")
        yield ""
        table = data_table("", "perplexity", "x A's", "95 %", self.bits_per, "- A's", "95 %", right=range(1, 7))
        far = data_table("", "KL(A‖)", "95 %", "largest", "same top", "95 %", right=range(1, 6))
        for letter, each in zip(self.letters, self.candidates, strict=True):
            perplexity, bits = f"{each.language.perplexity.value:.2f}", f"{each.language.bits_per_byte.value:.4f}"
            if (found := each.against) is None:
                add_texts(table, letter, perplexity, "", "", bits, "", "")
                continue
            ratio = f"{found.ratio.value:.3f}", found.ratio.span(".3f")
            add_texts(table, letter, perplexity, *ratio, bits, f"{found.bits.value:+.4f}", found.bits.span("+.4f"))
            kl = f"{found.kl.value:.3g}", found.kl.span(".2g"), "" if found.kl_max is None else f"{found.kl_max:.3g}"
            add_texts(far, letter, *kl, f"{found.same_top.value:.1%}", found.same_top.span(".1%"))
        yield table
        yield far
        if self.above_floor:
            yield Text(self.above_floor, style="dim")
        if any(each.last_words for each in self.candidates):
            words = data_table("", "last words right", "their perplexity", right=(1, 2))
            for letter, each in zip(self.letters, self.candidates, strict=True):
                if each.last_words is not None:
                    accuracy, per_word = each.last_words.accuracy, each.last_words.perplexity
                    cells = f"{accuracy.value:.2%} ({accuracy.span('.2%')})", f"{per_word.value:.2f}"
                    add_texts(words, letter, *cells)
            yield words
        if rows := self.beside_paper():
            paper = data_table("", "", "measured", "GPT-2 paper, table 3", right=(2, 3))
            for row in rows:
                add_texts(paper, *row)
            yield paper
            yield Text(self.protocols, style="dim")
        for letter, each in zip(self.letters, self.candidates, strict=True):
            for part in ("weights", "distributions"):
                if why := each.left_out.get(part):
                    yield Text(f"left out of {letter}: {part}: {why.partition(';')[0]}", style="yellow")
        yield f"[dim]in {self.seconds:.1f} s, {self.forward_seconds:.1f} s of them forward passes[/dim]\n"

    def beside_paper(self) -> list[tuple[str, str, str, str]]:
        """Return the paper's figures of these models on this text: letter, metric, measured and reported."""
        rows = []
        for letter, each in zip(self.letters, self.candidates, strict=True):
            for figure in each.paper:
                form = ".2%" if figure.metric == "accuracy" else ".2f"
                scored = each.last_words or each.language
                here = scored.perplexity if form == ".2f" or each.last_words is None else each.last_words.accuracy
                rows.append((letter, figure.metric, f"{here.value:{form}}", f"{figure.value:{form}}"))
        return rows

    @property
    def protocols(self) -> str:
        """How the text was measured, and how the paper did."""
        told = next((figure.protocol for each in self.candidates for figure in each.paper), "")
        return f"not the same protocol; measured: {self.text.told}; the paper: {told}"


def letters_of(count: int) -> tuple[str, ...]:
    """Return a short name for each of several models."""
    return tuple(LETTERS[:count]) if count <= len(LETTERS) else tuple(str(number + 1) for number in range(count))


def megabytes(size: float) -> str:
    """Format a number of bytes: ``"7.7 MB"``."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
