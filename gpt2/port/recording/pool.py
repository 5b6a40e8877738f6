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
from gpt2.port.terms.budget import Budget

STRICT = 1e-9  # relative to the root mean square; float64 rounding is 1e-15, and a softmax amplifies it
LOOSE = 1e-5  # if the port computes anything in float32
LOOKED = 1.2  # operators that looking for a value costs, beside its sums
SORTED = 16  # times as much as reading a number, what sorting it costs
SUMMED = 1e-14  # relative rounding of a sum of float64 numbers


class Match(NamedTuple):
    """A match of a value: its relative error, the matching entries, and the axes along which the value was sliced."""

    error: float
    entries: tuple[int, ...]
    axes: tuple[int, ...]


class Pool:
    """The tensors of a forward pass, by size and sums; ``narrow``: some tensor was below float64.

    Where ``budget`` is spent, every search raises :class:`gpt2.port.terms.budget.Spent`.
    """

    def __init__(self) -> None:
        self.entries: list[Tensor] = []
        self.names: list[str] = []  # by entry
        self.dtypes: list[torch.dtype] = []  # in which they are stored
        self.logits = torch.empty(0)
        self.logits_dtype = torch.float64
        self.narrow = False
        self.budget = Budget()
        self._by_size: dict[int, list[int]] = {}
        self._sums: list[tuple[float, float]] = []  # by entry: sum and sum of squares of the finite elements
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

    def add(self, tensor: Tensor, name: str = "", dtype: torch.dtype = torch.float64) -> None:
        """Add a tensor under its name, perhaps stored in a narrower dtype."""
        self.names.append(name or f"tensor {len(self.entries)}")
        self.dtypes.append(dtype)
        entry = tensor.detach().to("cpu", torch.float64, copy=True).contiguous()
        self._by_size.setdefault(entry.numel(), []).append(len(self.entries))
        self._ranked.pop(entry.numel(), None)
        self._sums.append(_sums(entry))
        self.entries.append(entry)

    @property
    def bound(self) -> float:
        """The largest relative error of a match."""
        return LOOSE if self.narrow else STRICT

    @property
    def allowance(self) -> Mapping[str, float]:
        """The largest error of a right value, by traced point, where it was measured."""
        return {}

    def logits_error(self, value: Tensor, logits: Tensor) -> float:
        """Return the relative error of ``value`` as the origin of ``logits``, a part of this pool's."""
        return worst_relative_error(value, logits)

    def again(self, number: int) -> set[int]:
        """Return the entries with the same numbers as one of them: programs write a block's result and the next one's input."""
        mine, alike = self.entries[number].flatten(), self._by_size[self.entries[number].numel()]
        return {n for n in alike if n == number or torch.equal(self.entries[n].flatten(), mine)}

    def tolerance_at(self, place: str) -> float:
        """Return the allowed relative error of a stage's value, from exact inputs."""
        return self.bound

    def of_size(self, numel: int) -> list[Tensor]:
        return [self.entries[number] for number in self._by_size.get(numel, [])]

    def fault_bound(self, place: str) -> float:
        """The largest error of a match that shows a fault at a place, such as "ln_1"."""
        return self.bound

    def find_at(self, place: str, value: Tensor, *axes: int) -> Match | None:
        """Do :meth:`find` with the bound for a place."""
        return self.find(value, *axes)

    def unit(self, number: int) -> float:
        """Return the relative error of the sum of entry ``number`` beside the bound."""
        return SUMMED

    @property
    def largest_unit(self) -> float:
        return SUMMED

    def compared(self, number: int, ordered: Tensor) -> float:
        """Return the relative error of ``ordered``, a sorted value, as the origin of entry ``number``."""
        return _error(self._in_order(number), ordered)

    def find(self, value: Tensor, *axes: int) -> Match | None:
        """Return the best match of a value: whole, else slice by slice along one of ``axes``, else along all. None if none."""
        self.budget.check()
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
            self.budget.spend(2, 2 * SORTED * part.numel())
        return out

    def _find(self, value: Tensor) -> tuple[float, int] | None:
        """Return the error and number of the best entry for a whole value; sums are compared first, because that is fast."""
        n = value.numel()
        if not n or n not in self._by_size:
            return None
        if n not in self._ranked:
            self._ranked[n] = sorted((self._sums[number][0], number) for number in self._by_size[n])
        self.budget.spend(LOOKED, 2 * n)
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
        self.budget.spend(2 * len(numbers), SORTED * n * (len(numbers) > 0))
        mine = value.flatten().sort().values if numbers else value
        best = min(((self.compared(number, mine), number) for number in numbers), default=None)
        return best if best is not None and best[0] <= self.bound else None

    def _in_order(self, number: int) -> Tensor:
        if number not in self._sorted:
            self._sorted[number] = self.entries[number].flatten().sort().values
        return self._sorted[number]


def _sums(tensor: Tensor) -> tuple[float, float]:
    flat = tensor.flatten()
    total, squares = float(flat.sum()), float(flat.dot(flat))
    if math.isfinite(squares):
        return total, squares
    finite = flat.nan_to_num(0.0, 0.0, 0.0)
    return float(finite.sum()), float(finite.dot(finite))


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
