"""Compute GPT-2's forward pass stage by stage, with some stages replaced.

A *stage* has the name of its traced point within a block (``attn.scores``, ``mlp.act``, "" for the block's output). Its formula
takes the tensors of the stages before it, by name, and the block's input as ``x``. A *program* replaces the formulas of some
stages; :mod:`.batches` runs many.

Shapes: streams (B, T, D); scores and weights (B, H, T, T); heads before they are merged (B, H, T, K).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.checkpoint.keys import head_name
from gpt2.config import GPT2Config
from gpt2.measure.tracing import layer_of, part_of, point_at
from gpt2.model import ACTIVATIONS, causal_mask
from gpt2.port.diagnosis.hypotheses import right_scale
from gpt2.port.diagnosis.norms import Norms
from gpt2.port.diagnosis.scores import Layout

State = dict[str, Tensor]
Stage = Callable[[State], Tensor]
Stages = Mapping[str, Stage]
Run = Callable[["Simulation"], Tensor]  # the stream behind the last block (B, T, D)
Made = TypeVar("Made")

# Each stage of a block, in order, with the stages that GPT-2's formula reads; "x" is the block's input.
NEEDS: dict[str, tuple[str, ...]] = {
    "ln_1": ("x",),
    "attn.q": ("ln_1",),
    "attn.k": ("ln_1",),
    "attn.v": ("ln_1",),
    "attn.scores": ("attn.q", "attn.k"),
    "attn.weights": ("attn.scores",),
    "attn.mixed": ("attn.weights", "attn.v"),
    "attn.heads": ("attn.mixed",),
    "attn.c_proj": ("attn.heads",),
    "mid": ("x", "attn.c_proj"),
    "ln_2": ("mid",),
    "mlp.c_fc": ("ln_2",),
    "mlp.act": ("mlp.c_fc",),
    "mlp.c_proj": ("mlp.act",),
    "": ("mid", "mlp.c_proj"),
}
STAGES = tuple(NEEDS)
LINEAR = ("attn.q", "attn.k", "attn.v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
ORDER = {stage: number for number, stage in enumerate(STAGES)}
LAST = ORDER[""]
SMALL = 1 << 24  # parameters of the blocks times tokens of a small model


@dataclass(frozen=True)
class Program:
    """What a simulated program computes otherwise than GPT-2.

    ``blocks``: replaced stages by the number of the block; ``outside``: of ``embed``, ``ln_f`` and ``logits``. ``order``: the
    blocks that run, None for GPT-2's order. ``run``: how the blocks run, if not one after the other.
    """

    blocks: Mapping[int, Stages] = field(default_factory=dict)
    outside: Stages = field(default_factory=dict)
    order: tuple[int, ...] | None = None
    run: Run | None = None


@dataclass(frozen=True)
class Entrance:
    """Where a part of the forward pass begins: in block ``layer``, behind stage number ``after``.

    ``state``: the block's input ``x``, and its stages up to that number; -1 for the block's input alone.
    """

    layer: int
    state: State
    after: int = -1

    def cut(self, rows: int, tokens: int) -> Entrance:
        """Return the entrance on the first tokens of the first rows."""
        square = ("attn.scores", "attn.weights")
        heads = {stage: x[:rows, :, :tokens] for stage, x in self.state.items() if x.ndim == 4}
        heads |= {stage: heads[stage][..., :tokens] for stage in square if stage in heads}
        return Entrance(self.layer, {stage: x[:rows, :tokens] for stage, x in self.state.items()} | heads, self.after)

    def to(self, dtype: torch.dtype) -> Entrance:
        return Entrance(self.layer, {stage: tensor.to(dtype) for stage, tensor in self.state.items()}, self.after)


def stage_of(point: str) -> str | None:
    """Return a traced point's stage in its block: ``"h.3.attn.k"`` -> ``"attn.k"``, ``"h.3"`` -> ``""``; None outside."""
    if layer_of(point) is None:
        return None
    return part_of(point) if point.count(".") > 1 else ""


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``x @ weight + bias`` for (..., I), (I, O) and (O,)."""
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)


class Simulation:
    """GPT-2 with the weights ``state`` on ``ids`` (B, T), in ``dtype``; programs replace stages of it."""

    def __init__(self, state: Mapping[str, Tensor], config: GPT2Config, ids: Tensor, dtype: torch.dtype = torch.float64) -> None:
        self.state = {name: tensor.detach().to("cpu", dtype) for name, tensor in state.items()}
        self.config, self.ids, self.dtype = config, ids.cpu(), dtype
        self.table = self.state[head_name(self.state)]  # (V, D), of the head
        self.norms = Norms(config, self.state)
        self.seen = causal_mask(ids.shape[1], ids.shape[1])
        self._blocks = [self._make(layer) for layer in range(config.n_layer)]
        self.base = Program()
        self.stacks = True  # rows of a batch do not see each other
        self._inputs: list[Tensor] = []
        self._states: dict[int, State] = {}
        self._memory: dict[Hashable, tuple[object, Any]] = {}

    def remember(self, key: Hashable, owner: object, make: Callable[[], Made]) -> Made:
        """Return what ``make`` makes, from the call before if ``key`` and ``owner`` are the same; one value for each key."""
        known = self._memory.get(key)
        if known is None or known[0] is not owner:
            known = self._memory[key] = owner, make()
        return cast(Made, known[1])

    def weights(self, layer: int) -> dict[str, Tensor]:
        """Return a block's tensors by their names within the block."""
        start = f"h.{layer}."
        return {name.removeprefix(start): tensor for name, tensor in self.state.items() if name.startswith(start)}

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Return GPT-2's norm ``name`` (``h.0.ln_1``, ``ln_f``) of x (..., D)."""
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.config.layer_norm_epsilon)

    def embed(self) -> Tensor:
        if "embed" in self.base.outside:
            return self.base.outside["embed"]({}).to(self.dtype)
        return self.state["wte.weight"][self.ids] + self.state["wpe.weight"][: self.ids.shape[1]]

    def normed(self, program: Program, x: Tensor) -> Tensor:
        """Return the last norm of the stream x (B, T, D), or of streams (N, B, T, D), each by itself."""
        stage = program.outside.get("ln_f", self.base.outside.get("ln_f"))
        if stage is not None and x.ndim > 3:
            return torch.stack([stage({"x": one}) for one in x])
        return self.norm("ln_f", x) if stage is None else stage({"x": x})

    def head(self, program: Program) -> Tensor:
        """Return the head's weight (V, D)."""
        stage = program.outside.get("head", self.base.outside.get("head"))
        return self.table if stage is None else stage({})

    @property
    def small(self) -> bool:
        """Whether thousands of programs can be run whole, on all tokens and in float64."""
        parameters = sum(tensor.numel() for name, tensor in self.state.items() if name.startswith("h."))
        return parameters * self.ids.numel() <= SMALL

    def on_ids(self, ids: Tensor) -> Simulation:
        """Return this simulation on other ids (B, T)."""
        other = copy(self)
        other.ids, other.seen = ids, causal_mask(ids.shape[1], ids.shape[1])
        other._blocks = [other._make(layer) for layer in range(self.config.n_layer)]
        other._inputs, other._states, other._memory = [], {}, {}
        return other

    def on(self, base: Program) -> Simulation:
        """Return this simulation with ``base`` in place of GPT-2: further programs are run on top of its faults."""
        other = copy(self)
        other.base = base
        other._blocks = [{**stages, **base.blocks.get(layer, {})} for layer, stages in enumerate(self._blocks)]
        other._inputs, other._states, other._memory = [], {}, {}
        other.stacks = all(other._stacks(layer) for layer in base.blocks)
        return other

    def _stacks(self, layer: int) -> bool:
        """Return whether rows of a batch do not see each other in a block."""
        x = self.state["wte.weight"][self.ids]
        alone, stacked = (self.run_block(layer, {"x": rows}, {})[""] for rows in (x, torch.cat([x, 2 * x.flip(1)])))
        return bool(torch.allclose(alone, stacked[: len(x)], equal_nan=True))

    def scores(self, s: State, layer: int, layout: Layout = Layout.RIGHT, factor: float | None = None) -> Tensor:
        """Return the scaled scores before the mask."""
        heads = self.config.n_head
        q, k = layout.split(s["attn.q"], heads), layout.split(s["attn.k"], heads)
        return (q * (right_scale(self.config, layer) if factor is None else factor)) @ k.mT

    def hidden(self, scores: Tensor) -> Tensor:
        """Return scores (..., T, T), perhaps of the first tokens alone, with those of later tokens hidden."""
        return scores.masked_fill(~self.seen[..., : scores.shape[-2], : scores.shape[-1]], -torch.inf)

    def right(self, layer: int) -> Stages:
        """Return GPT-2's formula of every stage of a block."""
        return self._blocks[layer]

    def _make(self, layer: int) -> Stages:
        w, config = self.weights(layer), self.config
        thirds = zip("qkv", w["attn.c_attn.weight"].chunk(3, 1), w["attn.c_attn.bias"].chunk(3, 0), strict=True)
        projections = {name: (weight, bias) for name, weight, bias in thirds}
        activation = ACTIVATIONS[config.activation_function]

        def linear(source: str, weight: Tensor, bias: Tensor) -> Stage:
            return lambda s: affine(s[source], weight, bias)

        return {
            "ln_1": lambda s: self.norm(f"h.{layer}.ln_1", s["x"]),
            **{f"attn.{name}": linear("ln_1", *projections[name]) for name in "qkv"},
            "attn.scores": lambda s: self.scores(s, layer),
            "attn.weights": lambda s: self.hidden(s["attn.scores"]).softmax(-1),
            "attn.mixed": lambda s: s["attn.weights"] @ Layout.RIGHT.split(s["attn.v"], s["attn.weights"].shape[1]),
            "attn.heads": lambda s: Layout.RIGHT.merge(s["attn.mixed"]),
            "attn.c_proj": linear("attn.heads", w["attn.c_proj.weight"], w["attn.c_proj.bias"]),
            "mid": lambda s: s["x"] + s["attn.c_proj"],
            "ln_2": lambda s: self.norm(f"h.{layer}.ln_2", s["mid"]),
            "mlp.c_fc": linear("ln_2", w["mlp.c_fc.weight"], w["mlp.c_fc.bias"]),
            "mlp.act": lambda s: activation(s["mlp.c_fc"]),
            "mlp.c_proj": linear("mlp.act", w["mlp.c_proj.weight"], w["mlp.c_proj.bias"]),
            "": lambda s: s["mid"] + s["mlp.c_proj"],
        }

    def ran(self, program: Program) -> Tensor:
        """Return the stream behind the last block of a program with a run of its own."""
        run = program.run or self.base.run
        assert run is not None
        other = self.on(Program({**self.base.blocks, **program.blocks}, {**self.base.outside, **program.outside}))
        return run(other)

    # Right values, computed once

    def right_input(self, layer: int) -> Tensor:
        """Return the stream that enters block ``layer`` of the right model; the one after the last for ``n_layer``."""
        while len(self._inputs) <= layer:
            last = len(self._inputs) - 1
            self._inputs.append(self.embed() if last < 0 else self.right_state(last)[""])
        return self._inputs[layer]

    def right_state(self, layer: int) -> State:
        """Return every stage of block ``layer`` of the right model."""
        if layer not in self._states:
            self._states[layer] = self.run_block(layer, {"x": self.right_input(layer)}, {})
        return self._states[layer]

    def run_block(self, layer: int, state: State, replaced: Stages, after: int = -1, until: int = LAST) -> State:
        """Return ``state`` with the stages of a block beyond number ``after`` computed, up to number ``until``."""
        state = dict(state)
        for stage, formula in self._blocks[layer].items():
            if after < ORDER[stage] <= until:
                state[stage] = replaced.get(stage, formula)(state)
        return state

    # Programs

    def trace(
        self, program: Program, first: int = 0, last: int | None = None, entrance: Entrance | None = None, until: int = LAST
    ) -> State:
        """Return a program's tensors at all traced points of blocks ``first`` to ``last`` (excluded), and of what surrounds them.

        ``entrance``: where it begins, None for the embeddings; ``until``: the number of the last stage in the last block.
        """
        points = self.stages(program, first, last, entrance, until)
        if last in (None, self.config.n_layer) and until == LAST:
            points["ln_f"] = self.normed(program, points["end"])
            points["logits"] = points["ln_f"] @ self.head(program).T
        return points

    def stages(
        self, program: Program, first: int = 0, last: int | None = None, entrance: Entrance | None = None, until: int = LAST
    ) -> State:
        """Return :meth:`trace` without what follows the blocks; ``end`` is the last stage, ``x`` the last block's input."""
        last = self.config.n_layer if last is None else last
        points: State = {}
        if entrance is None:
            points["embed"] = program.outside["embed"]({}).to(self.dtype) if "embed" in program.outside else self.embed()
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
            points |= {point_at(place, stage): state[stage] for stage in STAGES[: stop + 1] if stage in state}
            points["x"], x = state["x"], state[STAGES[stop]]
        points["end"] = x
        return points
