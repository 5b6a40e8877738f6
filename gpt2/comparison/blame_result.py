"""What each part of b carries, as frozen dataclasses with their terminal tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2.measure.estimates import Estimate
from gpt2.pages.reports import data_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

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

    def rows(self) -> Iterator[RenderableType]:
        """Yield the tables of a report."""
        if not self.parts:
            yield "every tensor is the same: no part of b carries anything"
            return
        yield _table(self.parts)
        if len(self.halves) > 1:
            yield _table(sorted(self.halves, key=lambda part: -part.alone.value)[:8])
        measured = f"all of b's weights in a: KL {self.whole.text('.3g')}"
        yield f"[dim]{measured}; {self.tokens:,} tokens, {self.passes:.0f} forward passes[/dim]"


def _table(parts: Sequence[Part]) -> Table:
    ordered, longest, rows = any(part.in_order for part in parts), max(part.alone.value for part in parts), []
    for part in parts:
        bar = "█" * round(BAR * part.alone.value / longest) if 0 < longest < math.inf and part.alone.value > 0 else ""
        cells = f"{part.alone.value:.3g}", part.alone.span(".1e", ".."), f"{part.gain.value:+.1e}"
        rows.append([part.name, bar or "·", *cells, *([f"{part.in_order.value:.3g}"] if part.in_order else [])])
    return data_table("part of b in a", "", "KL alone", "95 %", "log-prob.", *(["in order"] if ordered else []), rows=rows)
