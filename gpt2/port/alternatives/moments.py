"""List what a norm may take for its mean and variance, where GPT-2 takes those of each token's features.

Shapes: x (B, T, D); means and variances too, with 1 for an axis where one is for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

OWN = "over each token's features"
AXES = {
    (1,): "over the tokens, for each feature (dim=1)",
    (0,): "over the batch, for each token and feature (dim=0)",
    (0, 1): "over all tokens, for each feature, as a batch norm",
    (1, 2): "over tokens and features together",
    (0, 1, 2): "over the whole array, all rows, tokens and features together",
}


class Moments(NamedTuple):
    """A mean and a variance, divided by the number of entries ``size``."""

    mean: Tensor
    variance: Tensor
    size: int

    def normed(self, x: Tensor, eps: float, unbiased: bool) -> Tensor:
        """Return x normalised with them; ``unbiased``: the variance is divided by one less than the number of entries."""
        variance = self.variance * self.size / (self.size - 1) if unbiased and self.size > 1 else self.variance
        return (x - self.mean) / (variance + eps).sqrt()


Reading = Callable[[Tensor], Moments]


def over(dims: Sequence[int], x: Tensor) -> Moments:
    dims = tuple(dims)
    count = math.prod(x.shape[dim] for dim in dims)
    return Moments(x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True), count)


def readings(shape: Sequence[int]) -> dict[str, Reading]:
    """Return other means and variances of x of this ``shape`` (B, T, D), by words.

    Over an axis of one entry, a norm gives its bias alone, as other faults do: those are not tried.
    """
    found: dict[str, Reading] = {}
    for dims, words in AXES.items():
        if max(shape[dim] for dim in dims) > 1 and not (shape[0] == 1 and 0 in dims and len(dims) > 1):
            found[f"the norm runs {words}"] = partial(over, dims)  # else the same as without the batch
            if dims != (0,) and (shape[0] > 1 or 0 not in dims):
                found[f"the mean is taken {words}, the variance {OWN}"] = partial(_mixed, dims, (2,))
                found[f"the mean is taken {OWN}, the variance {words}"] = partial(_mixed, (2,), dims)
                found[f"the mean is taken {words}, the variance {OWN}; the variance is about that mean"] = partial(_about, dims)
    return found


def _mixed(one: Sequence[int], other: Sequence[int], x: Tensor) -> Moments:
    return over(other, x)._replace(mean=over(one, x).mean)


def _about(dims: Sequence[int], x: Tensor) -> Moments:
    """Return another mean, and the variance of each token's features about it."""
    mean = over(dims, x).mean
    return Moments(mean, (x - mean).square().mean(-1, keepdim=True), x.shape[-1])
