"""Where the parts of a GPT-2 lie among the parameters of a module: matrices, vectors and tables, as ids of a recording."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .dataflow import Node, Region

# Parts are named as the checkpoint's tensors are, without the layer and ".weight"; q, k and v, which it keeps in one tensor, are
# "attn.q", "attn.k", "attn.v"; the head, which it keeps in none, is "head".


@dataclass(frozen=True)
class Matrix:
    """A projection: the parameter that multiplies input k of the n-th of ``results`` of ``node``.

    ``inputs`` (K,) and ``outputs`` (N,) are the rows and columns of the checkpoint's tensor; an input of -1 is no unit but a
    constant, and its weights are a bias.
    """

    part: str
    layer: int | None
    node: Node
    results: Tensor
    inputs: Tensor
    outputs: Tensor

    def outer(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The parameters' ids as outer sums: (n,) and (K,) summands with the outputs (n,), until all outputs are covered."""
        weights, place = self.node.operands[self.node.weight], self.node.place(self.results)
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
    """A bias, or a norm's scale or shift: the parameters ``ids`` (N,) and which entries of the checkpoint's tensor they are."""

    part: str
    layer: int | None
    ids: Tensor
    places: Tensor


@dataclass(frozen=True)
class Table:
    """An embedding, or a piece of one: the parameter ``first[d] + r * stride`` is its entry for row ``begin + r`` and coordinate
    d, for r below ``rows``. ``skipped`` rows of the parameter lie before the first that is used.
    """

    part: str
    first: Tensor  # (D,)
    stride: int
    rows: int
    skipped: int = 0
    begin: int = 0
    layer: None = None


Part = Matrix | Vector | Table


def first_id(part: Part) -> int:
    """One of the parameters that a part lies in."""
    return int((next(part.outer())[0] if isinstance(part, Matrix) else part.first if isinstance(part, Table) else part.ids)[0])
