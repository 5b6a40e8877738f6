"""Say where each part of a GPT-2 lies among a module's parameters: matrices, vectors and tables, as ids of a recording.

Parts have the names of the checkpoint's tensors, without the layer and ".weight". The checkpoint keeps queries, keys and values
in one tensor; here they are "attn.q", "attn.k" and "attn.v". The output head, which is the token embedding again, is "head".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.port.recording.dataflow import Node, Region


@dataclass(frozen=True)
class Matrix:
    """A projection: the parameter that multiplies input k of the n-th of ``results`` of ``node``.

    ``inputs`` (K,) and ``outputs`` (N,) are the rows and columns of the checkpoint's tensor. The input -1 is a constant; its
    weights are a bias.
    """

    part: str
    layer: int | None
    node: Node
    results: Tensor
    inputs: Tensor
    outputs: Tensor

    def outer_sums(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The parameters' ids as outer sums: (n,) and (K,) summands with the outputs (n,), until all outputs are covered."""
        weights, place = self.node.weights, self.node.place(self.results)
        if isinstance(weights, Region):
            first = replace(weights, shape=(*weights.shape[:-1], 1))[place][:, 0]
            yield first, torch.arange(weights.shape[-1]) * weights.strides[-1], self.outputs
            return
        ids = weights[place]
        first, along = ids[:, 0], ids[0] - ids[0, 0]
        if torch.equal(ids, first[:, None] + along):
            yield first, along, self.outputs
        else:
            for number, row in enumerate(ids):
                yield row[:1], row - row[0], self.outputs[number : number + 1]


@dataclass(frozen=True)
class Vector:
    """A bias, or a norm's scale or shift: the parameters ``ids`` (N,), and which entries of the checkpoint's tensor they are."""

    part: str
    layer: int | None
    ids: Tensor
    places: Tensor


@dataclass(frozen=True)
class Table:
    """An embedding, or rows of one: the parameter ``first[d] + r * stride`` is its entry for row ``begin + r`` and coordinate d.

    r is below ``rows``. ``skipped`` rows of the parameter lie before the first that is used.
    """

    part: str
    first: Tensor  # (D,)
    stride: int
    rows: int
    skipped: int = 0
    begin: int = 0
    layer: None = None


Part = Matrix | Vector | Table

# What a part does in the forward pass, by which it is recognised.
EVIDENCE = {
    "wte": "the token ids choose its rows",
    "wpe": "added to the stream, other rows at other positions",
    "attn.q": "its results are matched against the keys, for the position that the mix is for",
    "attn.k": "its results are matched against the queries, for the positions that are mixed",
    "attn.v": "its results are what attention mixes",
    "attn.c_proj": "takes the mix back to the stream",
    "mlp.c_fc": "takes the stream to units that only the next projection reads",
    "mlp.c_proj": "takes the hidden units back to the stream",
    "attn.q.bias": "added to the queries",
    "attn.k.bias": "added to the keys",
    "attn.v.bias": "added to the values",
    "attn.c_proj.bias": "added to what attention gives back",
    "mlp.c_fc.bias": "added to the hidden units",
    "mlp.c_proj.bias": "added to what the feed-forward gives back",
    "ln_1.weight": "scales the normed stream before the queries",
    "ln_1.bias": "shifts the normed stream before the queries",
    "ln_2.weight": "scales the normed stream before the feed-forward",
    "ln_2.bias": "shifts the normed stream before the feed-forward",
    "ln_f.weight": "scales the normed stream at the end",
    "ln_f.bias": "shifts the normed stream at the end",
    "head": "its results are the logits; GPT-2's head is its token embedding",
    "head.bias": "added to the logits, where GPT-2 adds nothing",
}


def evidence(part: Part) -> str:
    """Why a parameter is this part of GPT-2."""
    return EVIDENCE[part.part] if part.layer is None else f"block {part.layer}: {EVIDENCE[part.part]}"


def sample(part: Part) -> Tensor:
    """The ids of some of a part's parameters, at least one."""
    return next(part.outer_sums())[0] if isinstance(part, Matrix) else part.first if isinstance(part, Table) else part.ids
