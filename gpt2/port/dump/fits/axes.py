"""List other means and variances that a norm may use: over other axes, over its first features alone, of other tokens.

Shapes: x (B, T, D); means and variances (B, T, D), with 1 for an axis where one is for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gpt2.port.dump.fits.observed import distinct

LEAST = 6  # tokens that show three numbers and two lengths


def axes(x: Tensor, heads: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield means and variances of x (B, T, D) over other axes, in words, and other deviations of a token.

    Over an axis of one entry, a norm gives its bias alone, as other faults do: those are not tried.
    """
    for words, dims in (
        ("over the tokens, for each feature (dim=1)", (1,)),
        ("over the batch, for each token and feature (dim=0)", (0,)),
        ("over all tokens, for each feature, as a batch norm", (0, 1)),
        ("over tokens and features together", (1, 2)),
        ("over batch and features together", (0, 2)),
    ):
        if any(x.shape[dim] > 1 for dim in dims):
            yield f"the norm runs {words}", x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True)
    width, own = x.shape[-1], x.mean(-1, keepdim=True)
    for groups in sorted({heads, *range(2, 9)}, key=lambda n: n != heads):
        if groups > 1 and width % groups == 0:
            parts = x.unflatten(-1, (groups, -1))
            mean, variance = parts.mean(-1), parts.var(-1, correction=0)
            spread = [one.repeat_interleave(width // groups, -1) for one in (mean, variance)]
            yield f"the norm runs over each of {groups} groups of features, as a group norm", spread[0], spread[1]
    variance = x.var(-1, correction=0, keepdim=True)
    for step in (1, -1):
        other, wide = own.roll(step, 1), variance.roll(step, 1)
        if step == 1:
            other[:, 0], wide[:, 0] = own[:, 0], variance[:, 0]
        which = "before" if step == 1 else "behind"
        yield f"the mean is that of the token {which}", other, variance
        yield f"the variance is that of the token {which}", own, wide
        yield f"mean and variance are those of the token {which}", other, wide
    away = (x - own).abs()
    yield "it is divided by the mean absolute deviation", own, away.mean(-1, keepdim=True).square()
    yield "it is divided by the largest deviation", own, away.amax(-1, keepdim=True).square()
    yield "it is divided by the span of the features", own, (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)).square()
    yield "it is divided by the length of the vector", own, variance * width


def first_features(x: Tensor, mean: Tensor, variance: Tensor, rows: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the mean and the variance over the first features alone, divided by another number, that give those of the tokens.

    A loop that ends early does so, or one over rows with room for more. ``mean``, ``variance`` (B, T): as the result shows.
    """
    if distinct(x[rows]) < LEAST:
        return
    mean, variance, features = mean[rows], variance[rows], x[rows]
    numbers: list[int] = []
    divisors: list[list[float]] = []
    for wanted, terms in ((mean, features), (variance, (features - mean[:, None]).square())):
        made = terms.cumsum(1)  # over the first 1, 2, ... features
        columns = torch.stack([made, mean.square()[:, None].expand_as(made)], -1) if wanted is variance else made[..., None]
        gram = columns.permute(1, 2, 0) @ columns.permute(1, 0, 2) + 1e-12 * torch.eye(columns.shape[-1], dtype=x.dtype)
        found, _ = torch.linalg.solve_ex(gram, (columns.permute(1, 2, 0) @ wanted)[..., None])  # (D, 1 or 2, 1)
        left = ((columns.permute(1, 0, 2) @ found)[..., 0] - wanted).square().sum(1).nan_to_num(torch.inf)
        numbers.append(int(left.argmin()))
        divisors.append(found[numbers[-1], :, 0].tolist())
    (few, many), (by, (times, of_mean)) = numbers, divisors
    if not math.isfinite(by[0] + times + of_mean) or by[0] == 0 or times == 0:
        return
    center = by[0] * x[..., : few + 1].sum(-1, keepdim=True)
    spread = times * (x - center)[..., : many + 1].square().sum(-1, keepdim=True) + of_mean * center.square()
    words = f"the mean is the sum of the first {few + 1} of {x.shape[-1]} features divided by {1 / by[0]:.4g}, "
    words += f"and the variance is over the first {many + 1}, divided by {1 / times:.4g}"
    yield words, center, spread
