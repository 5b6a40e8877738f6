"""List what a program may hold in place of a checkpoint's tensors: misread weights, other tensors, rounded ones, other biases.

Shapes: weights W (I, O), biases (O,).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis import entries
from gpt2.port.diagnosis.weights import NARROW
from gpt2.port.dump.misloading import CUT, rounded

LINEAR = ("attn.q", "attn.k", "attn.v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
NORMS = ("ln_1", "ln_2")
PARTS = (*NORMS, *LINEAR)


class Held(NamedTuple):
    """A weight and bias that a program may hold; ``id``, ``leaf`` and ``words`` say what is wrong with them."""

    weight: Tensor
    bias: Tensor
    id: str = ""
    leaf: str = ""
    words: str = ""
    kind: str = ""


class Holdings:
    """The weights and biases that the parts of a block may have; ``state`` is the checkpoint in float64."""

    def __init__(self, state: Mapping[str, Tensor], config: GPT2Config) -> None:
        self.state, self.config = state, config

    def right(self, layer: int, part: str) -> Held:
        """Return the weight and the bias of the checkpoint that give a part of a block."""
        if part[-2:] in (".q", ".k", ".v"):
            number = "qkv".index(part[-1])
            weight, bias = (self.state[f"h.{layer}.attn.c_attn.{leaf}"].chunk(3, -1)[number] for leaf in ("weight", "bias"))
            return Held(weight, bias)
        return Held(self.state[f"h.{layer}.{part}.weight"], self.state[f"h.{layer}.{part}.bias"])

    def weights(self, layer: int, part: str, others: Iterable[int]) -> Iterator[Held]:
        """Yield misreadings of a part's weight, with the right bias, which goes along where columns are in another order.

        ``others``: the blocks whose tensors it may hold.
        """
        weight, bias = self.right(layer, part)[:2]
        name = f"h.{layer}.{part}"
        if part in NORMS:
            yield Held(bias, weight, "wrong-tensor", "", f"{part}: weight and bias have changed places")
        for one in entries.misread(f"{part}.weight", weight, self.config) if weight.ndim == 2 else ():
            yield Held(one.tensor, bias, one.id, ".weight", f"the weight {one.words}")
        for dtype, narrow in NARROW.items():
            words = f"the weight holds the checkpoint's values rounded to {dtype}"
            yield Held(weight.to(narrow).double(), bias, "reduced-precision", ".weight", words)
        words = f"the weight holds the checkpoint's values in {CUT}"
        yield Held(rounded(weight, CUT), bias, "reduced-precision", ".weight", words)
        ways = {"whole tensor": rounded(weight, "int8 a tensor"), "column": rounded(weight, "int8")} if weight.ndim == 2 else {}
        ways |= {"row": rounded(weight.t(), "int8").t()} if weight.ndim == 2 else {}
        for where, value in ways.items():
            words = f"the weight was rounded to int8, with one scale for each {where}"
            yield Held(value, bias, "reduced-precision", ".weight", words)
        if weight.ndim == 2:
            yield Held(torch.zeros_like(weight), bias, "not-loaded", ".weight", "the weight is zero, as a fresh array is")
        for other in others:
            theirs = self.right(other, part)
            at = f"h.{other}.{part}"
            words = f"it holds the checkpoint's tensors of {at}"
            yield Held(theirs.weight, theirs.bias, "wrong-tensor", "", words, f"another block's {part}")
            yield Held(theirs.weight, bias, "wrong-tensor", ".weight", f"the weight is that of {at}", f"another block's {part}")
        if weight.ndim == 2 and weight.shape[0] == weight.shape[1]:
            for other_part in LINEAR[:4]:
                if other_part != part:
                    theirs = self.right(layer, other_part)
                    yield Held(
                        theirs.weight, bias, "wrong-tensor", ".weight", f"the weight is that of {name[: -len(part)]}{other_part}"
                    )

    def columns(self, layer: int) -> Iterator[tuple[Held, Held, Held]]:
        """Yield q, k and v of c_attn cut otherwise, or with its columns in another order, and biases that go with that."""
        weight, bias = (self.state[f"h.{layer}.attn.c_attn.{leaf}"] for leaf in ("weight", "bias"))
        none = torch.zeros_like(bias[: self.config.n_embd])
        q, k, v = (
            Held(third, none, "missing-bias", "", "the queries, keys, values have no bias") for third in weight.chunk(3, 1)
        )
        yield q, k, v
        first = torch.cat((bias[: len(none)], none, none))
        for one in entries.cut_c_attn(weight):
            for theirs, lack in (
                (bias, ""),
                (torch.zeros_like(bias), "no bias is added"),
                (first, "keys and values have no bias"),
            ):
                ids, words = (f"{one.id} missing-bias", f"; {lack}") if lack else (one.id, "")
                q, k, v = (
                    Held(w, b, ids, "", f"c_attn {one.words}{words}")
                    for w, b in zip(one.tensor.chunk(3, 1), theirs.chunk(3), strict=True)
                )
                yield q, k, v
        orders = (list(entries.reordered_c_attn(tensor, self.config)) for tensor in (weight, bias))
        for one, other in zip(*orders, strict=True):
            for theirs in (other.tensor, bias):
                words = f"c_attn {one.words}"
                q, k, v = (Held(w, b, one.id, "", words) for w, b in zip(one.tensor.chunk(3, 1), theirs.chunk(3), strict=True))
                yield q, k, v

    def biases(self, layer: int, part: str) -> Iterator[Held]:
        """Yield other biases, with the right weight."""
        weight, bias = self.right(layer, part)[:2]
        yield Held(weight, torch.zeros_like(bias), "missing-bias", "", "no bias is added")
        for times in sorted({2, self.config.n_head} - {1}):
            yield Held(weight, times * bias, "extra-bias", ".bias", f"the bias is added {times} times")
        for other in PARTS:
            for n in range(self.config.n_layer):
                theirs = self.right(n, other).bias
                if theirs.shape == bias.shape and (n, other) != (layer, part):
                    kind = f"the bias of {other}"
                    yield Held(weight, theirs, "wrong-tensor", ".bias", f"the bias is that of h.{n}.{other}", kind)
