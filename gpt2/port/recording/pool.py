"""Search the floating-point tensors of one forward pass by value, whatever their layout.

Numbers are compared in sorted order, whole or in slices, because a port may transpose, flatten or split a value. Thousands of
float64 numbers do not agree to 1e-12 by chance.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.port.deadline import Deadline

STRICT = 1e-9  # relative to the root mean square; float64 rounding is 1e-15, and a softmax amplifies it
LOOSE = 1e-5  # if the port computes anything in float32
EXACT = 1e-13  # stop searching at a match as good as this
SUMMED = 1e-14  # relative rounding of a sum of float64 numbers
ROW_SUM_BOUND = 1e-6  # error of a sum of probabilities, in any dtype


class Match(NamedTuple):
    """A match of a value: its relative error, the matching entries, and the axes along which the value was sliced."""

    error: float
    entries: tuple[int, ...]
    axes: tuple[int, ...]


class Pool:
    """The tensors of a forward pass, by size and sums; ``narrow``: some tensor was below float64.

    Behind ``deadline``, every search raises :class:`gpt2.port.deadline.TimeUp`.
    """

    def __init__(self) -> None:
        self.entries: list[Tensor] = []
        self.logits = torch.empty(0)
        self.narrow = False
        self.deadline = Deadline()
        self._by_size: dict[int, list[int]] = {}
        self._sums: list[tuple[float, float]] = []  # by entry: sum and sum of squares of the finite elements
        self._tables: dict[int, Tensor] = {}  # by size: the sums of all entries
        self._ranked: dict[int, list[tuple[float, int]]] = {}  # by size: sum and number of the entries, by their sums
        self._sorted: dict[int, Tensor] = {}

    @classmethod
    def of(cls, arrays: Iterable[Tensor], logits: Tensor) -> Pool:
        """Return a pool of ``arrays`` of any origin, order and layout, and of ``logits`` (B, T, V)."""
        pool = cls()
        for tensor in (*arrays, logits):
            pool.narrow |= tensor.dtype != torch.float64
            pool.add(tensor)
        pool.logits = logits.detach().to("cpu", torch.float64)
        return pool

    def add(self, tensor: Tensor) -> None:
        entry = tensor.detach().to("cpu", torch.float64, copy=True).contiguous()
        self._by_size.setdefault(entry.numel(), []).append(len(self.entries))
        self._tables.pop(entry.numel(), None)
        self._ranked.pop(entry.numel(), None)
        self._sums.append(_sums(entry))
        self.entries.append(entry)

    @property
    def bound(self) -> float:
        """The largest relative error of a match."""
        return LOOSE if self.narrow else STRICT

    @property
    def exact(self) -> float:
        """The error of a match that is as good as any."""
        return EXACT

    @property
    def allowance(self) -> Mapping[str, float]:
        """The largest error of a right value, by traced point, where it was measured."""
        return {}

    @property
    def sum_bound(self) -> float:
        """The largest error of a sum of probabilities in the logits' place."""
        return ROW_SUM_BOUND

    def error(self, value: Tensor, entry: Tensor) -> float:
        """Return the relative error of ``value`` as the origin of ``entry``, one of this pool's, in the same layout."""
        return worst_relative_error(value, entry)

    def logits_error(self, value: Tensor, logits: Tensor) -> float:
        """Return the relative error of ``value`` as the origin of ``logits``, a part of this pool's."""
        return worst_relative_error(value, logits)

    def of_size(self, numel: int) -> list[Tensor]:
        return [self.entries[number] for number in self._by_size.get(numel, [])]

    def fault_bound(self, place: str) -> float:
        """The largest error of a match that shows a fault at a place, such as "ln_1"."""
        return self.bound

    def find_at(self, place: str, value: Tensor, *axes: int) -> Match | None:
        """Do :meth:`find` with the bound for a place."""
        return self.find(value, *axes)

    def rounded(self, factor: float, loose: float | None = None) -> float:
        """Return the number that a fitted factor was meant to be; ``loose``: its relative error."""
        return factor

    def unit(self, number: int) -> float:
        """Return the relative error of the sum of entry ``number`` beside the bound."""
        return SUMMED

    @property
    def largest_unit(self) -> float:
        return SUMMED

    def loose(self, number: int) -> float:
        """Return the relative error of a factor that is read off entry ``number``, beside the bound."""
        return 0.0

    def compared(self, number: int, ordered: Tensor) -> float:
        """Return the relative error of ``ordered``, a sorted value, as the origin of entry ``number``."""
        return _error(self._in_order(number), ordered)

    def find(self, value: Tensor, *axes: int) -> Match | None:
        """Return the best match of a value: whole, else slice by slice along one of ``axes``, else along all. None if none."""
        self.deadline.check()
        whole = self._find(value)
        if whole is not None:
            return Match(whole[0], (whole[1],), ())
        for cut in [*((axis,) for axis in axes), *([tuple(axes)] if len(axes) > 1 else [])]:
            matches = []
            if value.numel() // max(math.prod(value.shape[axis] for axis in cut), 1) not in self._by_size:
                continue
            if self._find(value[tuple(0 if axis in cut else slice(None) for axis in range(value.ndim))]) is None:
                continue
            for part in _slices(value, cut):
                match = self._find(part)
                if match is None:
                    break
                matches.append(match)
            else:
                return Match(max(error for error, _ in matches), tuple(number for _, number in matches), cut)
        return None

    def adopt(self, value: Tensor, match: Match) -> Tensor:
        """Return the port's own numbers, rounding included, in the layout of ``value``."""
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        for part, own, number in zip(_slices(value, match.axes), _slices(out, match.axes), match.entries, strict=True):
            taken = torch.empty(part.numel(), dtype=torch.float64)
            taken[part.flatten().argsort()] = self._in_order(number)
            own.copy_(taken.view(part.shape))
        return out

    def factors(self, value: Tensor, *axes: int) -> list[float]:
        """Return all f with an entry equal to f times ``value``, or else to f times its first slice along one of ``axes``."""
        self.deadline.check()
        found: list[float] = []
        for part in [value, *(value.select(axis, 0) for axis in axes)]:
            first, second = _sums(part)
            count, ordered = part.numel(), None
            for number in self._by_size.get(count, []) if second > 0 else ():
                mine, squares = self._sums[number]
                size = math.sqrt(squares / second) if squares < math.inf else 0.0
                loose = self.loose(number)
                for factor in (size, -size) if size > 0 else ():
                    if abs(mine - factor * first) > (self.bound + self.unit(number)) * size * math.sqrt(second / count) * count:
                        continue
                    factor = self.rounded(factor, max(self.bound, loose))
                    if any(math.isclose(factor, other, rel_tol=max(min(1e-7, self.bound), loose)) for other in found):
                        continue
                    ordered = part.flatten().sort().values if ordered is None else ordered
                    if self.compared(number, factor * (ordered if factor > 0 else ordered.flip(0))) <= self.bound + loose:
                        found.append(factor)
            if found:
                break
        return found

    def near(self, n: int, first: Tensor, second: Tensor) -> Tensor:
        """Return (N, entries): whether each entry of ``n`` elements has the sum ``first`` (N,) and squares ``second`` (N,)."""
        self.deadline.check()
        if n not in self._by_size:
            return torch.zeros(len(first), 0, dtype=torch.bool)
        sums, squares = self._table(n)
        first, second, margins = first[:, None], second[:, None], self._margins(n)
        near = (sums - first).abs() <= margins * (second / n).sqrt().clamp(min=1e-300) * n + 1e-290
        return near & ((squares - second).abs() <= 2.2 * margins * second + 1e-290)

    def may_be_near(self, n: int, first: Tensor) -> Tensor:
        """Return (N, entries): where :meth:`near` can be true for sums ``first`` (N,), whatever the squares are."""
        self.deadline.check()
        if n not in self._by_size:
            return torch.zeros(len(first), 0, dtype=torch.bool)
        sums, squares = self._table(n)
        margins = self._margins(n)
        largest = squares / (1 - 2.2 * margins).clamp(min=1e-300)  # the largest squares that are near enough
        return (sums - first[:, None]).abs() <= 1.01 * margins * (largest / n).sqrt().clamp(min=1e-300) * n + 1e-290

    def _table(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the sums and the sums of squares of all entries of ``n`` elements."""
        if n not in self._tables:
            self._tables[n] = torch.tensor([self._sums[number] for number in self._by_size[n]], dtype=torch.float64)
        sums, squares = self._tables[n].unbind(1)
        return sums, squares

    def _margins(self, n: int) -> Tensor:
        """Return the largest relative error of a sum, for each entry of ``n`` elements."""
        return torch.full((len(self._by_size[n]),), self.bound + 1e-14, dtype=torch.float64)

    def _find(self, value: Tensor) -> tuple[float, int] | None:
        """Return the error and number of the best entry for a whole value; sums are compared first, because that is fast."""
        n = value.numel()
        if not n or n not in self._by_size:
            return None
        if n not in self._ranked:
            self._ranked[n] = sorted((self._sums[number][0], number) for number in self._by_size[n])
        (first, second), ranked, numbers = _sums(value), self._ranked[n], []
        size = max(math.sqrt(second / n), 1e-300) * n
        margin = (self.bound + self.largest_unit) * size + 1e-290
        for total, number in ranked[bisect_left(ranked, (first - margin,)) :]:
            if total > first + margin:
                break
            loose = self.bound + self.unit(number)
            close = abs(total - first) <= loose * size + 1e-290
            if close and abs(self._sums[number][1] - second) <= 2.2 * loose * second + 1e-290:
                numbers.append(number)
        mine = value.flatten().sort().values if numbers else value
        best = min(((self.compared(number, mine), number) for number in numbers), default=None)
        return best if best is not None and best[0] <= self.bound else None

    def _in_order(self, number: int) -> Tensor:
        if number not in self._sorted:
            self._sorted[number] = self.entries[number].flatten().sort().values
        return self._sorted[number]


def _sums(tensor: Tensor) -> tuple[float, float]:
    finite = tensor.nan_to_num(0.0, 0.0, 0.0)
    return float(finite.sum()), float(finite.square().sum())


def _error(a: Tensor, b: Tensor) -> float:
    """Return the relative error of two sorted tensors; NaN equals NaN, because a recorded tensor may hold some."""
    missing = b.isnan()
    if not missing.any():
        return worst_relative_error(a, b)
    same_places = torch.equal(missing, a.isnan()) and not missing.all()
    return worst_relative_error(a[~missing], b[~missing]) if same_places else math.inf


def _slices(value: Tensor, axes: tuple[int, ...]) -> list[Tensor]:
    parts = [value]
    for axis in sorted(axes, reverse=True):
        parts = [piece for part in parts for piece in part.unbind(axis)]
    return parts
