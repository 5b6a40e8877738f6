"""Data types of a recorded forward pass: which elements each operator computed, and from which other elements.

Every element of a parameter or buffer, every token id and every computed element has a number, its id. Views, slices and copies
keep the ids. Nothing depends on names or module types. :mod:`.recorder` makes recordings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

NO_ID = -1  # the element depends on no parameter and on no token


class NodeKind(Enum):
    """What an operator does to single elements."""

    LOOKUP = "lookup"  # entries of a table, chosen by token ids or one-hot vectors
    CONTRACTION = "contraction"  # sums of products: matrix products, convolutions of width one
    ELEMENTWISE = "elementwise"  # each result depends on the elements at its own index
    ROWWISE = "rowwise"  # has its input's shape; each result also depends on its neighbours: softmax, layer norm
    REDUCTION = "reduction"  # mean, variance, maximum
    OTHER = "other"


@dataclass(frozen=True)
class Region:
    """The ids of a view into a parameter: the element at ``index`` has the id ``start + sum(index * strides)``."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last(self) -> int:
        return self.start + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def ids(self) -> Tensor:
        """Return all ids, int64, in ``shape``."""
        return torch.arange(self.start, max(self.last, self.start) + 1).as_strided(self.shape, self.strides)

    def overlaps(self, ids: Tensor) -> bool:
        """Return whether any of these ids lies between the smallest and the largest id."""
        return bool(((ids >= self.start) & (ids <= self.last)).any())

    def __getitem__(self, index: tuple[Tensor, ...]) -> Tensor:
        """Return ``tensor[index]``, where ``index`` fixes all axes or the leading ones."""
        start = sum((i * stride for i, stride in zip(index, self.strides, strict=False)), torch.tensor(self.start))
        rest = Region(0, self.shape[len(index) :], self.strides[len(index) :]).ids()
        return start.view(*start.shape, *[1] * rest.ndim) + rest


@dataclass(frozen=True)
class Node:
    """One operator call; its results have the ids ``start`` to ``stop - 1``, in the order of ``shape``.

    ``operands``: ids of the inputs, broadcast to ``shape``; constants are left out. A contraction's operands have the summed axis
    last; reductions and OTHER keep the operands' shapes; a lookup has the entries taken and the indices that chose them.
    """

    kind: NodeKind
    op: str  # "add", "bmm", "_softmax"
    start: int
    shape: tuple[int, ...]
    operands: tuple[Tensor | Region, ...]
    live: bool  # depends on the token ids
    learned: bool  # depends on a parameter or buffer
    weight: int | None = None  # for a contraction: the operand that has only parameters
    index: Tensor | None = field(default=None, repr=False)  # for a lookup: each result's row

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def place(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return the indices in ``shape`` of these results."""
        return torch.unravel_index(ids - self.start, self.shape)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The operands that are tensors of ids, without a parameter's region."""
        return tuple(operand for operand in self.operands if isinstance(operand, Tensor))

    @property
    def weights(self) -> Tensor | Region:
        """The parameters' ids (*shape, K) of a projection, which is a contraction with parameters."""
        assert self.weight is not None
        return self.operands[self.weight]

    @property
    def inputs(self) -> Tensor:
        """The activations' ids (*shape, K) of a projection."""
        assert self.weight is not None
        inputs = self.operands[1 - self.weight]
        assert isinstance(inputs, Tensor)
        return inputs


class Use(NamedTuple):
    """How the computation uses a parameter's value: times ``scale``, plus ``shift``."""

    scale: float = 1.0
    shift: float = 0.0

    def __str__(self) -> str:
        return f"times {self.scale:.4g}" + (f" plus {self.shift:.4g}" if self.shift else "")


@dataclass(frozen=True)
class Holder:
    """A parameter or buffer; ``storage`` is the first id of its storage, which other names may share."""

    name: str
    region: Region
    storage: int
    is_parameter: bool


@dataclass(frozen=True)
class Recording:
    """A forward pass on ``ids``; sources have the first ids, then come tokens, then results in order."""

    sources: tuple[Holder, ...]
    ids: Tensor
    tokens: int  # the id of the first token; smaller ids belong to parameters and buffers
    nodes: tuple[Node, ...]
    output: Tensor  # ids of the logits
    uses: dict[int, set[Use]]  # by storage: how it was used
    unfollowed: tuple[str, ...]  # operators that could not be followed; their results have no ids

    @property
    def stop(self) -> int:
        return self.nodes[-1].stop if self.nodes else self.tokens + self.ids.numel()

    @cached_property
    def _starts(self) -> Tensor:
        return torch.tensor([node.start for node in self.nodes], dtype=torch.int64)

    def owners(self, ids: Tensor) -> Tensor:
        """Return the index of the node that computed each element; -1 for others."""
        return torch.searchsorted(self._starts, ids.contiguous(), right=True) - 1

    def owner(self, id: Tensor | int) -> int:
        return int(self.owners(torch.as_tensor(int(id))))

    def source(self, id: int) -> Holder:
        return next(source for source in self.sources if source.region.start <= id <= source.region.last)

    def name(self, id: int) -> str:
        """Return the source's name; "" for a computed element."""
        return self.source(id).name if 0 <= id < self.tokens else ""

    @cached_property
    def needed(self) -> frozenset[int]:
        """The indices of the nodes that the output depends on."""
        needed = set(self.owners(self.output).unique().tolist())
        for number in reversed(range(len(self.nodes))):
            for operand in self.nodes[number].tensors if number in needed else ():
                needed |= set(self.owners(without_repeats(operand)).unique().tolist())
        return frozenset(needed - {-1})


def without_repeats(tensor: Tensor) -> Tensor:
    """Return a view in which each expanded axis has length 1."""
    kept = [n if stride or n == 0 else 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(kept, tensor.stride())
