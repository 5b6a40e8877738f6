"""Sort out by sums alone which of many attention weights may have made a recorded tensor.

The sum and the sum of squares of ``W @ V`` follow from V's row sums and from ``V @ V.T``, which hundreds of weights W share. Only
those whose sums are recorded are worth a product.

Shapes: weights (N, B, H, T, S), one for each of N hypotheses; values (B, H, S, K).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from gpt2.port.recording.pool import Pool

MAX_ELEMENTS = 2**24  # of all weights together
Cuts = tuple[tuple[int, ...], ...]  # sets of axes along which a port may have sliced the result
HEAD_CUTS: Cuts = ((), (1,), (0,), (2,), (1, 0, 2))  # of (B, H, T, K)
STREAM_CUTS: Cuts = ((), (0,), (1,), (0, 1))  # of (B, T, D)


def stacked(weights: Iterable[Tensor]) -> Tensor:
    """Return hypotheses (B, H, T, S) as one tensor, without the last ones if they would take too much memory."""
    kept: list[Tensor] = []
    for one in weights:
        kept.append(one)
        if len(kept) * one.numel() > MAX_ELEMENTS:
            break
    rows = torch.stack(kept)
    return rows.masked_fill_(~rows.isfinite().all(-1, keepdim=True), 0.0)  # the pool's sums leave such rows out as well


class Mixture:
    """Values (B, H, S, K) that weights may mix: what their products sum to."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.sums = values, values.sum(-1)[..., None]

    @cached_property
    def squares(self) -> Tensor:
        """Products (B, H, S, S): most weights are sorted out by the sums, and need none."""
        return self.values @ self.values.mT

    def recorded(self, pool: Pool, weights: Tensor) -> list[int]:
        """Return the numbers of those weights whose product with the values may be recorded, whole or sliced."""
        sums = (weights @ self.sums)[..., 0]
        squares = (weights @ self.squares).mul_(weights).sum(-1)
        return _near(pool, sums, squares, self.values.shape[-1], HEAD_CUTS)


def recorded_products(pool: Pool, weights: Tensor, mixtures: Sequence[Mixture]) -> list[tuple[int, int]]:
    """Return the numbers of those weights, each with that of a mixture, whose product may be recorded, in this order.

    The mixtures have one shape. Sums are compared first, for all mixtures in one product, and squares where a sum is recorded.
    """
    width = mixtures[0].values.shape[-1]
    sums = weights @ torch.cat([one.sums for one in mixtures], -1)  # (N, B, H, T, mixtures)
    near = torch.zeros(len(weights), len(mixtures), dtype=torch.bool)
    for cut in HEAD_CUTS:
        first = tuple(0 if axis in cut else slice(None) for axis in range(3))
        some = sums[(slice(None), *first)].reshape(len(weights), -1, len(mixtures))
        near |= pool.may_be_near(some.shape[1] * width, some.sum(1).flatten()).any(1).view(near.shape)
    found = []
    for rank, mixture in enumerate(mixtures):
        numbers = near[:, rank].nonzero()[:, 0].tolist()
        if numbers:
            found += [(numbers[place], rank) for place in mixture.recorded(pool, weights[numbers])]
    return sorted(found)


class Projection:
    """Values (B, H, S, K) and an output projection (H * K, D): what the projection of a mixture sums to."""

    def __init__(self, values: Tensor, weight: Tensor) -> None:
        batch, heads, tokens, _ = values.shape
        self.shape = batch, heads * tokens
        through = (values @ weight.view(heads, -1, weight.shape[-1])).reshape(batch, heads * tokens, -1)
        self.through, self.squares = through, through @ through.mT

    def recorded(self, pool: Pool, weights: Tensor, bias: Tensor) -> list[int]:
        """Return the numbers of those weights whose mixture, projected and with ``bias`` (D,), may be recorded."""
        rows = weights.transpose(2, 3).flatten(3)  # (N, B, T, H * S)
        sums = (rows @ self.through.sum(-1)[..., None])[..., 0] + bias.sum()
        numbers = _may_be_near(pool, sums, len(bias), STREAM_CUTS).nonzero()[:, 0]
        if not len(numbers):
            return []
        rows, sums = rows[numbers], sums[numbers]
        crossed = (rows @ (self.through @ bias)[..., None])[..., 0]
        squares = (rows @ self.squares).mul_(rows).sum(-1) + 2 * crossed + bias.square().sum()
        return numbers[_near(pool, sums, squares, len(bias), STREAM_CUTS)].tolist()


def _may_be_near(pool: Pool, sums: Tensor, width: int, cuts: Cuts) -> Tensor:
    """Return (N,) which of N results may be recorded, from the sums (N, ...) of their rows of ``width`` elements alone."""
    near = torch.zeros(len(sums), dtype=torch.bool)
    for cut in cuts:
        first = tuple(0 if axis in cut else slice(None) for axis in range(sums.ndim - 1))
        some = sums[(slice(None), *first)].reshape(len(sums), -1)
        near |= pool.may_be_near(some.shape[1] * width, some.sum(1)).any(1)
    return near


def _near(pool: Pool, sums: Tensor, squares: Tensor, width: int, cuts: Cuts) -> list[int]:
    """Return which of N results may be recorded, from the sums and squares (N, ...) of their rows of ``width`` elements."""
    near = torch.zeros(len(sums), dtype=torch.bool)
    for cut in cuts:
        first = tuple(0 if axis in cut else slice(None) for axis in range(sums.ndim - 1))
        some, powers = (rows[(slice(None), *first)].reshape(len(rows), -1) for rows in (sums, squares))
        near |= pool.near(some.shape[1] * width, some.sum(1), powers.sum(1)).any(1)
    return near.nonzero()[:, 0].tolist()
