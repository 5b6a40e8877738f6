"""Read off how many of its first features a norm runs over. Shapes: x (B, T, D)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gpt2.port.dump.fits.observed import distinct

LEAST = 6  # tokens that show three numbers and two lengths


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
