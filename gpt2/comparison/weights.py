"""How far two models' weights are apart: tensor by tensor, straight from disk, never more than one pair in memory.

All sums run in float64 over a few million entries at a time. A difference of low rank is a LoRA: its singular values come from
the smaller Gram matrix, and those that rounding alone could have made are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1 << 21  # entries compared at a time

Read = Callable[[str], Tensor]  # parameter's name -> its tensor, of any floating dtype


@dataclass(frozen=True)
class TensorChange:
    """One parameter in both models; "change" is from a to b.

    ``distance`` is the Frobenius norm of the change over that of a. ``unchanged`` is the fraction of entries that are equal.
    ``ulp_max`` and ``ulp_mean`` count representable numbers between the two values, in the coarser of the two dtypes.
    ``effective_rank`` of a matrix's change is the exponential of the entropy of its normalised singular values (Roy and
    Vetterli, 2007), and ``rank`` the number of those that rounding b could not have made; both None for vectors and
    where the change is not finite.
    """

    name: str
    family: str  # "h.{}.attn.c_attn.weight"
    layer: int | None
    shape: tuple[int, ...]
    norm_a: float
    norm_b: float
    distance: float
    max_abs: float
    cosine: float
    unchanged: float
    ulp_max: int
    ulp_mean: float
    rank: int | None
    effective_rank: float | None

    @property
    def equal(self) -> bool:
        return self.unchanged == 1.0

    @property
    def full_rank(self) -> int:
        return min(self.shape)


@dataclass(frozen=True)
class FamilyChange:
    """The same tensor of all layers taken together."""

    family: str
    tensors: int
    entries: int
    distance: float
    max_abs: float
    cosine: float
    unchanged: float


@dataclass(frozen=True)
class WeightChanges:
    """Every parameter of two models of one shape, in the order of the forward pass."""

    tensors: tuple[TensorChange, ...]
    families: tuple[FamilyChange, ...]
    total: FamilyChange

    def most_changed(self, count: int = 10) -> tuple[TensorChange, ...]:
        """The tensors that moved farthest for their size, without those that did not move."""
        moved = [tensor for tensor in self.tensors if not tensor.equal]
        return tuple(sorted(moved, key=lambda tensor: -tensor.distance)[:count])

    @property
    def same_numbers(self) -> bool:
        """Whether both hold the same weights, up to rounding to the coarser dtype."""
        return all(tensor.ulp_max == 0 for tensor in self.tensors)

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Tensors seen to be equal in every entry."""
        return tuple(tensor.name for tensor in self.tensors if tensor.equal)


def compare_weights(
    names: Iterable[tuple[str, str, int | None]],
    a: Read,
    b: Read,
    *,
    progress: Callable[[str], None] = lambda what: None,
) -> WeightChanges:
    """Read each parameter of both models once; ``names`` are (parameter, family, layer)."""
    tensors, sums = [], {}
    for name, family, layer in names:
        progress(f"weights: {name}")
        change, total = _compare(name, family, layer, a(name), b(name))
        tensors.append(change)
        sums.setdefault(family, []).append(total)
    families = tuple(_together(family, totals) for family, totals in sums.items())
    return WeightChanges(tuple(tensors), families, _together("all", [total for totals in sums.values() for total in totals]))


@dataclass
class _Sums:
    """What a tensor's figures are made of, summed over its entries."""

    entries: int = 0
    a: float = 0.0  # squares
    b: float = 0.0
    product: float = 0.0
    difference: float = 0.0
    max_abs: float = 0.0
    equal: int = 0
    ulp_max: int = 0
    ulp_sum: int = 0

    @property
    def distance(self) -> float:
        if self.difference == 0:
            return 0.0
        return math.sqrt(self.difference / self.a) if self.a else math.inf

    @property
    def cosine(self) -> float:
        if self.a == 0 or self.b == 0:
            return 1.0 if self.a == self.b else 0.0
        return max(min(self.product / math.sqrt(self.a * self.b), 1.0), -1.0)  # in this order NaN stays NaN


def _compare(name: str, family: str, layer: int | None, a: Tensor, b: Tensor) -> tuple[TensorChange, _Sums]:
    if a.shape != b.shape:
        raise ValueError(f"{name} is {tuple(a.shape)} in one and {tuple(b.shape)} in the other")
    coarser = a.dtype if torch.finfo(a.dtype).eps >= torch.finfo(b.dtype).eps else b.dtype
    total = _Sums(a.numel())
    for one, other in _pieces(a, b):
        wide, wide_other = one.double(), other.double()
        difference = wide_other - wide
        total.a += float(wide.square().sum())
        total.b += float(wide_other.square().sum())
        total.product += float((wide * wide_other).sum())
        total.difference += float(difference.square().sum())
        total.max_abs = max(total.max_abs, float(difference.abs().nan_to_num(nan=math.inf).max()))
        total.equal += int((wide == wide_other).sum())
        apart = ulps(one.to(coarser), other.to(coarser))
        total.ulp_max = max(total.ulp_max, int(apart.max()))
        total.ulp_sum += int(apart.sum())
    rank = effective = None
    if a.ndim == 2 and math.isfinite(total.difference):
        spread = math.sqrt(total.b / a.numel()) * torch.finfo(coarser).eps / 2
        # The largest singular value of a matrix of independent errors of that size (Bai and Yin, 1993).
        noise = spread * (math.sqrt(a.shape[0]) + math.sqrt(a.shape[1]))
        values = singular_values(a, b) if total.difference > 0 else torch.zeros(min(a.shape), dtype=torch.float64)
        # What the eigenvalues of a Gram matrix cannot tell from zero.
        lost = float(values[0]) * math.sqrt(torch.finfo(torch.float64).eps * len(values))
        rank, effective = int((values > max(noise, lost)).sum()), effective_rank(values)
    change = TensorChange(
        name=name,
        family=family,
        layer=layer,
        shape=tuple(a.shape),
        norm_a=math.sqrt(total.a),
        norm_b=math.sqrt(total.b),
        distance=total.distance,
        max_abs=total.max_abs,
        cosine=total.cosine,
        unchanged=total.equal / a.numel(),
        ulp_max=total.ulp_max,
        ulp_mean=total.ulp_sum / a.numel(),
        rank=rank,
        effective_rank=effective,
    )
    return change, total


def _pieces(a: Tensor, b: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Both tensors, some rows at a time, however they lie in memory."""
    rows = max(1, PIECE // max(1, a[0].numel())) if a.ndim > 1 else PIECE
    return zip(a.split(rows), b.split(rows), strict=True)


def _together(family: str, sums: list[_Sums]) -> FamilyChange:
    total = _Sums()
    for one in sums:
        for field in ("entries", "a", "b", "product", "difference", "equal"):
            setattr(total, field, getattr(total, field) + getattr(one, field))
        total.max_abs = max(total.max_abs, one.max_abs)
    return FamilyChange(
        family, len(sums), total.entries, total.distance, total.max_abs, total.cosine, total.equal / max(1, total.entries)
    )


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many steps of representable numbers lie between the entries of two tensors of one dtype; int64, 0 for 0.0 and -0.0.

    NaNs are at no distance from each other and at the largest from everything else.
    """
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    lowest = torch.iinfo(integer).min

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(integer).long()
        return torch.where(bits < 0, lowest - bits, bits)

    apart = (ordered(a) - ordered(b)).abs()
    nan_a, nan_b = a.isnan(), b.isnan()
    return apart.masked_fill(nan_a & nan_b, 0).masked_fill(nan_a ^ nan_b, torch.iinfo(integer).max)


def singular_values(a: Tensor, b: Tensor) -> Tensor:
    """Of ``b - a``, both (m, n): min(m, n) values, float64, largest first.

    From the eigenvalues of the smaller Gram matrix, summed piece by piece: values below 1e-7 of the largest are lost, and weights
    in float32 hardly hold them either.
    """
    if a.shape[0] < a.shape[1]:
        a, b = a.t(), b.t()
    gram = torch.zeros(a.shape[1], a.shape[1], dtype=torch.float64)
    for one, other in _pieces(a, b):
        difference = other.double() - one.double()
        gram.addmm_(difference.t(), difference)
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of singular values normalised to sum 1: 1 for rank one, n for n equal ones, 0 for no change."""
    total = values.sum()
    if total == 0:
        return 0.0
    share = values / total
    return float(torch.special.entr(share).sum().exp())
