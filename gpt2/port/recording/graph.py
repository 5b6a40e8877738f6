"""Build the nodes of a recording, one for each operator that computes something."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.recording.dataflow import Kind, Node, Region, without_repeats
from gpt2.port.recording.element_ids import ElementIds

Factor = tuple[Tensor, Callable[[Tensor], Tensor]]  # of a contraction: a tensor, and how to view it as (*results, summed)


class Dependence(NamedTuple):
    """Whether elements depend on the token ids, and whether on a source."""

    tokens: bool
    sources: bool


class Graph:
    """``nodes`` in the order in which they were added; ``ids`` are the ids of all tensors so far."""

    def __init__(self, ids: ElementIds) -> None:
        self.ids = ids
        self.nodes: list[Node] = []
        self._starts: list[int] = []
        self._from_sources: list[bool] = []  # of each node: whether it depends on a source

    def add(
        self,
        kind: Kind,
        op: str,
        shape: tuple[int, ...],
        *operands: Tensor | Region,
        weight: int | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """Add a node and return the ids of its results."""
        needs = [self.dependence(operand) for operand in operands]
        ids = self.ids.new(shape)
        start = self.ids.next - ids.numel()
        self._starts.append(start)
        self._from_sources.append(any(need.sources for need in needs))
        live = kind is Kind.LOOKUP or any(need.tokens for need in needs)
        self.nodes.append(Node(kind, op, start, tuple(shape), operands, live, weight, index))
        return ids

    def elementwise(self, op: str, shape: tuple[int, ...], *operands: Tensor | None) -> Tensor:
        """Add a node over ids that broadcast to ``shape``; None is an operand without ids."""
        return self.add(Kind.ELEMENTWISE, op, shape, *(x.expand(shape) for x in operands if x is not None))

    def contraction(self, op: str, a: Factor, b: Factor) -> Tensor:
        """Add sums of products of two tensors."""
        taken = self._one_hot_lookup(op, a, b)
        if taken is None:
            taken = self._one_hot_lookup(op, b, a)
        if taken is not None:
            return taken
        operands = [self.ids.operand(*factor) for factor in (a, b)]
        shape = tuple(operands[0].shape[:-1])
        known = [operand for operand in operands if any(self.dependence(operand))]
        if len(known) < 2:  # the other factor is a constant
            return self.add(Kind.OTHER, op, shape, *known)
        weights = [number for number, operand in enumerate(operands) if self.is_source(operand)]
        return self.add(Kind.CONTRACTION, op, shape, *operands, weight=weights[0] if len(weights) == 1 else None)

    def owner(self, ids: Tensor) -> Node | None:
        """The one node that computed all these elements, if there is one."""
        if not ids.numel():
            return None
        first, last = (self._owner(int(id)) for id in ids.aminmax())
        return self.nodes[first] if first == last >= 0 else None

    def _owner(self, id: int) -> int:
        return bisect.bisect_right(self._starts, id) - 1

    def dependence(self, operand: Tensor | Region) -> Dependence:
        """What any of these elements depends on."""
        if isinstance(operand, Region):
            return Dependence(False, True)
        ids = without_repeats(operand)
        if not ids.numel():
            return Dependence(False, False)
        low, high = (int(end) for end in ids.aminmax())
        tokens, computed = self.ids.tokens, self.ids.computed
        if high < tokens:
            return Dependence(False, high >= 0)
        owners = [self._owner(high)]
        if self._owner(low) != owners[0]:
            owners = (torch.searchsorted(torch.tensor(self._starts), ids.contiguous(), right=True) - 1).unique().tolist()
        token = bool(((ids >= tokens) & (ids < computed)).any())
        source = 0 <= low < tokens or bool(((ids >= 0) & (ids < tokens)).any())
        return Dependence(
            token or any(self.nodes[number].live for number in owners if number >= 0),
            source or any(self._from_sources[number] for number in owners if number >= 0),
        )

    def is_source(self, operand: Tensor | Region) -> bool:
        """Whether all elements are parameters or buffers themselves."""
        if isinstance(operand, Region) or not operand.numel():
            return isinstance(operand, Region)
        low, high = without_repeats(operand).aminmax()
        return int(low) >= 0 and int(high) < self.ids.tokens

    def _one_hot_lookup(self, op: str, hot: Factor, table: Factor) -> Tensor | None:
        """A product with one-hot vectors takes elements of the other factor: a lookup, if the vectors depend on tokens."""
        ids = None if self.ids.region(hot[0]) is not None else self.ids.of(hot[0])
        need = Dependence(False, False) if ids is None else self.dependence(ids)
        if self.ids.region(hot[0]) is not None or need.sources or self.ids.of(table[0]) is None:
            return None
        values = hot[1](hot[0])
        once = without_repeats(values)
        if not values.numel() or not bool((((once == 1).sum(-1) == 1) & ((once != 0).sum(-1) == 1)).all()):
            return None
        index = once.argmax(-1).expand(values.shape[:-1])
        operand = self.ids.operand(*table)
        entries = operand.ids() if isinstance(operand, Region) else operand
        taken = entries.gather(-1, index[..., None])[..., 0]
        return self.add(Kind.LOOKUP, op, taken.shape, taken, index=index) if need.tokens else taken
