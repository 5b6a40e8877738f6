"""KL divergence between all pairs of several models' predictions, from one pass over their logits.

:mod:`gpt2.measure.per_token` measures more of one pair. Here each model's exponentials are computed once, and a pair costs a
quarter of what it costs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.measure.metrics import log_probabilities
from gpt2.measure.per_token import CACHED, exp_into, in_shares


class Pairwise(NamedTuple):
    """Figures of R tokens and n models, float64, nats."""

    kl: Tensor  # (R, n, n): KL(i||j)
    log_sums: Tensor  # (R, n): the log of the sum of all exponentials, so a log-probability is the logit minus this
    top: Tensor  # (R, n) int64: the likeliest tokens; among equals, the lower id


def pairwise(logits: Sequence[Tensor], *, from_first: bool = False) -> Pairwise:
    """Measure n logits (R, V) of any float dtype, over all pairs; ``from_first`` fills only the row KL(0||j).

    A divergence is exactly 0 for bitwise equal logits and never negative. With x the logits minus their maximum, P = exp(x) and
    S its sum::

        KL(i||j) = sum P_i (x_i - x_j) / S_i - log(S_i / S_j)

    A logit of -inf is a probability of 0, so a divergence may be infinite; NaN logits make all of a token's figures NaN.
    """
    return Pairwise(*in_shares(lambda mine: _pairwise([each[mine] for each in logits], from_first), logits[0]))


def _pairwise(logits: Sequence[Tensor], from_first: bool) -> list[Tensor]:
    count, (rows, vocab) = len(logits), logits[0].shape
    step = max(1, min(rows, CACHED // vocab))
    # Allocated once: allocating in each small step would cost more than the arithmetic.
    x, p = (torch.empty(count, step, vocab, dtype=torch.float64) for _ in range(2))
    difference = torch.empty(step, vocab, dtype=torch.float64)
    kl = torch.zeros(rows, count, count, dtype=torch.float64)
    log_sums = torch.empty(rows, count, dtype=torch.float64)
    top = torch.empty(rows, count, dtype=torch.int64)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        size = part.stop - part.start
        for model, values in enumerate(logits):
            x[model, :size].copy_(values[part])
        likeliest = torch.from_numpy(x[:, :size].numpy().argmax(2))  # torch takes eight times as long
        largest = x[:, :size].gather(2, likeliest[:, :, None])
        x[:, :size] -= largest
        sums = exp_into(x[:, :size], p[:, :size]).sum(2)  # (n, R)
        log_sums[part], top[part] = (sums.log() + largest[:, :, 0]).t(), likeliest.t()
        for i in range(1 if from_first else count):
            for j in range(i + 1, count):
                d = torch.sub(x[i, :size], x[j, :size], out=difference[:size])
                between = torch.log1p((sums[i] - sums[j]) / sums[j])  # log(S_i / S_j), accurate for nearly equal sums
                kl[part, i, j] = _dots(p[i, :size], d) / sums[i] - between
                if not from_first:
                    kl[part, j, i] = between - _dots(p[j, :size], d) / sums[j]
    for row in (~kl.isfinite().flatten(1).all(1)).nonzero()[:, 0].tolist():  # -inf among the logits, or NaN
        logp = log_probabilities(torch.stack([values[row].double() for values in logits]))
        weight = logp.exp()
        terms = torch.where(weight[:, None] == 0, 0, weight[:, None] * (logp[:, None] - logp[None]))
        kl[row] = terms.sum(-1)
    return [kl.clamp_(min=0), log_sums, top]  # rounding errors: at most 1e-15 below 0


def _dots(p: Tensor, d: Tensor) -> Tensor:
    """Return the dot product of each row, (R,); bmm takes four times as long."""
    return torch.stack([x.dot(y) for x, y in zip(p, d, strict=True)])
