"""Fit what one stage of a block computes, from the stages before it and from those of earlier blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.measure.tracing import point_at
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.fits.attention import Weights
from gpt2.port.dump.fits.bank import Bank
from gpt2.port.dump.fits.contents import Contents, softmax
from gpt2.port.dump.fits.library import Library
from gpt2.port.dump.fits.linear import Linear
from gpt2.port.dump.fits.mixtures import Mixed, each_token, mixed_otherwise, tiled
from gpt2.port.dump.fits.normalising import Norm
from gpt2.port.dump.fits.observed import Fit, Observed
from gpt2.port.dump.fits.partial import clipped, dropped, left_out
from gpt2.port.dump.fits.recorded import Arrays
from gpt2.port.dump.fits.rounding import roundings
from gpt2.port.dump.fits.slots import Slots
from gpt2.port.dump.fits.softmaxes import Softmaxes
from gpt2.port.dump.fits.weighings import weighed
from gpt2.port.dump.fits.wiring import activation_fit, sum_fit
from gpt2.port.dump.simulation import LINEAR, NEEDS, Simulation, State
from gpt2.port.dump.tolerance import SLACK
from gpt2.port.graph import right_scale

NAMES = {"q": "queries", "k": "keys", "v": "values"}
BRANCHES = ("mid", "")  # the sums of stream and branch
ATTENTION = ("attn.weights", "attn.mixed", "attn.heads")
# The cause where values have limits.
CLIPPED = {"mlp.act": "gelu-variant", "mid": "residual-scaled", "": "residual-scaled"} | dict.fromkeys(LINEAR, "gelu-variant")
# The cause where some features of a stage are not computed; not-loaded for a linear layer.
LEFT_OUT = {
    "ln_1": "layernorm-not-normalising",
    "ln_2": "layernorm-not-normalising",
    "attn.weights": "softmax-missing",
    "attn.mixed": "value-projection-wrong",
    "attn.heads": "value-projection-wrong",
    "mid": "residual-missing",
    "mlp.act": "gelu-variant",
    "": "residual-missing",
}


class Operators:
    """The operators of all blocks; ``earlier``: the stages of the blocks before, as the program computes them."""

    def __init__(self, simulation: Simulation, library: Library, arrays: Arrays) -> None:
        self.simulation, self.config, self.library, self.arrays = simulation, simulation.config, library, arrays
        self.earlier: list[State] = []
        self.slots: dict[int, Slots] = {}  # by block
        self.later: dict[int, tuple[Tensor, Tensor, float] | None] = {}
        self.mixed: dict[int, str] = {}  # by block: what is mixed where values are compared

    def fit(self, layer: int, stage: str, state: State, seen: Observed, rows: Tensor) -> Fit | None:
        """Return what ``stage`` computes from those in ``state`` to give ``seen`` at ``rows`` (B, T); None if nothing fits."""
        part = "attn" if stage in ATTENTION else stage
        if stage in BRANCHES:
            stream = state["x" if stage == "mid" else "mid"]
            branch = replace(seen, value=seen.value - stream, right=seen.right - stream)
            if (fit := dropped(branch, rows, part)) is not None:
                return fit._replace(value=fit.value + stream)
        elif (fit := self._stale(stage, seen, rows)) is not None:
            return fit
        if (fit := dropped(seen, rows, part)) is not None:
            return fit
        if stage in ("attn.weights", "attn.mixed") and (fit := self._roles(layer, stage, state, seen, rows)) is not None:
            return fit
        if stage != "attn.weights" and (fit := clipped(seen, rows, part, CLIPPED.get(stage, "wrong-tensor"))) is not None:
            return fit
        for words, rounded in roundings() if stage not in (*LINEAR, *ATTENTION) else ():
            fault = Fault("reduced-precision", part, f"its result is rounded {words}")
            if (fit := seen.mostly(rounded(seen.right), rows, fault)) is not None:
                return fit
        if stage in LINEAR and (fit := activation_fit(seen, seen.right, rows, part)) is not None:
            return fit
        bias = self.linear(layer, stage, state).bias if stage in LINEAR else None
        few = list(left_out(seen, rows, part, LEFT_OUT.get(stage, "not-loaded"), bias))
        if few and few[0].sure:
            return few[0].fit
        return self._computed(layer, stage, state, seen, rows) or (few[0].fit if few else None)

    def _computed(self, layer: int, stage: str, state: State, seen: Observed, rows: Tensor) -> Fit | None:
        """Return the fit of a formula of ``stage``."""
        own, split = self.simulation.weights(layer), self._split
        if stage in ("ln_1", "ln_2"):
            eps, vectors = self.config.layer_norm_epsilon, self.library.vectors
            inputs = (
                {} if stage == "ln_1" else {"attention's result": state["attn.c_proj"], "the stream before attention": state["x"]}
            )
            norm = Norm(stage, own[f"{stage}.weight"], own[f"{stage}.bias"], eps, vectors, inputs, self.config.n_head)
            return norm.fit(seen, state["x" if stage == "ln_1" else "mid"], rows)
        if stage == "attn.weights":
            keys = {f"the keys of block {n}": one["attn.k"] for n, one in enumerate(self.earlier)}
            if not bool(rows[:, :2].any()):  # in steps, perhaps of a cache that other blocks write as well
                keys |= dict(self.arrays.as_keys())
            scale = right_scale(self.config, layer)
            slots = self.slots[layer] = Slots(split(state["attn.q"]), self._bank(layer, state), scale, self.library.in_time)
            weights = Weights(state["attn.q"], state["attn.k"], keys, slots)
            q, k = split(state["attn.q"]), split(state["attn.k"])
            known = weighed(seen, rows, q @ k.mT, self.config, layer, self.library.in_time)
            if (fit := next(known, None)) is not None:
                return fit
            softmaxes = Softmaxes(q, k, scale, self.library.in_time)
            if (fit := softmaxes.fit(seen, rows)) is not None:
                return fit
            fit = weights.fit(seen, rows)
            if fit is not None and (unit := slots.unit()):
                self.arrays.pool.loosen(SLACK * unit)
            return fit or softmaxes.tabulated(seen, rows)
        if stage == "attn.mixed":
            scale = right_scale(self.config, layer)
            slots = Slots(split(state["attn.q"]), self._bank(layer, state), scale, self.library.in_time)
            if layer in self.slots and self.slots[layer].taken is not None:
                slots = self.slots[layer]
            held = Contents(slots, state["attn.weights"], split(state["attn.v"]))
            others = {"the keys": "attn.k", "the queries": "attn.q", "attention's inputs": "ln_1", "the streams": "x"}
            values = {words: split(state[name]) for words, name in others.items()}
            values |= {f"the values of block {n}": split(one["attn.v"]) for n, one in enumerate(self.earlier)}
            if not bool(rows[:, :2].any()):
                values |= {words: split(value) for words, value in self.arrays.as_keys()}
            mixed = Mixed(state["attn.weights"], split(state["attn.v"]), values, self.library.in_time)
            fit = mixed.alone(seen, rows) or slots.mixed(seen, rows) or held.fit(seen, rows)
            return fit or mixed.fit(seen, rows) or self._whole(layer, state, seen, rows)
        if stage == "attn.heads":
            for fault, merged in _merged(state["attn.mixed"], seen.value.shape):
                if (fit := seen.fitted(merged, rows, fault)) is not None:
                    return fit
            flat = replace(seen, value=split(seen.value), slack=split(seen.slack), right=split(seen.right))
            same = torch.eye(rows.shape[1], dtype=seen.value.dtype).expand(*rows.shape[:1], self.config.n_head, -1, -1)
            fit = Mixed(same, state["attn.mixed"], {}, self.library.in_time).fit(flat, rows)
            return None if fit is None else Fit(fit.faults, Layout.RIGHT.merge(fit.value))
        if stage == "mlp.act":
            return activation_fit(seen, state["mlp.c_fc"], rows)
        if stage in ("mid", ""):
            if stage == "mid" and (fit := _exchanged(state, seen, rows)) is not None:
                return fit
            return sum_fit(seen, self._terms(layer, stage, state), rows, stage)
        linear = self.linear(layer, stage, state)
        for fault, merged in _merged(state["attn.mixed"], seen.value.shape) if stage == "attn.c_proj" else ():
            if (fit := seen.fitted(merged @ linear.weight + linear.bias, rows, fault)) is not None:
                return fit
        return linear.fit(seen, state[NEEDS[stage][0]], rows)

    def _whole(self, layer: int, state: State, seen: Observed, rows: Tensor) -> Fit | None:
        """Return the fit of an attention that shows no weights like GPT-2's, from queries, keys and values."""
        q, k, v = (self._split(state[f"attn.{name}"]) for name in "qkv")
        scale = right_scale(self.config, layer)
        ways = itertools.chain(each_token(q, k, v, scale), tiled(q, k, v, scale))
        return next(mixed_otherwise(seen, rows, ways, self.library.in_time), None)

    def linear(self, layer: int, stage: str, state: State) -> Linear:
        """Return the linear layer of ``stage``, with the inputs that it may take by mistake."""
        own = self.simulation.weights(layer)
        part = "attn.c_attn" if stage in ("attn.q", "attn.k", "attn.v") else stage
        weight, bias = own[f"{part}.weight"], own[f"{part}.bias"]
        if part != stage:
            share = "qkv".index(stage[-1])
            weight, bias = weight.chunk(3, 1)[share], bias.chunk(3)[share]
        inputs = {
            "attn.c_attn": {"the stream, without a norm": state["x"]},
            "mlp.c_fc": {"the stream, without a norm": state.get("mid", state["x"]), "attention's input": state["ln_1"]},
            "mlp.c_proj": {"what enters the activation": state.get("mlp.c_fc", state["x"])},
            "attn.c_proj": {
                "the values": state["attn.v"],
                "the queries": state["attn.q"],
                "the keys": state["attn.k"],
                "attention's input": state["ln_1"],
            },
        }[part]
        return Linear(self.library, f"h.{layer}.{part}.weight", stage, weight, bias, inputs)

    def _terms(self, layer: int, stage: str, state: State) -> dict[str, Tensor]:
        """Return what a sum may hold, GPT-2's two terms first."""
        terms = {
            "the block's input": state["x"],
            "attention's result": state["attn.c_proj"],
            "attention's normed input": state["ln_1"],
            "attention's input normed, without weight and bias,": self._normalised(state["x"]),
        }
        if stage != "mid":
            after = {"the stream after attention": state["mid"], "the feed-forward's result": state["mlp.c_proj"]}
            normed = {
                "the feed-forward's normed input": state["ln_2"],
                "the feed-forward's input normed, without weight and bias,": self._normalised(state["mid"]),
            }
            terms = after | terms | normed
        if layer:
            before, names = self.earlier[-1], {"feed-forward": "mlp.c_proj", "attention": "attn.c_proj", "input": "x"}
            terms |= {"the embeddings": self.earlier[0]["x"]}
            terms |= {f"the {name} of the block before": before[part] for name, part in names.items()}
        return terms

    def _normalised(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.config.layer_norm_epsilon)

    def _stale(self, stage: str, seen: Observed, rows: Tensor) -> Fit | None:
        """Return the fit of GPT-2's value plus those of earlier blocks, as in a buffer that is not cleared."""
        for first in range(len(self.earlier)):
            value = seen.right + sum((state[stage] for state in self.earlier[first:]), torch.zeros_like(seen.right))
            others = ", ".join(f"h.{layer}" for layer in range(first, len(self.earlier)))
            words = f"the values of {others} are added, as in a buffer that is not cleared"
            id = {"attn.mixed": "value-projection-wrong", "attn.weights": "softmax-missing"}.get(stage, "residual-scaled")
            part = "attn" if stage in ("attn.mixed", "attn.weights", "attn.heads") else stage
            if (fit := seen.fitted(value, rows, Fault(id, part, words))) is not None:
                return fit
        return None

    def _bank(self, layer: int, state: State) -> Bank:
        """Return the keys and values of all blocks that are known or recorded, this block's first."""
        found = {layer: (state["attn.k"], state["attn.v"], 0.0)}
        found |= {n: (one["attn.k"], one["attn.v"], 0.0) for n, one in enumerate(self.earlier)}
        found |= {n: one for n in range(layer + 1, self.config.n_layer) if (one := self._later(n)) is not None}
        keys, values, units = zip(*found.values(), strict=True)
        return Bank([*map(self._split, keys)], [*map(self._split, values)], [*found], units)

    def _later(self, layer: int) -> tuple[Tensor, Tensor, float] | None:
        """Return the recorded arrays that are most like GPT-2's keys and values in a later block, and their rounding."""
        if layer not in self.later:
            keys, values = (self.arrays.likest(one, self.right[point_at(layer, one)]) for one in ("attn.k", "attn.v"))
            self.later[layer] = None if keys is None or values is None else (keys[0], values[0], max(keys[1], values[1]))
        return self.later[layer]

    @cached_property
    def right(self) -> State:
        """GPT-2's own values at all points."""
        return self.simulation.trace(self.simulation.base)

    def _roles(self, layer: int, stage: str, state: State, seen: Observed, rows: Tensor) -> Fit | None:
        """Return the fit of queries, keys and values in each other's places, with the values compared."""
        parts = {name: self._split(state[f"attn.{name}"]) for name in "qkv"}
        if stage == "attn.mixed":
            if layer not in self.mixed:
                return None
            fault = Fault("qkv-order", "attn", f"{NAMES[self.mixed[layer]]} are mixed, not the values")
            return seen.fitted(state["attn.weights"] @ parts[self.mixed[layer]], rows, fault)
        scale = right_scale(self.config, layer)
        for one, other in (("q", "v"), ("v", "q"), ("k", "v"), ("v", "k"), ("v", "v")):
            value = softmax(parts[one] @ parts[other].mT * scale)
            rest = next(name for name in "kqv" if name not in (one, other))
            words = f"queries, keys and values have changed places: {NAMES[one]} are compared with {NAMES[other]}"
            if (fit := seen.fitted(value, rows, Fault("qkv-order", "attn", words))) is not None:
                self.mixed[layer] = rest
                return fit
        return None

    def _split(self, y: Tensor) -> Tensor:
        return Layout.RIGHT.split(y, self.config.n_head)


def _merged(mixed: Tensor, shape: torch.Size) -> Iterator[tuple[Fault, Tensor]]:
    """Yield heads (B, H, T, D) that are merged with their axes in any order."""
    for order in itertools.permutations(range(4)):
        words = f"heads (B, H, T, D) are merged with their axes in the order {', '.join('BHTD'[axis] for axis in order)}"
        yield Fault("head-layout", "attn", words), mixed.permute(order).reshape(shape)


def _exchanged(state: State, seen: Observed, rows: Tensor) -> Fit | None:
    """Return the fit of an attention (B, T, D) that is added with its rows of the batch and its tokens exchanged."""
    x, a = state["x"], state["attn.c_proj"]
    turned = a.reshape(a.shape[1], a.shape[0], -1).transpose(0, 1), a.transpose(0, 1)
    words = "heads are merged with rows of the batch and tokens exchanged: a token gets what belongs to others"
    fits = (seen.fitted(x + one.reshape(a.shape), rows, Fault("head-layout", "attn", words)) for one in turned)
    return next((fit for fit in fits if fit is not None), None) if len(a) > 1 else None
