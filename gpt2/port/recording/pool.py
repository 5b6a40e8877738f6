"""Keep every floating-point tensor of one forward pass, and search them by value, whatever their layout.

A value may be stored as (B, T, D) or (T, B, D), flattened, split into heads or transposed. So numbers are compared in sorted
order: whole, or slice by slice where a port has a tensor for each head, row or token. In float64 a match is no coincidence:
thousands of numbers do not agree to 1e-12 by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpt2.measure.metrics import worst_relative_error
from gpt2.port.recording.dispatch import Call, OperatorMode, tensors
from gpt2.port.recording.forward import logits_of, plain_attention

STRICT = 1e-9  # largest difference over the root mean square: rounding in float64 is 1e-15, which a softmax amplifies
LOOSE = 1e-5  # where the port computes something in float32
VIEWS_PER_TOKEN = 4  # views of a parameter are kept up to this many widths for each token: rows of an embedding, for example


class Match(NamedTuple):
    """Where a value is: the relative error, the entries that it consists of, and the axes along which it was sliced."""

    error: float
    entries: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass
class _Shelf:
    """All entries of one size: their numbers, and the sums and sums of squares of their finite elements."""

    numbers: list[int] = field(default_factory=list)
    sums: list[tuple[float, float]] = field(default_factory=list)
    table: Tensor | None = None

    def near(self, first: float, second: float, bound: float, n: int) -> list[int]:
        """Candidate entries: their sums agree within the tolerance."""
        if self.table is None:
            self.table = torch.tensor(self.sums, dtype=torch.float64)
        scale = max(math.sqrt(second / n), 1e-300)
        close = (self.table[:, 0] - first).abs() <= (bound + 1e-14) * scale * n
        close &= (self.table[:, 1] - second).abs() <= (2 * bound + 1e-14) * second + 1e-290
        return [self.numbers[i] for i in close.nonzero()[:, 0].tolist()]


class Pool:
    """The tensors, by size and sums.

    ``logits`` is what the forward returned, float64; ``narrow``, whether anything was computed in less than float64;
    ``operators``, the names of all operators that ran.
    """

    def __init__(self) -> None:
        self.entries: list[Tensor] = []
        self.logits = torch.empty(0)
        self.narrow = False
        self.operators: set[str] = set()
        self._shelves: dict[int, _Shelf] = {}
        self._sorted: dict[int, Tensor] = {}

    @classmethod
    def of(cls, arrays: Iterable[Tensor], logits: Tensor) -> Pool:
        """A pool of tensors of any origin: ``arrays`` in any order and layout, and ``logits`` (B, T, V)."""
        pool = cls()
        for tensor in (*arrays, logits):
            pool.narrow |= tensor.dtype != torch.float64
            pool.add(tensor)
        pool.logits = logits.detach().to("cpu", torch.float64)
        return pool

    def add(self, tensor: Tensor) -> None:
        """Keep a copy, in float64."""
        entry = tensor.detach().to("cpu", torch.float64, copy=True).contiguous()
        shelf = self._shelves.setdefault(entry.numel(), _Shelf())
        shelf.numbers.append(len(self.entries))
        shelf.sums.append(_sums(entry))
        shelf.table = None
        self.entries.append(entry)

    @property
    def bound(self) -> float:
        """The largest relative error of a match."""
        return LOOSE if self.narrow else STRICT

    def of_size(self, numel: int) -> list[Tensor]:
        """The entries of a size, in the order in which they were computed."""
        return [self.entries[i] for i in self._shelves[numel].numbers] if numel in self._shelves else []

    def find(self, value: Tensor, *axes: int) -> Match | None:
        """The best match of a value: whole, or else slice by slice, along one of the ``axes`` or all. None if there is none."""
        whole = self._find(value)
        if whole is not None:
            return Match(whole[0], (whole[1],), ())
        for cut in [*((axis,) for axis in axes), *([tuple(axes)] if len(axes) > 1 else [])]:
            matches = []
            if value.numel() // max(math.prod(value.shape[axis] for axis in cut), 1) not in self._shelves:
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
        """The port's own numbers, rounding included, in the layout of ``value``."""
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        for part, own, number in zip(_slices(value, match.axes), _slices(out, match.axes), match.entries, strict=True):
            taken = torch.empty(part.numel(), dtype=torch.float64)
            taken[part.flatten().argsort()] = self._in_order(number)
            own.copy_(taken.view(part.shape))
        return out

    def factors(self, value: Tensor, *axes: int) -> list[float]:
        """The factors f for which f times ``value``, or else f times its first slice along one of ``axes``, is an entry."""
        factors: list[float] = []
        for part in [value, *(next(iter(_slices(value, (axis,)))) for axis in axes)]:
            first, second = _sums(part)
            if part.numel() not in self._shelves or not second > 0:
                continue
            shelf = self._shelves[part.numel()]
            for number, (mine, squares) in zip(shelf.numbers, shelf.sums, strict=True):
                size = math.sqrt(squares / second) if squares < math.inf else 0.0
                for factor in (size, -size) if size > 0 else ():
                    scale = math.sqrt(squares / part.numel()) * part.numel()
                    if abs(mine - factor * first) > self.bound * scale or any(_same(factor, f) for f in factors):
                        continue
                    if _error(self._in_order(number), (factor * part).flatten().sort().values) <= self.bound:
                        factors.append(factor)
            if factors:
                break
        return factors

    def _find(self, value: Tensor) -> tuple[float, int] | None:
        shelf = self._shelves.get(value.numel())
        if shelf is None or value.numel() == 0:
            return None
        near = shelf.near(*_sums(value), self.bound, value.numel())
        if not near:
            return None
        mine = value.flatten().sort().values
        error, number = min((_error(self._in_order(number), mine), number) for number in near)
        return (error, number) if error <= self.bound else None

    def _in_order(self, number: int) -> Tensor:
        if number not in self._sorted:
            self._sorted[number] = self.entries[number].flatten().sort().values
        return self._sorted[number]


class _Collector(OperatorMode):
    """While entered, adds every operator's floating-point results to the pool."""

    def __init__(self, pool: Pool, weights: dict[int, int], largest: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.pool, self.weights, self.largest, self.dtype = pool, weights, largest, dtype

    def handle(self, call: Call) -> Any:
        result = call.run()
        self.pool.operators.add(call.name)
        seen: set[tuple[int, int]] = set()
        if not call.writes:  # a view of all of an input adds nothing
            seen = {(tensor.untyped_storage()._cdata, tensor.numel()) for tensor in call.inputs}
        for tensor in tensors(result):
            if not tensor.is_floating_point() or not 1 < tensor.numel() <= self.largest:
                continue
            storage = tensor.untyped_storage()._cdata
            if (storage, tensor.numel()) in seen or tensor.numel() > self.weights.get(storage, self.largest):
                continue
            self.pool.narrow |= tensor.dtype != self.dtype and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
            self.pool.add(tensor)
        return result


@torch.no_grad()
def collect(module: nn.Module, ids: Tensor, width: int, inner: int) -> Pool:
    """Run ``module`` as it is on (B, T) ``ids``, and keep its operators' results, up to the size of the widest activation.

    ``width`` and ``inner`` are those of the stream and of the feed-forward. Fused attention runs as single operators.

    Raises:
        whatever the module raises, and ValueError where its output holds no logits.
    """
    pool = Pool()
    held = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.is_floating_point()]
    dtype = held[0].dtype if held else torch.float64
    pool.narrow = dtype != torch.float64
    views = VIEWS_PER_TOKEN * ids.numel() * width
    weights = {tensor.untyped_storage()._cdata: views for tensor in held}
    largest = 4 * ids.numel() * max(inner, 3 * width, ids.size(1) * 64)
    with plain_attention(), _Collector(pool, weights, largest, dtype):
        output = logits_of(module(ids))
    pool.logits = output.detach().to("cpu", torch.float64)
    return pool


def _sums(tensor: Tensor) -> tuple[float, float]:
    finite = tensor.nan_to_num(0.0, 0.0, 0.0)
    return float(finite.sum()), float(finite.square().sum())


def _error(a: Tensor, b: Tensor) -> float:
    """The relative error of two sorted tensors; a NaN equals a NaN here, because a recorded tensor may hold some."""
    missing = b.isnan()
    if not missing.any():
        return worst_relative_error(a, b)
    same_places = torch.equal(missing, a.isnan()) and not missing.all()
    return worst_relative_error(a[~missing], b[~missing]) if same_places else math.inf


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-7 * max(abs(a), abs(b))


def _slices(value: Tensor, axes: tuple[int, ...]) -> list[Tensor]:
    """Views of a value, one for each index along the axes."""
    parts = [value]
    for axis in sorted(axes, reverse=True):
        parts = [piece for part in parts for piece in part.unbind(axis)]
    return parts
