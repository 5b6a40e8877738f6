"""Find queries and keys that were turned by rotary position embedding: by an angle that depends on the position alone.

Each pair of a head's numbers is read as one complex number, so that a turn is a factor of length one. All rows and heads share
the factor of a position and pair, which leaves too few free numbers for a chance fit. Shapes: q, k (B, H, T, K).
Source: Su et al., RoFormer, 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.recording.pool import Pool

LENGTH_SLACK = 1e-2  # of a factor's length: tables of sines and cosines may be rounded to bfloat16
MIN_TURN = 1e-3  # between the first and the last position; below it, nothing was turned
MIN_SAMPLES = 2  # rows times heads that share a factor


class Turned(NamedTuple):
    """The recorded ``value`` (B, H, T, K) of turned queries or keys, and the ``factors`` (T, K / 2 or fewer), complex."""

    value: Tensor
    factors: Tensor


def turned_pair(pool: Pool, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the recorded turned queries and keys, if both are turned by the same angles; else None."""
    for queries in _turned(pool, q):
        for keys in _turned(pool, k):
            if queries.factors.shape == keys.factors.shape and torch.allclose(queries.factors, keys.factors, atol=1e-4):
                return queries.value, keys.value
    return None


def _turned(pool: Pool, y: Tensor) -> Iterator[Turned]:
    """Yield the recorded tensors that are ``y`` turned."""
    batch, heads, tokens, size = y.shape
    if batch * heads < MIN_SAMPLES or tokens < 2:
        return
    lengths, bound = y.square().sum(-1), max(LENGTH_SLACK, pool.bound)
    for entry in pool.of_size(y.numel()):
        if not torch.isclose(entry.square().sum(), lengths.sum(), rtol=2 * bound):
            continue
        for value in _layouts(entry, batch, heads, tokens, size):
            if not torch.allclose(value.square().sum(-1), lengths, rtol=2 * bound):
                continue
            if (factors := rotation(y, value, pool.bound)) is not None:
                yield Turned(value, factors)
                break


def _layouts(entry: Tensor, batch: int, heads: int, tokens: int, size: int) -> Iterator[Tensor]:
    """Yield ``entry`` read as (B, H, T, K) from the usual orders of its axes."""
    yield entry.reshape(batch, heads, tokens, size)
    yield entry.reshape(batch, tokens, heads, size).transpose(1, 2)
    yield entry.reshape(tokens, batch, heads, size).permute(1, 2, 0, 3)
    yield entry.reshape(heads, batch, tokens, size).transpose(0, 1)


def rotation(y: Tensor, value: Tensor, bound: float) -> Tensor | None:
    """Return the factors (T, K / 2 or fewer) that turn ``y`` into ``value``, of length one; None if there are none."""
    changed = (y != value).flatten(0, 2).any(0).nonzero().flatten()
    if not len(changed):
        return None
    width = int(changed[-1]) + 1  # some turn only the first numbers of a head
    width += width % 2
    if width > y.shape[-1]:
        return None
    y, value = y[..., :width], value[..., :width]
    for before in _pairs(y):
        for after in _pairs(value):
            factors = (before.conj() * after).sum((0, 1)) / before.abs().square().sum((0, 1)).clamp(min=1e-300)
            if bool((after - before * factors).abs().square().mean() > bound**2 * after.abs().square().mean()):
                continue
            is_turn = bool(((factors.abs() - 1).abs() <= LENGTH_SLACK).all())
            if is_turn and float((factors[-1] - factors[0]).abs().max()) > MIN_TURN:
                return factors
    return None


def _pairs(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return (..., K) as complex (..., K / 2): neighbours as pairs, and the two halves as pairs."""
    first, second = y.chunk(2, -1)
    return torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2).contiguous()), torch.complex(
        first.contiguous(), second.contiguous()
    )
