"""Run programs on the part of the forward pass between two recorded tensors, wherever in the blocks these lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.measure.tracing import point_at
from gpt2.port.dump.batches import Batches
from gpt2.port.dump.simulation import Entrance, Program, Simulation, stage_of
from gpt2.port.graph import LAST, NODES, ORDER


@dataclass(frozen=True)
class Span:
    """The part of the forward pass that is compared: blocks ``first`` to ``last`` (excluded), up to the point ``end``.

    ``entrance``: where it begins, None for the embeddings; ``wanted``: the program's value at ``end``; ``softmaxed``: what the
    program made of its logits.
    """

    first: int
    last: int
    end: str
    entrance: Entrance | None
    wanted: Tensor
    softmaxed: str = ""

    @property
    def until(self) -> int:
        """The number of the last stage in the last block."""
        return ORDER[stage_of(self.end) or ""]

    def cut(self, rows: int, tokens: int) -> Span:
        entrance = None if self.entrance is None else self.entrance.cut(rows, tokens)
        return Span(self.first, self.last, self.end, entrance, self.wanted[:rows, :tokens], self.softmaxed)

    def reaches(self, program: Program) -> bool:
        """Return whether a program replaces something in this part."""
        whole = program.order is not None or program.run is not None
        return bool(program.outside) or whole or self._first_replaced(program) is not None

    def computes(self, layer: int, stage: str) -> bool:
        """Return whether a stage of a block is in this part."""
        begin = (self.first, -1 if self.entrance is None else self.entrance.after)
        return begin < (layer, ORDER[stage]) <= (self.last - 1, self.until)

    def _first_replaced(self, program: Program) -> tuple[int, int] | None:
        replaced = ((n, ORDER[stage]) for n, stages in program.blocks.items() for stage in stages if self.computes(n, stage))
        return min(replaced, default=None)

    def ends(self, simulation: Simulation, programs: Sequence[Program]) -> Iterator[tuple[int, Tensor]]:
        """Yield each program's number and its value where the blocks of this part end, before the last norm and the head."""
        entrance = None if self.entrance is None else self.entrance.to(simulation.dtype)
        if self.until == LAST and (entrance is None or entrance.after < 0):  # whole blocks: in batches
            start = None if entrance is None else entrance.state["x"]
            yield from Batches(simulation).outputs(programs, self.first, self.last, start)
            return
        right = simulation.stages(Program(), self.first, self.last, entrance, self.until)
        x = right["embed"] if entrance is None else entrance.state["x"]
        for number, program in enumerate(programs):
            begin = self._first_replaced(program)
            if "embed" in program.outside:
                yield number, simulation.stages(program, self.first, self.last, None, self.until)["end"]
            elif begin is None:
                yield number, right["end"]
            else:
                layer, stage = begin
                state = {"x": x if layer == self.first else right[point_at(layer - 1, "")]}
                state |= {name: right[point_at(layer, name)] for name in NODES[:stage]}
                begun = Entrance(layer, state, stage - 1)
                try:
                    yield number, simulation.stages(program, layer, self.last, begun, self.until)["end"]
                except RuntimeError:  # two faults that do not fit together, as of other numbers of heads
                    yield number, torch.full_like(right["end"], torch.nan)
