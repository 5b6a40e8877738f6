"""List what a norm may take for its mean and variance, where GPT-2 takes those of each token's features.

Shapes: x (B, T, D); means and variances too, with 1 for an axis where one is for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

OWN = "over each token's features"
AXES = {
    (1,): "over the tokens, for each feature (dim=1)",
    (0,): "over the batch, for each token and feature (dim=0)",
    (0, 1): "over all tokens, for each feature, as a batch norm",
    (1, 2): "over tokens and features together",
    (0, 2): "over batch and features together",
    (0, 1, 2): "over the whole array, all rows, tokens and features together",
}
MOST_GROUPS = 8  # of features, beside as many as heads


class Moments(NamedTuple):
    """A mean and a variance, divided by the number of entries ``size``; 0 where none can be one too small."""

    mean: Tensor
    variance: Tensor
    size: int


Reading = Callable[[Tensor], Moments]


def over(dims: Sequence[int], x: Tensor) -> Moments:
    dims = tuple(dims)
    count = math.prod(x.shape[dim] for dim in dims)
    return Moments(x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True), count)


def readings(shape: Sequence[int], heads: int) -> dict[str, Reading]:
    """Return other means and variances of x of this ``shape`` (B, T, D), by words; ``heads``: of the model.

    Over an axis of one entry, a norm gives its bias alone, as other faults do: those are not tried.
    """
    rows, tokens, width = shape
    found: dict[str, Reading] = {}
    for dims, words in AXES.items():
        sizes = [shape[dim] for dim in dims]
        if max(sizes) > 1 and not (rows == 1 and 0 in dims and len(dims) > 1):  # else the same as without the batch
            found[f"the norm runs {words}"] = partial(over, dims)
    for groups in sorted({heads, *range(2, MOST_GROUPS + 1)}, key=lambda n: n != heads):
        if groups > 1 and width % groups == 0 and width > groups:
            found[f"the norm runs over each of {groups} groups of features, as a group norm"] = partial(_grouped, groups)
    if tokens > 1:
        found["the norm runs over the features of all tokens up to this one"] = partial(_so_far, True)
        found["the norm runs over the tokens up to this one, for each feature"] = partial(_so_far, False)
        for step, which in ((1, "before"), (-1, "behind")):
            found[f"the mean is that of the token {which}"] = partial(_moved, step, True, False)
            found[f"the variance is that of the token {which}"] = partial(_moved, step, False, True)
            found[f"mean and variance are those of the token {which}"] = partial(_moved, step, True, True)
        for dims, words in AXES.items():
            if dims != (0,) and (rows > 1 or 0 not in dims):
                found[f"the mean is taken {words}, the variance {OWN}"] = partial(_mixed, dims, (2,))
                found[f"the mean is taken {OWN}, the variance {words}"] = partial(_mixed, (2,), dims)
    others = [one for one in found.items() if one[0].startswith("the mean is") and f"taken {OWN}" not in one[0]]
    for words, reading in others:
        found[f"{words}; the variance is about that mean"] = partial(_about, reading)
    return found


def _mixed(one: Sequence[int], other: Sequence[int], x: Tensor) -> Moments:
    of_mean, of_variance = over(one, x), over(other, x)
    return Moments(of_mean.mean, of_variance.variance, of_variance.size)


def _about(reading: Reading, x: Tensor) -> Moments:
    """Return another mean, and the variance of each token's features about it."""
    mean = reading(x).mean
    return Moments(mean, (x - mean).square().mean(-1, keepdim=True), x.shape[-1])


def _grouped(groups: int, x: Tensor) -> Moments:
    parts = x.unflatten(-1, (groups, -1))
    spread = [one.repeat_interleave(parts.shape[-1], -1) for one in (parts.mean(-1), parts.var(-1, correction=0))]
    return Moments(spread[0], spread[1], parts.shape[-1])


def _so_far(features: bool, x: Tensor) -> Moments:
    first, second = (one.mean(-1, keepdim=True) if features else one for one in (x, x.square()))
    count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
    mean = first.cumsum(1) / count
    return Moments(mean, (second.cumsum(1) / count - mean.square()).clamp(min=0.0), 0)


def _moved(step: int, mean: bool, variance: bool, x: Tensor) -> Moments:
    own = over((2,), x)
    moved = [one.roll(step, 1) for one in own[:2]]
    if step == 1:
        for one, other in zip(moved, own[:2], strict=True):
            one[:, 0] = other[:, 0]
    return Moments(moved[0] if mean else own.mean, moved[1] if variance else own.variance, own.size)
