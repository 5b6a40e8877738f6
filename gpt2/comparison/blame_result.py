"""What each part of b carries, as frozen dataclasses with their terminal tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpt2.comparison import charts
from gpt2.measure.estimates import Estimate
from gpt2.pages.reports import Section, dim

BAR = 10  # characters of the longest bar


@dataclass(frozen=True)
class Part:
    """What a part of b carries: ``alone`` is KL(a‖a with this part of b) in nats a token, over ``tensors`` that differ.

    ``gain`` is the change of the text's mean log-probability, also nats a token: above 0, the part predicts the text better.
    ``in_order`` is the KL with this part and all parts before it, in the order of computation; None below the first level.
    """

    name: str
    tensors: int
    alone: Estimate
    gain: Estimate
    in_order: Estimate | None


@dataclass(frozen=True)
class Blame:
    """What each part of b carries. Parts without a changed tensor are in none of the lists; they carry exactly nothing.

    ``parts`` are blocks, embeddings and the last norm, in the order of computation; ``halves`` are the blocks' attention (with
    its norm) and feed-forward (with its norm). ``whole`` is a with all of b's weights: what is measured between a and b beyond
    that is b's arithmetic. ``passes`` counts runs through all blocks.
    """

    tokens: int
    parts: tuple[Part, ...]
    halves: tuple[Part, ...]
    whole: Estimate
    gain: Estimate
    passes: float

    @property
    def most(self) -> tuple[Part, ...]:
        """The parts of the first level, those that carry most first."""
        return tuple(sorted(self.parts, key=lambda part: -part.alone.value))

    def sections(self, shared: str = "") -> Iterator[Section]:
        """Yield the parts, the halves that carry most, and all of b; ``shared`` says which tokens are measured, if not all."""
        title, note = "Blame", f"KL that each part of b brings into a, in nats a token{shared}"
        if not self.parts:
            yield Section(title, note)
            yield Section(note="every tensor is the same: no part of b carries anything")
            return
        yield _table(self.parts, self.parts, title, note)
        if len(self.halves) > 1:
            yield _table(sorted(self.halves, key=lambda part: -part.alone.value)[:8], self.halves)
        measured = f"all of b's weights in a: KL {self.whole.text('.3g')}"
        yield Section(note=dim(f"{measured}; {self.tokens:,} tokens, {self.passes:.0f} forward passes"))


def _table(parts: Sequence[Part], drawn: Sequence[Part], title: str = "", note: str | None = None) -> Section:
    ordered, longest, rows = any(part.in_order for part in parts), max(part.alone.value for part in parts), []
    for part in parts:
        bar = "█" * round(BAR * part.alone.value / longest) if 0 < longest < math.inf and part.alone.value > 0 else ""
        cells = f"{part.alone.value:.3g}", part.alone.span(".1e", ".."), f"{part.gain.value:+.1e}"
        rows.append([part.name, bar or "·", *cells, *([f"{part.in_order.value:.3g}"] if part.in_order else [])])
    columns = "part of b in a", "", "KL alone", "95 %", "log-prob.", *(["in order"] if ordered else [])
    chart = partial(charts.part_bars, [(part.name, part.alone, part.in_order) for part in drawn], "blame" if title else "halves")
    return Section(title, note, columns, rows, chart)
