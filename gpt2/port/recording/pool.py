"""Search the floating-point tensors of one forward pass by value, whatever their layout.

Numbers are compared in sorted order, whole or in slices, because a port may transpose, flatten or split a value. Thousands of
float64 numbers do not agree to 1e-12 by chance.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from gpt2.config import GPT2Config
from gpt2.measure.user_code import logits_of
from gpt2.port.recording.dispatch import OperatorCall, OperatorMode, tensors
from gpt2.port.recording.forward import plain_attention
from gpt2.port.terms.budget import Budget
from gpt2.port.terms.tolerance import HALVES, UNITS, Tolerance, excess

STRICT = 1e-9  # relative to the root mean square; float64 rounding is 1e-15, and a softmax amplifies it
LOOSE = 1e-5  # if the port computes anything in float32
FAULT_MARGIN = 4  # how many times better than the tolerance a wrong formula has to fit: noise must not look like a fault
LOOKED = 1.2  # operators that looking for a value costs, beside its sums
VIEWS_PER_TOKEN = 4  # views of a parameter are kept up to this many widths per token (rows of an embedding)
SCREENED = 1e-11  # what values that are computed beside others may be off
SORTED = 16  # times as much as reading a number, what sorting it costs


class Match(NamedTuple):
    """A match of a value: its relative error, the matching entries, and the axes along which the value was sliced."""

    error: float
    entries: tuple[int, ...]
    axes: tuple[int, ...]


class Pool:
    """The values of a forward pass, by size and sums: all that a module computes, or what a dump holds.

    ``tolerance``: as measured for a dump, beyond the rounding of each array's dtype. A module, which runs in float64, has none;
    ``narrow``: some of its tensors were below float64. ``late``: a first, short text does not show what is wrong.
    Where ``budget`` is spent, every search raises :class:`gpt2.port.terms.budget.Spent`.
    """

    def __init__(self, tolerance: Tolerance | None = None) -> None:
        self.tolerance = tolerance
        self.narrow = tolerance is not None and tolerance.dtype != torch.float64
        self.late = False
        self.entries: list[Tensor] = []
        self.names: list[str] = []  # by entry
        self.dtypes: list[torch.dtype] = []  # in which they are stored
        self.whole: list[bool] = []  # an array, and not a part of one
        self.logits = torch.empty(0)
        self.logits_dtype = torch.float64
        self.budget = Budget()
        self._by_size: dict[int, list[tuple[float, int]]] = {}  # sum and number of the entries, by their sums
        self._sums: list[tuple[float, float]] = []  # by entry: sum and sum of squares of the finite elements
        self._moments: dict[tuple[int, float], tuple[Tensor, Tensor, Tensor]] = {}  # of the entries
        self.in_order = cache(lambda number, entries=self.entries: entries[number].flatten().sort().values)  # holds no pool
        self._cuts: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
        self._unit = 0.0  # the largest error of storing an entry

    def add(self, tensor: Tensor, name: str = "", dtype: torch.dtype = torch.float64, whole: bool = True) -> None:
        """Add a tensor under its name, perhaps stored in a narrower dtype."""
        self.names.append(name or f"tensor {len(self.entries)}")
        self.dtypes.append(dtype)
        self._unit = max(self._unit, UNITS[dtype][0])
        self.whole.append(whole)
        entry = tensor.detach().to("cpu", torch.float64, copy=True).contiguous()
        self._sums.append(_sums(entry))
        insort(self._by_size.setdefault(entry.numel(), []), (self._sums[-1][0], len(self.entries)))
        self.entries.append(entry)
        self._moments.clear()
        self._cuts.clear()

    @property
    def allowance(self) -> Mapping[str, float]:
        """The largest error of a right value, by traced point, where it was measured."""
        return {} if self.tolerance is None else self.tolerance.points

    def again(self, number: int) -> set[int]:
        """Return the entries with the same numbers as one of them: programs write a block's result and the next one's input."""
        mine, alike = self.entries[number].flatten(), self._by_size[self.entries[number].numel()]
        return {n for _, n in alike if n == number or torch.equal(self.entries[n].flatten(), mine)}

    def tolerance_at(self, place: str) -> float:
        """Return the allowed relative error of a stage's value, from exact inputs."""
        if self.tolerance is None:
            return LOOSE if self.narrow else STRICT
        return self.tolerance.stages.get(place) or max(self.tolerance.stages.values())

    def cuts(self, shape: tuple[int, ...], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the axes along which a value of this shape is cut where an entry has the size of a slice: none, one, or all."""
        if (shape, axes) not in self._cuts:
            every = [(), *((axis,) for axis in axes), *([axes] if len(axes) > 1 else [])]
            size = math.prod(shape)
            slices = [math.prod(shape[axis] for axis in cut) for cut in every]
            self._cuts[shape, axes] = [cut for cut, n in zip(every, slices, strict=True) if size // max(n, 1) in self._by_size]
        return self._cuts[shape, axes]

    def find(self, value: Tensor, *axes: int, bound: float | None = None) -> Match | None:
        """Return the best match of a value within ``bound``: whole, else slice by slice along one of ``axes``, else along all.

        Slices are whole arrays or parts of one. None if there is no match.
        """
        self.budget.check()
        bound = self.tolerance_at("") if bound is None else bound
        for cut in self.cuts(value.shape, axes):
            matches = []
            if cut and self._find(value[tuple(0 if axis in cut else slice(None) for axis in range(value.ndim))], bound) is None:
                continue
            for part in _slices(value, cut):
                match = self._find(part, bound)
                if match is None:
                    break
                matches.append(match)
            else:
                numbers = tuple(number for _, number in matches)
                origins = {self.names[number].partition("[")[0] for number in numbers}
                one_kind = all(self.whole[number] for number in numbers) or len(origins) == 1
                return Match(max(error for error, _ in matches), numbers, cut) if one_kind else None
        return None

    def adopt(self, value: Tensor, match: Match) -> Tensor:
        """Return the port's own numbers, rounding included, in the layout of ``value``.

        Not those stored in half precision: the program had more digits than it wrote, and our own numbers are closer to them.
        """
        if any(self.dtypes[number] in HALVES for number in match.entries):
            return value.clone(memory_format=torch.contiguous_format)
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        for part, own, number in zip(_slices(value, match.axes), _slices(out, match.axes), match.entries, strict=True):
            taken = torch.empty(part.numel(), dtype=torch.float64)
            taken[part.flatten().argsort()] = self.in_order(number)
            own.copy_(taken.view(part.shape))
            self.budget.spend(2, 2 * SORTED * part.numel())
        return out

    def _find(self, value: Tensor, bound: float) -> tuple[float, int] | None:
        """Return the error and number of the best entry for a whole value; sums are compared first, because that is fast."""
        n = value.numel()
        if not n or n not in self._by_size:
            return None
        self.budget.spend(LOOKED, 2 * n)
        (first, second), ranked, numbers = _sums(value), self._by_size[n], []
        size = max(math.sqrt(second / n), 1e-300) * n
        margin = (bound + self._unit) * size + 1e-290
        for total, number in ranked[bisect_left(ranked, (first - margin,)) :]:
            if total > first + margin:
                break
            loose = bound + UNITS[self.dtypes[number]][0]
            close = abs(total - first) <= loose * size + 1e-290
            if close and abs(self._sums[number][1] - second) <= 2.2 * loose * second + 1e-290:
                numbers.append(number)
        if not numbers:
            return None
        self.budget.spend(2 * len(numbers), SORTED * n)
        mine = value.flatten().sort().values
        compared = ((excess(self.in_order(number), mine, self.dtypes[number]), number) for number in numbers)
        return min((one for one in compared if one[0] <= bound), default=None)

    def holds_like(self, values: Tensor, bound: float) -> Tensor:
        """Return which values (N, n) may be entries, by the sums of their numbers, their squares and their fourth powers.

        All that :meth:`find` finds are, but numbers above 1e150 that are stored narrower. Last digits may be others than alone.
        """
        n, totals = values.shape[1], values.sum(1)
        if (n, bound) not in self._moments:
            some = [number for _, number in self._by_size.get(n, [])]
            held = torch.stack([_moments(self.entries[number].flatten().nan_to_num(0.0, 0.0, 0.0)) for number in some], 1)
            allowed = torch.tensor([bound + UNITS[self.dtypes[number]][0] + SCREENED for number in some], dtype=torch.float64)
            reach = 1.01 * allowed * (n * held[1] / (1 - 2.2 * allowed).clamp(min=1e-300)).sqrt() + 1e-145  # of the sum alone
            self._moments[n, bound] = held, allowed, reach
        held, allowed, reach = self._moments[n, bound]
        found = ~((held[0] - totals[:, None]).abs() > reach).all(1) | ~totals.isfinite()
        if len(near := found.nonzero()[:, 0]):  # few
            sums, loose = _moments(values[near]), torch.tensor([[1.0], [2.2], [6.0]]) * allowed
            sizes = torch.stack([(sums[1] * n).sqrt(), *sums[1:]])
            far = (held[:, None] - sums[..., None]).abs() > loose[:, None] * sizes[..., None] + 1e-290
            found[near] = ~far.any(0).all(1)
        return found


def _sums(tensor: Tensor) -> tuple[float, float]:
    flat = tensor.flatten()
    total, squares = float(flat.sum()), float(flat.dot(flat))
    if math.isfinite(squares):
        return total, squares
    finite = flat.nan_to_num(0.0, 0.0, 0.0)
    return float(finite.sum()), float(finite.dot(finite))


def _moments(values: Tensor) -> Tensor:
    """Return the sums of values (..., n), of their squares and of their fourth powers."""
    squares = values.square()
    return torch.stack([values.sum(-1), squares.sum(-1), squares.square().sum(-1)])


def _slices(value: Tensor, axes: tuple[int, ...]) -> list[Tensor]:
    parts = [value]
    for axis in sorted(axes, reverse=True):
        parts = [piece for part in parts for piece in part.unbind(axis)]
    return parts


class _Collector(OperatorMode):
    """While entered, adds results to ``pool``: up to ``largest`` elements, and up to ``views`` of a weight.

    A tensor that is written part by part is added when it is next read as a whole.
    """

    def __init__(self, module: nn.Module, views: int, largest: int) -> None:
        super().__init__()
        held = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.is_floating_point()]
        self.pool, self.largest = Pool(), largest
        self.pool.narrow = bool(held) and held[0].dtype != torch.float64
        self.limits = {tensor.untyped_storage()._cdata: views for tensor in held}
        self._written: dict[int, UntypedStorage] = {}  # of which a part was written; held, so that no other gets its address

    def handle(self, call: OperatorCall) -> Any:
        for tensor in () if call.writes else call.inputs:
            storage = tensor.untyped_storage()
            if storage._cdata in self._written and 1 < tensor.numel() <= self.largest and _is_whole(tensor):
                del self._written[storage._cdata]
                self.pool.add(tensor)
        result = call.run()
        seen: set[tuple[int, int]] = set()
        if not call.writes:  # a view of a whole input adds nothing
            seen = {(tensor.untyped_storage()._cdata, tensor.numel()) for tensor in call.inputs}
        for tensor in tensors(result):
            storage = tensor.untyped_storage()._cdata
            largest = min(self.largest, self.limits.get(storage, self.largest))
            if tensor.is_floating_point() and 1 < tensor.numel() <= largest and (storage, tensor.numel()) not in seen:
                self.pool.narrow |= tensor.dtype != torch.float64
                self.pool.add(tensor)
            if call.writes and tensor.is_floating_point() and not _is_whole(tensor):
                self._written[storage] = tensor.untyped_storage()
        return result


@torch.no_grad()
def collect(module: nn.Module, ids: Tensor, config: GPT2Config) -> Pool:
    """Run ``module`` on (B, T) ``ids`` and keep its operators' results, up to the size of the widest activation."""
    width, inner = config.n_embd, config.inner
    largest = 4 * ids.numel() * max(inner, 3 * width, ids.size(1) * 64)
    collector = _Collector(module, VIEWS_PER_TOKEN * ids.numel() * width, largest)
    with plain_attention(), collector:
        output = logits_of(module(ids), ids, config.vocab_size)
    collector.pool.logits = output.detach().to("cpu", torch.float64)
    return collector.pool


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor has all elements of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
