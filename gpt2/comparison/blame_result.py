"""What each part of b carries, as frozen dataclasses with their terminal tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2.measure.estimates import Estimate
from gpt2.pages.reports import data_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

BAR = 10  # characters of the longest bar
EXPORTED = ("f16", "bf16", "q8_0")  # types that gpt2 export writes and that take fewer bytes than float32


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
class Kept:
    """KL of b with these parts of a, and the bytes of all weights then, if the parts are stored in a's precision."""

    parts: tuple[str, ...]
    bytes: int
    kl: Estimate


@dataclass(frozen=True)
class Precision:
    """KL of a with all matrices rounded to ``type``, and the bytes of all weights then."""

    type: str
    bytes: int
    kl: Estimate


@dataclass(frozen=True)
class Blame:
    """What each part of b carries. Parts without a changed tensor are in none of the lists; they carry exactly nothing.

    ``parts`` are blocks, embeddings and the last norm, in the order of computation; ``halves`` are the blocks' attention (with
    its norm) and feed-forward (with its norm); ``tensors`` are those of the halves that carry most. ``whole`` is a with all of
    b's weights: what is measured between a and b beyond that is b's arithmetic. ``quantised`` is the type to which b's weights
    are a's, rounded, or None; then ``kept`` and ``precisions`` are measured. ``passes`` counts runs through all blocks.
    """

    tokens: int
    parts: tuple[Part, ...]
    halves: tuple[Part, ...]
    tensors: tuple[Part, ...]
    whole: Estimate
    gain: Estimate
    quantised: str | None
    kept: tuple[Kept, ...]
    precisions: tuple[Precision, ...]
    passes: float
    seconds: float

    @property
    def most(self) -> tuple[Part, ...]:
        """The parts of the first level, those that carry most first."""
        return tuple(sorted(self.parts, key=lambda part: -part.alone.value))

    def advice(self, a: str) -> str | None:
        """Return the command that writes the shortest list of kept parts that halves the KL; None without such a list."""
        if self.quantised not in EXPORTED or not self.kept:
            return None
        small = next((kept for kept in self.kept if kept.parts and kept.kl.value <= self.kept[0].kl.value / 2), None)
        if small is None:
            return None
        keep = ",".join(small.parts)
        return f"gpt2 export {shlex.quote(a)} DIR --format gguf --type {self.quantised} --keep {keep}"

    def rows(self, a: str) -> Iterator[RenderableType]:
        """Yield the tables of a report on ``a`` and another model."""
        if not self.parts:
            yield "every tensor is the same: no part of b carries anything"
            return
        yield _table(self.parts)
        if len(self.halves) > 1:
            yield _table(sorted(self.halves, key=lambda part: -part.alone.value)[:8])
        if len(self.tensors) > 1:
            yield _table(self.tensors[:8])
        measured = f"all of b's weights in a: KL {self.whole.text('.3g')}"
        yield f"[dim]{measured}; {self.tokens:,} tokens, {self.passes:.0f} forward passes, {self.seconds:.1f} s[/dim]"
        if self.quantised is not None:
            yield f"\nb is a, its weights rounded to {self.quantised}."
        if len(self.kept) > 1:
            yield _stored("kept in a's precision", [(", ".join(each.parts) or "nothing", each) for each in self.kept])
        if self.precisions:
            yield _stored("all weights in", [(each.type, each) for each in self.precisions])
        if (advice := self.advice(a)) is not None:
            from rich.text import Text

            yield Text(f"to halve the KL: {advice}")


def _stored(title: str, rows: Sequence[tuple[str, Kept | Precision]]) -> Table:
    cells = ((name, f"{each.bytes / 1e6:,.2f} MB", *each.kl.cells(".3g")) for name, each in rows)
    return data_table(title, "weights", "KL", "95 % interval", wrap=True, rows=cells)


def _table(parts: Sequence[Part]) -> Table:
    ordered, longest, rows = any(part.in_order for part in parts), max(part.alone.value for part in parts), []
    for part in parts:
        bar = "█" * round(BAR * part.alone.value / longest) if 0 < longest < math.inf and part.alone.value > 0 else ""
        cells = f"{part.alone.value:.3g}", part.alone.span(".1e", ".."), f"{part.gain.value:+.1e}"
        rows.append([part.name, bar or "·", *cells, *([f"{part.in_order.value:.3g}"] if part.in_order else [])])
    return data_table("part of b in a", "", "KL alone", "95 %", "log-prob.", *(["in order"] if ordered else []), rows=rows)
