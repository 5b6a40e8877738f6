"""Compare two models tensor by tensor: their weights, read from disk, and their activations on one text.

One pair of weights, or one block of activations of each, is in memory at a time. All sums are in float64. The rank of a
difference reveals a LoRA: singular values come from the smaller Gram matrix, without those that rounding alone could produce.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpt2.checkpoint.gguf_writer import TYPES, as_stored
from gpt2.checkpoint.keys import layer
from gpt2.comparison.sides.side import Read
from gpt2.errors import InputError
from gpt2.int8 import rounded_parameter
from gpt2.measure.metrics import Progress, cosine, max_abs, norms, relative_error, silent
from gpt2.measure.tracing import Recorded, layer_of

ROUNDINGS: dict[str, Callable[[str, Tensor], Tensor]] = {  # type -> a parameter by its name, rounded to the type, in float32
    **{type: partial(as_stored, type=type) for type in TYPES},
    "int8": rounded_parameter,
    "float16": lambda _, tensor: tensor.half().float(),
    "bfloat16": lambda _, tensor: tensor.bfloat16().float(),
}
CHUNK = 1 << 18  # entries compared at a time: their float64 copies stay in the cache
Blocks = Callable[[Tensor], Iterator[Recorded]]  # ids (1, T) -> activations, one block at a time


@dataclass(frozen=True)
class TensorChange:
    """The change of one parameter from a to b.

    ``distance`` is the Frobenius norm of the change over that of a. ``unchanged`` is the fraction of equal entries. ``rounded``
    says whether both are equal in the coarser dtype. ``rank`` counts the singular values of a matrix's change that are too large
    for rounding of b; it is None for vectors and for a change that is not finite.
    """

    name: str
    family: str  # "h.{}.attn.c_attn.weight"
    layer: int | None
    shape: tuple[int, ...]
    distance: float
    max_abs: float
    cosine: float
    unchanged: float
    rounded: bool
    rank: int | None

    @property
    def moved(self) -> str:
        """``distance`` in words."""
        return "from zero" if self.distance == math.inf else f"{self.distance:.2%}"  # biases are initialised to zero


@dataclass(frozen=True)
class Total:
    """All parameters together: the norm of the change over that of a, and the fraction of equal entries."""

    distance: float
    unchanged: float


@dataclass(frozen=True)
class WeightChanges:
    """Every parameter of two models of one shape, in the order of the forward pass."""

    tensors: tuple[TensorChange, ...]
    total: Total
    rounded_to: str = ""  # the type to which b's are a's, rounded, where that alone explains every change
    nearly: str = ""  # else the type to which at least half of the tensors that changed are a's, rounded
    beyond: tuple[str, ...] = ()  # then the tensors that this type does not explain
    rows: int = 0  # of the vocabulary that b has more than a; those that both have are compared

    def most_changed(self, count: int = 10) -> tuple[TensorChange, ...]:
        """Return the tensors with the largest relative change, without unchanged ones."""
        moved = [tensor for tensor in self.tensors if tensor.unchanged < 1]
        return tuple(sorted(moved, key=lambda tensor: -tensor.distance)[:count])

    @property
    def beyond_text(self) -> str:
        """The tensors that ``nearly`` does not explain, in words."""
        more = len(self.beyond) - 1
        return f"{self.beyond[0]}{f' and {more} more' if more else ''}"

    @property
    def rows_text(self) -> str:
        """The rows that only one has, in words; "" where there are none."""
        return f"{abs(self.rows):,} rows {'more' if self.rows > 0 else 'fewer'}" if self.rows else ""

    @property
    def same_numbers(self) -> bool:
        """Whether both have the same weights, up to rounding to the coarser dtype."""
        return all(tensor.rounded for tensor in self.tensors)

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Names of the tensors that are equal in every entry."""
        return tuple(tensor.name for tensor in self.tensors if tensor.unchanged == 1)

    def summary(self, dtypes: tuple[str, str], beside: str) -> tuple[str, str, str]:
        """Say in a name, a figure and a remark what changed; ``beside`` says what else makes b another model than a."""
        moved, most = f"{self.total.distance:.2%}", self.most_changed(1)
        if not most and self.rows:
            return "weights", self.rows_text, f"{len(self.tensors)} tensors equal in the shared rows"
        if not most:
            return "weights", "equal", f"all {len(self.tensors)} tensors, every entry"
        beside = f"{self.rows_text}, and {beside}" if self.rows else beside
        if self.same_numbers:
            coarser = max(dtypes, key=["float64", "float32", "float16", "bfloat16", "int8"].index)
            return "weights", "the same", f"rounded to {coarser}, and {beside}"
        if self.rounded_to:
            return "weights", f"a's, in {self.rounded_to}", f"which moves them by {moved}, and {beside}"
        if self.nearly:
            return "weights", f"a's, in {self.nearly}", f"but not {self.beyond_text}: more than rounding"
        kept = f"{len(self.unchanged)} tensors unchanged" + f"; {self.rows_text}" * bool(self.rows)
        return "weights moved", moved, f"most: {most[0].name}, {most[0].moved}; {kept}"


def compare_weights(names: Iterable[str], a: Read, b: Read, *, progress: Progress = silent) -> WeightChanges:
    """Read each parameter of both models once."""
    changes, total = [], torch.zeros(6, dtype=torch.float64)
    for name in names:
        progress(f"weights: {name}")
        change, sums = _compare(name, a(name), b(name))
        changes.append(change)
        total += sums
    moved, _, unchanged = _figures(total)
    return WeightChanges(tuple(changes), Total(moved, unchanged))


def distance(names: Iterable[str], a: Read, b: Read, *, progress: Progress = silent) -> float:
    """Return the norm of all parameters' change over that of a, and nothing else: a tenth of the time."""
    change = norm = 0.0
    for name in names:
        progress(f"weights: {name}")
        moved, size = norms(b(name), a(name))
        change, norm = change + moved * moved, norm + size * size
    return _ratio(change, norm)


def _ratio(change: float, norm: float) -> float:
    """Return the root of a quotient of sums of squares: 0 for no change, infinite for a change of zeros."""
    return math.sqrt(change / norm) if norm and change else math.inf if change else 0.0


def _figures(sums: Tensor) -> tuple[float, float, float]:
    """Return distance, cosine, and the fraction of equal entries."""
    entries, a, b, change, product, equal = sums.tolist()
    return _ratio(change, a), cosine(product, a, b), equal / max(1, entries)


def _compare(name: str, a: Tensor, b: Tensor) -> tuple[TensorChange, Tensor]:
    """Compare a parameter; also return what adds up (6,): entries, squares of a, of b, of the change, products, equal entries."""
    coarser = a.dtype if torch.finfo(a.dtype).eps >= torch.finfo(b.dtype).eps else b.dtype
    total, largest, rounded = torch.zeros(6, dtype=torch.float64), 0.0, True
    for chunk_a, chunk_b in _chunks(a, b):
        rounded = rounded and torch.equal(chunk_a.to(coarser), chunk_b.to(coarser))
        x, y = chunk_a.double(), chunk_b.double()
        change = y - x
        sums = [float(each.sum()) for each in (x.square(), y.square(), change.square(), x * y, x == y)]
        total += torch.tensor([x.numel(), *sums], dtype=torch.float64)
        largest = max(largest, float(change.abs().nan_to_num(nan=math.inf).max()))
    _, _, squares_b, moved, *_ = total.tolist()
    rank = _rank(a, b, moved, math.sqrt(squares_b / a.numel()) * torch.finfo(coarser).eps / 2) if a.ndim == 2 else None
    distance, angle, unchanged = _figures(total)
    known = name, re.sub(r"^h\.\d+", "h.{}", name), layer(name), tuple(a.shape)
    return TensorChange(*known, distance, largest, angle, unchanged, rounded, rank), total


def _rank(a: Tensor, b: Tensor, change: float, error: float) -> int | None:
    """Return the rank of a matrix's change, whose sum of squares is ``change``, beyond rounding errors of the size ``error``."""
    if change == 0 or not math.isfinite(change):
        return 0 if change == 0 else None
    values = singular_values(a, b)
    # The largest singular value of a matrix of independent errors of that size (Bai and Yin, 1993).
    noise = error * (math.sqrt(a.shape[0]) + math.sqrt(a.shape[1]))
    # Below this, eigenvalues of a Gram matrix in float64 are rounding errors.
    resolution = float(values[0]) * math.sqrt(torch.finfo(torch.float64).eps * len(values))
    return int((values > max(noise, resolution)).sum())


def _chunks(a: Tensor, b: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield corresponding parts of both tensors, some rows at a time, for any memory layout."""
    rows = max(1, CHUNK // max(1, a[0].numel())) if a.ndim > 1 else CHUNK
    return zip(a.split(rows), b.split(rows), strict=True)


def singular_values(a: Tensor, b: Tensor) -> Tensor:
    """Return the singular values of ``b - a`` from the smaller Gram matrix; those below 1e-7 of the largest are lost."""
    if a.shape[0] < a.shape[1]:
        a, b = a.t(), b.t()
    gram = torch.zeros(a.shape[1], a.shape[1], dtype=torch.float64)
    for chunk_a, chunk_b in _chunks(a, b):
        difference = chunk_b.double() - chunk_a.double()
        gram.addmm_(difference.t(), difference)
    eigenvalues: Tensor = torch.linalg.eigvalsh(gram)
    return eigenvalues.clamp(min=0).sqrt().flip(0)


def quantisation(a: Read, b: Read, changed: Collection[str]) -> str | None:
    """Return the type to which b's parameters are a's, rounded, or None: of a GGUF file, "int8", or a dtype of all tensors."""
    types = (type for type in ROUNDINGS if next(beyond_rounding(a, b, changed, type), None) is None)
    return next(types, None) if changed else None


def beyond_rounding(a: Read, b: Read, changed: Iterable[str], type: str) -> Iterator[str]:
    """Yield the parameters of b that are not a's, rounded to a type of ``ROUNDINGS``."""
    return (name for name in changed if not torch.equal(ROUNDINGS[type](name, a(name)), b(name).float()))


@dataclass(frozen=True)
class ActivationChange:
    """The difference of b from a at one recorded point.

    ``error`` is the Frobenius norm of the difference over that of a; ``sqnr`` is the same in decibels (-20 log10), infinite if
    nothing differs. ``cosine`` is of the flattened activations.
    """

    point: str
    layer: int | None
    error: float
    max_abs: float
    sqnr: float
    cosine: float


@dataclass(frozen=True)
class Activations:
    """Every point in the order of computation, on ``tokens`` tokens of the text."""

    tokens: int
    threshold: float
    points: tuple[ActivationChange, ...]

    @property
    def first_past(self) -> ActivationChange | None:
        """The first point whose error is above the threshold."""
        return next((point for point in self.points if not point.error <= self.threshold), None)


def compare_activations(a: Blocks, b: Blocks, ids: Tensor, threshold: float, progress: Progress = silent) -> Activations:
    """Compare two models of one shape, given by the functions that trace them, over (1, T) ``ids``, block by block."""
    points = []
    for block_a, block_b in zip(a(ids), b(ids), strict=True):
        progress(f"activations: {next(reversed(block_a))}")
        points += [_change(name, block_a[name], block_b[name]) for name in block_a if name in block_b]
    return Activations(ids.numel(), threshold, tuple(points))


def _change(name: str, a: Tensor, b: Tensor) -> ActivationChange:
    if name == "logits":
        width = min(a.size(-1), b.size(-1))  # the vocabularies may be padded to different lengths
        a, b = a[..., :width], b[..., :width]
    if a.shape != b.shape:
        raise InputError(f"activations: {name} is {tuple(a.shape)} in one and {tuple(b.shape)} in the other; save it again")
    error = relative_error(b, a)
    sqnr = math.inf if error == 0 else -20 * math.log10(error) if math.isfinite(error) else -math.inf
    x, y = a.double().flatten(), b.double().flatten()
    angle = cosine(float(x @ y), float(x @ x), float(y @ y))
    return ActivationChange(name, layer_of(name), error, max_abs(a, b), sqnr, angle)
