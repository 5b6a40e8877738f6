"""Compute GPT-2's forward pass at once, from a whole text, with formulas of some nodes replaced.

A *program* replaces the formulas of some nodes of :mod:`..graph`; :mod:`.batches` runs many. A *stage* is a node with a traced
point.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.tracing import layer_of, part_of, point_at
from gpt2.port import graph
from gpt2.port.graph import HIDDEN, LAST, MODULES, NODES, ORDER, READS, Edits, Formula, Model, Site, State, plain

Stage = Callable[[State], Tensor]
Run = Callable[[Model], Tensor]  # the stream behind the last block (B, T, D)

# Each stage of a block, in order, with the stages that GPT-2 reads there; "x" is the block's input.
NEEDS = {node: reads for node, reads in READS.items() if node not in HIDDEN}
NEEDS |= {"attn.scores": ("attn.q", "attn.k"), "attn.mixed": ("attn.weights", "attn.v")}
STAGES = tuple(NEEDS)
LINEAR = tuple(MODULES)


@dataclass(frozen=True)
class Program:
    """What a simulated program computes otherwise than GPT-2.

    ``blocks``: replaced nodes by the number of the block; ``outside``: of ``embed``, ``ln_f`` and ``head``. ``order``: the
    blocks that run, None for GPT-2's order. ``run``: how the blocks run, if not one after the other.
    """

    blocks: Mapping[int, Edits] = field(default_factory=dict)
    outside: Edits = field(default_factory=dict)
    order: tuple[int, ...] | None = None
    run: Run | None = None


@dataclass(frozen=True)
class Entrance:
    """Where a part of the forward pass begins: in block ``layer``, behind node number ``after``.

    ``state``: the block's input ``x``, and its nodes up to that number; -1 for the block's input alone.
    """

    layer: int
    state: State
    after: int = -1

    def cut(self, rows: int, tokens: int) -> Entrance:
        """Return the entrance on the first tokens of the first rows."""
        square = ("attn.scores", "attn.weights")
        heads = {node: x[:rows, :, :tokens] for node, x in self.state.items() if x.ndim == 4}
        heads |= {node: heads[node][..., :tokens] for node in square if node in heads}
        return Entrance(self.layer, {node: x[:rows, :tokens] for node, x in self.state.items()} | heads, self.after)

    def to(self, dtype: torch.dtype) -> Entrance:
        return Entrance(self.layer, {node: tensor.to(dtype) for node, tensor in self.state.items()}, self.after)


def stage_of(point: str) -> str | None:
    """Return a traced point's stage in its block: ``"h.3.attn.k"`` -> ``"attn.k"``, ``"h.3"`` -> ``""``; None outside."""
    if layer_of(point) is None:
        return None
    return part_of(point) if point.count(".") > 1 else ""


class Simulation(Model):
    """GPT-2 with the weights ``state`` on ``ids`` (B, T), in ``dtype``; programs replace nodes of it."""

    def __init__(self, state: Mapping[str, Tensor], config: GPT2Config, ids: Tensor, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(state, config, ids, dtype)
        self.base = Program()
        self.stacks = True  # rows of a batch do not see each other
        self._rights: dict[int, Edits] = {}
        self._inputs: list[Tensor] = []
        self._states: dict[int, State] = {}

    def weights(self, layer: int) -> dict[str, Tensor]:
        """Return a block's tensors by their names within the block."""
        start = f"h.{layer}."
        return {name.removeprefix(start): tensor for name, tensor in self.state.items() if name.startswith(start)}

    def right(self, layer: int) -> Edits:
        """Return the formula of every node of a block: GPT-2's, or that of the faults which programs are run on top of."""
        if layer not in self._rights:
            faults = {**self.base.outside, **self.base.blocks.get(layer, {})}
            self._rights[layer] = {**graph.RIGHT, **{node: plain(formula) for node, formula in faults.items()}}
        return self._rights[layer]

    def stages_of(self, layer: int) -> dict[str, Stage]:
        """Return each stage of a block as a function of the stages before it."""

        def computed(node: str, s: State) -> Tensor:
            site, state = self.site(layer, s), dict(s)
            for before in (*(HIDDEN if node in ("attn.scores", "attn.mixed") else ()), node):
                if before == node or READS[before][0] in state:
                    state[before] = self.right(layer)[before](site, state)
            return state[node]

        return {stage: partial(computed, stage) for stage in STAGES}

    def site(self, layer: int, state: State | None = None) -> Site:
        """Return the place of a block that computes all tokens of ``state`` at once."""
        tokens = self.ids.shape[1] if state is None else state["x"].shape[1] if "x" in state else self.ids.shape[1]
        return Site(self, layer, 0, tokens, {})

    def outside(self, program: Program, node: str) -> Formula:
        """Return the formula of a node outside the blocks."""
        return program.outside.get(node) or self.right(0).get(node) or graph.RIGHT_OUTSIDE[node]

    def embed(self, program: Program | None = None) -> Tensor:
        return self.outside(program or Program(), "embed")(self.site(0), {}).to(self.dtype)

    def normed(self, program: Program, x: Tensor) -> Tensor:
        """Return the last norm of the stream x (B, T, D), or of streams (N, B, T, D), each by itself."""
        formula = self.outside(program, "ln_f")
        if formula is graph.RIGHT_OUTSIDE["ln_f"]:
            return self.norm("ln_f", x)
        if x.ndim > 3:
            return torch.stack([formula(self.site(0, {"x": one}), {"x": one}) for one in x])
        return formula(self.site(0, {"x": x}), {"x": x})

    def head(self, program: Program) -> Tensor:
        """Return the head's weight (V, D)."""
        return self.outside(program, "head")(self.site(0), {})

    def on_ids(self, ids: Tensor) -> Self:
        """Return this simulation on other ids (B, T)."""
        other = super().on_ids(ids)
        other._inputs, other._states = [], {}
        return other

    def on(self, base: Program) -> Self:
        """Return this simulation with ``base`` in place of GPT-2: further programs are run on top of its faults."""
        other = copy(self)
        other.base = base
        other._rights, other._inputs, other._states, other._kept = {}, [], {}, OrderedDict()
        other.stacks = all(other._stacks(layer) for layer in base.blocks)
        return other

    def _stacks(self, layer: int) -> bool:
        """Return whether rows of a batch do not see each other in a block."""
        x = self.state["wte.weight"][self.ids]
        alone, stacked = (self.run_block(layer, {"x": rows}, {})[""] for rows in (x, torch.cat([x, 2 * x.flip(1)])))
        return bool(torch.allclose(alone, stacked[: len(x)], equal_nan=True))

    def ran(self, program: Program) -> Tensor:
        """Return the stream behind the last block of a program with a run of its own."""
        stream = program.run or self.base.run
        assert stream is not None
        layers = self.base.blocks.keys() | program.blocks.keys()
        blocks = {layer: {**self.base.blocks.get(layer, {}), **program.blocks.get(layer, {})} for layer in layers}
        return stream(self.on(Program(blocks, {**self.base.outside, **program.outside})))

    # Right values, computed once

    def right_input(self, layer: int) -> Tensor:
        """Return the stream that enters block ``layer`` of the right model; the one after the last for ``n_layer``."""
        while len(self._inputs) <= layer:
            last = len(self._inputs) - 1
            self._inputs.append(self.embed() if last < 0 else self.right_state(last)[""])
        return self._inputs[layer]

    def right_state(self, layer: int) -> State:
        """Return every node of block ``layer`` of the right model."""
        if layer not in self._states:
            self._states[layer] = self.run_block(layer, {"x": self.right_input(layer)}, {})
        return self._states[layer]

    def run_block(self, layer: int, state: State, replaced: Edits, after: int = -1, until: int = LAST) -> State:
        """Return ``state`` with the nodes of a block beyond number ``after`` computed, up to number ``until``."""
        return graph.run_block(self.site(layer, state), state, replaced, after, until)

    # Programs

    def trace(
        self, program: Program, first: int = 0, last: int | None = None, entrance: Entrance | None = None, until: int = LAST
    ) -> State:
        """Return a program's tensors at all points of blocks ``first`` to ``last`` (excluded), and of what surrounds them.

        ``entrance``: where it begins, None for the embeddings; ``until``: the number of the last node in the last block.
        """
        points = self.stages(program, first, last, entrance, until)
        points = {point: value for point, value in points.items() if not point.endswith(HIDDEN)}
        if last in (None, self.config.n_layer) and until == LAST:
            points["ln_f"] = self.normed(program, points["end"])
            points["logits"] = points["ln_f"] @ self.head(program).T
        return points

    def stages(
        self, program: Program, first: int = 0, last: int | None = None, entrance: Entrance | None = None, until: int = LAST
    ) -> State:
        """Return :meth:`trace` without what follows the blocks; ``end`` is the last node, ``x`` the last block's input."""
        last = self.config.n_layer if last is None else last
        points: State = {}
        if entrance is None:
            points["embed"] = self.embed(program)
        x = points["embed"] if entrance is None else entrance.state["x"]
        if program.run or self.base.run:
            return points | {"x": x, "end": self.ran(program)}
        for number, layer in enumerate(program.order or range(first, last)):
            entered = entrance if number == 0 and entrance is not None else Entrance(layer, {"x": x})
            stop = until if layer == last - 1 and not program.order else LAST
            state = self.run_block(layer, entered.state, program.blocks.get(layer, {}), entered.after, stop)
            if "attn.scores" in state:
                state["attn.scores"] = state["attn.scores"].tril()  # as our trace has them: 0 for later tokens
            place = number if program.order else layer
            points |= {point_at(place, node): state[node] for node in NODES[: stop + 1] if node in state}
            points["x"], x = state["x"], state[NODES[stop]]
        points["end"] = x
        return points


__all__ = ["LAST", "LINEAR", "NEEDS", "ORDER", "STAGES", "Entrance", "Program", "Run", "Simulation", "Stage", "State", "stage_of"]
