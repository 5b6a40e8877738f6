"""One fault of a program, as everything that looks for faults names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from gpt2.port.terms.places import Place

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fault:
    """One fault: a cause's id, the part of the block (or the point outside the blocks), and what the port does.

    Faults of one id and ``kind`` are one fault in several places, for a ``detail`` that names a block. ``layer``: the running
    block's number, None outside. ``fix``: the corrected line, if it is not that of the table.
    ``share``: "q", "k" or "v", if only that third of c_attn is concerned.
    """

    id: str
    part: str
    detail: str
    kind: str = ""
    layer: int | None = None
    fix: str | None = None
    share: str = ""

    @property
    def place(self) -> Place:
        return replace(Place.at(self.layer, self.part), share=self.share)
