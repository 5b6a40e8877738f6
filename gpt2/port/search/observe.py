"""Observe a program's values: find, by value, what it has at a node of the graph."""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.fits.observed import Observed
from gpt2.port.graph import AXES, HEADED, PIECES, Model, merge, split
from gpt2.port.recording.pool import FAULT_MARGIN, LOOKED, Pool
from gpt2.port.terms.tolerance import UNITS, excess

LIKENESS = 10  # operators with which an array is compared
FAR = 10  # times the tolerance: logits of one token, by their own size


class Seen(NamedTuple):
    """The program's own numbers for a value, laid out like it, and the relative error of the value."""

    own: Tensor
    error: float
    entries: tuple[int, ...]


class Observation:
    """The arrays of ``pool``, which a program on the ids of ``model`` has computed."""

    def __init__(self, pool: Pool, model: Model) -> None:
        self.pool, self.model, self.heads = pool, model, model.config.n_head
        self.used: set[int] = set()

    def find(self, node: str, value: Tensor, fault: bool = False) -> Seen | None:
        """Return the program's numbers for a node's value, if they are among its arrays; ``fault``: with the narrower bound."""
        given = self._laid(node, value)
        match = self.pool.find(given, *AXES.get(node, PIECES), bound=(bound := self.pool.tolerance_at(node)))
        if match is None or (fault and match.error > bound / FAULT_MARGIN):
            return None
        several = value.ndim == 3 and value[..., 0].numel() > 1
        if not bool(value.any()) or (several and bool((value == value[:1, :1]).all())):
            return None  # zeros, or a bias at each token, are in any buffer
        own = self.pool.adopt(given, match)
        return Seen(merge(own) if given.ndim == 4 and value.ndim == 3 else own, match.error, match.entries)

    def _laid(self, node: str, value: Tensor) -> Tensor:
        """Return a node's value (..., B, T, D) as it is looked for: by heads, and scores without later tokens."""
        if node in HEADED and value.shape[-1] % self.heads == 0:
            return split(value, self.heads)
        return value.tril() if node == "attn.scores" and value.shape[-1] == value.shape[-2] else value

    def may_find(self, node: str, values: Tensor) -> Tensor:
        """Return for which of a node's values (N, B, T, ...) :meth:`find` may find something; it finds nothing for the others."""
        values, found = self._laid(node, values), torch.zeros(len(values), dtype=torch.bool)
        for cut in self.pool.cuts(values.shape[1:], AXES.get(node, PIECES)):
            part = values[tuple(0 if axis - 1 in cut else slice(None) for axis in range(values.ndim))] if cut else values
            self.pool.budget.spend(LOOKED, 2 * part.numel())
            found |= self.pool.holds_like(part.flatten(1), self.pool.tolerance_at(node))
        return found

    def may_be_logits(self, normed: Tensor, head: Tensor) -> Tensor:
        """Return for which of some normed streams (N, B, T, D) :meth:`are_logits` may be true, by those of the last token."""
        given, unit = self.pool.logits[:, -1, : len(head)], UNITS[self.pool.logits_dtype]
        made = normed[:, :, -1] @ head.T
        self.pool.budget.spend(6, made.numel(), normed[:, :, -1].numel() * len(head))
        apart = ((made - given).abs() - 2 * (unit[0] * made.abs() + unit[1])).flatten(1).amax(1)
        return ~(apart > 2 * FAR * self.pool.tolerance_at("logits") * made.square().flatten(1).mean(1).sqrt())

    def take(self, seen: Iterable[Seen]) -> None:
        """Note that these arrays are known."""
        for number in {number for one in seen for number in one.entries}:
            self.used |= self.pool.again(number)

    def unexplained(self, node: str, like: Tensor, but: Iterable[Seen]) -> Iterator[Observed]:
        """Yield the arrays that may be a node's value, laid out like it, those most like it first; none of ``but``."""
        known = self.used.union(*(one.entries for one in but))
        config = self.model.config
        by_heads = like.ndim == 3 and like.shape[-1] == config.n_embd
        shape = (*self.model.ids.shape, self.heads, config.head_dim) if by_heads else like.shape
        found: list[tuple[float, int, Observed]] = []
        for number, entry in enumerate(self.pool.entries):
            if entry.numel() != like.numel() or number in known:
                continue
            low, high = map(float, entry.aminmax())
            if not -math.inf < low <= high < math.inf or (low == high and entry.numel() > 1):  # nothing was computed
                continue
            self.pool.budget.spend(LIKENESS, LIKENESS * entry.numel())
            unit, smallest = UNITS[self.pool.dtypes[number]]
            for value in (one.reshape(like.shape) for one in laid(entry, shape)):
                seen = Observed(value, unit * value.abs() + smallest, self.pool.tolerance_at(node), like, number)
                found.append((-abs(seen.likeness), number, seen))
        found.sort(key=lambda one: one[:2])
        yield from (one for _, _, one in found)

    def are_logits(self, normed: Tensor, head: Tensor) -> bool:
        """Return whether the head (V, D) gives the logits from a normed stream; those of the last token are compared first."""
        pool, given, bound = self.pool, self.pool.logits[..., : len(head)], self.pool.tolerance_at("logits")
        pool.budget.spend(6, len(head), normed.shape[0] * head.numel())
        if excess(given[:, -1:], normed[:, -1:] @ head.T, pool.logits_dtype) > FAR * bound:
            return False
        made = (normed @ head.T)[:, -given.shape[1] :]
        pool.budget.spend(6, made.numel(), normed.shape[:2].numel() * head.numel())
        return made.shape == given.shape and excess(given, made, pool.logits_dtype) <= bound


def laid(entry: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    """Yield ``entry`` in a ``shape``, from every order of these axes that its own shape allows, the natural one first."""
    for sizes, order in _orders(tuple(entry.shape), tuple(shape)) if entry.numel() == math.prod(shape) else ():
        yield entry.reshape(sizes).permute(order).reshape(*shape)


@lru_cache(maxsize=256)
def _orders(given: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Return how an array may be laid out: the sizes of some axes, and their order in ``shape``."""
    own, orders = [size for size in given if size != 1], []
    axes, ends = [axis for axis, size in enumerate(shape) if size != 1], set(itertools.accumulate(own, operator.mul))
    for order in itertools.permutations(axes):
        sizes = [shape[axis] for axis in order]
        natural = len(own) > 1 or order[-1:] == tuple(axes[-1:])
        if natural and ends <= set(itertools.accumulate(sizes, operator.mul)):  # neighbouring axes make one of its own
            orders.append((sizes, [order.index(axis) for axis in axes]))
    return orders
