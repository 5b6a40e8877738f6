"""KL divergence of one model's predictions from others', in float32 where that loses no accuracy.

With p the probabilities of one model, and y the other's logits minus its own, less their mean under p, the other's probabilities
are p exp(y) over their sum, so that::

    KL(p||q) = log E[exp(y)] = log1p(E[exp(y) - 1 - y]),    E under p

No term is negative, and a relative error of 1e-7 of each is one of the divergence: so all of it is float32, the sums too, which
torch adds up in a tree. :mod:`gpt2.measure.per_token` measures more of a pair, all in float64, and takes four times as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpt2.measure.metrics import log_probabilities
from gpt2.measure.per_token import exp_into, in_shares

STEP = 1 << 18  # logits at a time: numpy's calls take little beside them, and they stay in the cache
SERIES = 1.0  # up to this |y| the terms are a power series
UNDERFLOW = 40.0  # beyond it a token that is nothing in p may count in q
SMALL = 1e-3  # nats, below which float32 differences of exp(y) and y are too coarse
FAR = 16.0  # times y's spread: differences of logits whose mean is further from 0 are taken in float64

Array = np.ndarray[Any, Any]


class Divergences(NamedTuple):
    """Figures of R tokens and n models beside one, float64."""

    kl: Tensor  # (R, n): KL(one||other), nats
    log_ratio: Tensor  # (R, n): log of the sum of the other's exponentials, minus that of the one's
    top: Tensor  # (R, n) int64: the other's likeliest tokens; among equals, the lower id


def log_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of each row's sum of exponentials (R,), in float64, and its likeliest token (R,), of logits (R, V)."""
    sums, top = in_shares(lambda mine: _log_sums(logits[mine]), logits)
    return sums, top


def _log_sums(logits: Tensor) -> list[Tensor]:
    step = max(1, min(len(logits), STEP // logits.size(1)))
    x = torch.empty(step, logits.size(1), dtype=torch.float64)
    sums, top = torch.empty(len(logits), dtype=torch.float64), torch.empty(len(logits), dtype=torch.int64)
    for start in range(0, len(logits), step):
        part = logits[start : start + step]
        here = slice(start, start + len(part))
        top[here] = torch.from_numpy(_wide(part, torch.float32).argmax(1))  # torch takes eight times as long
        largest = part.gather(1, top[here, None]).double()
        shifted = x[: len(part)].copy_(part).sub_(largest)
        sums[here] = exp_into(shifted, shifted).sum(1).log_() + largest[:, 0]
    return [sums, top]


def divergences(logits: Tensor, others: Sequence[Tensor]) -> Divergences:
    """Measure others' logits (R, V) against a model's, of any float dtypes.

    A divergence is exactly 0 for bitwise equal logits and never negative. Its error is at most 3e-6 of it, or 1e-15 nats; that
    of a ``log_ratio`` is at most 1e-6 of the divergence, or of its root if that is larger. A logit of -inf is a probability of
    0, so a divergence may be infinite; NaN logits make all of a token's figures NaN.
    """
    return Divergences(*in_shares(lambda mine: _divergences(logits[mine], [other[mine] for other in others]), logits))


def _divergences(logits: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    dtype = reduce(torch.promote_types, (other.dtype for other in others), torch.promote_types(logits.dtype, torch.float32))
    (rows, vocab), step = logits.shape, max(1, min(len(logits), STEP // logits.size(1)))
    # Allocated once: allocating in each small step would cost more than the arithmetic.
    buffers = torch.empty(3, step, vocab, dtype=dtype).numpy()
    kl, log_ratio, top = (np.empty((rows, len(others)), dtype) for dtype in (float, float, np.int64))
    again = np.zeros(kl.shape, bool)
    with np.errstate(all="ignore"):  # -inf and NaN
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            p, *work = buffers[:, : part.stop - start]
            x = _wide(logits[part], dtype)
            largest = x.max(1)
            np.exp(np.subtract(x, largest[:, None], out=p), out=p)
            total = _sums(p)
            for j, other in enumerate(others):
                z = _wide(other[part], dtype)
                top[part, j] = z.argmax(1)
                shift = z[np.arange(len(z)), top[part, j]] - largest
                found, moved, rough = _beside(x, z, shift, p, total, *work)
                if (moved**2 > FAR**2 * 2 * found).any():
                    found, moved, rough = _beside(x.astype(float), z, shift, p, total, *work)
                kl[part, j], log_ratio[part, j], again[part, j] = found, moved + found, rough
    for row, j in np.argwhere(again).tolist():
        pair = torch.stack((logits[row].double(), others[j][row].double()))
        kl[row, j] = _exactly(*log_probabilities(pair))
        before, after = pair.logsumexp(1).tolist()
        log_ratio[row, j] = after - before
    return [torch.from_numpy(kl.clip(min=0)), torch.from_numpy(log_ratio), torch.from_numpy(top)]


def _beside(x: Array, z: Array, shift: Array, p: Array, total: Array, y: Array, terms: Array) -> tuple[Array, Array, Array]:
    """Return KL, the mean of ``z`` less ``x`` under p, and whether float64 must be used instead, of each row (R,).

    ``p`` (R, V) add up to ``total``; ``shift`` is roughly the mean; ``y`` and ``terms`` are overwritten.
    """
    difference = np.subtract(z, x, out=y) if x.dtype == y.dtype else z - x
    np.subtract(difference, shift[:, None], out=y, casting="same_kind")
    mean = (_sums(np.multiply(p, y, out=terms)) / total).astype(y.dtype)
    y -= mean[:, None]
    furthest = np.maximum(y.max(1), -y.min(1))
    coarse = _terms(y, float(furthest.max()), out=terms)
    kl = np.log1p(_sums(np.multiply(terms, p, out=terms)) / total)
    again = ~(np.isfinite(kl) & (furthest <= UNDERFLOW)) | (coarse & (kl < SMALL))
    return kl, shift.astype(float) + mean, again


def _terms(y: Array, furthest: float, out: Array) -> bool:
    """Write exp(y) - 1 - y into ``out``, no |y| being above ``furthest``; return whether rounding is coarse where y is small.

    In float32 up to :data:`SERIES` it is y^2 (1/2 + y/6 + y^2/24 ...), with the terms that an error of 6e-7 needs.
    """
    if y.dtype != np.float32 or not furthest <= SERIES:
        np.expm1(y, out=out)
        out -= y
        return y.dtype == np.float32
    order = next(k for k in range(3, 11) if furthest ** (k - 2) / math.factorial(k) < 3e-7)
    of, to = torch.from_numpy(y), torch.from_numpy(out).fill_(1 / math.factorial(order - 1))
    for k in range(order - 2, 1, -1):
        torch.addcmul(torch.tensor(1 / math.factorial(k)), to, of, out=to)
    out *= y
    out *= y
    return False


def _sums(values: Array) -> Array:
    """Return each row's sum as float64; torch adds in a tree, as numpy does, in half of the time."""
    return torch.from_numpy(values).sum(1).numpy().astype(float)


def _wide(logits: Tensor, dtype: torch.dtype) -> Array:
    """Return logits as an array of at least ``dtype``, without a copy where they are that."""
    return logits.to(torch.promote_types(logits.dtype, dtype)).numpy()


def _exactly(logp: Tensor, other: Tensor) -> float:
    """Return the divergence of log-probabilities (V,) in float64: 0 log 0 is 0, and p log(p / 0) is infinite."""
    p = logp.exp()
    return float(torch.where(p == 0, 0, p * (logp - other)).sum())
