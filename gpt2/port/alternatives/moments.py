"""List what a norm may take for its mean and variance, where GPT-2 takes those of each token's features.

One list for all who look for such a norm: the fits, which read it off recorded values, and the simulations.
Shapes: x (B, T, D); means and variances too, with 1 for an axis where one is for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.terms.causes import Cause

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


class Divided(NamedTuple):
    """How a norm divides: the variance by one less than the count if ``unbiased``; epsilon added to the root if ``outside``."""

    unbiased: bool = False
    outside: bool = False

    def normed(self, x: Tensor, moments: Moments, eps: float) -> Tensor:
        mean, variance, size = moments
        variance = variance * size / (size - 1) if self.unbiased and size > 1 else variance
        return (x - mean) / (variance.sqrt() + eps if self.outside else (variance + eps).sqrt())

    def faults(self, part: str, eps: float, given: float) -> Iterator[Cause]:
        """Yield the faults beside that of the axis, in a norm ``part`` with epsilon ``eps``; the checkpoint's is ``given``."""
        if self.unbiased:
            yield Cause.at("layernorm-unbiased-variance", part, "the variance is divided by one less than the number of entries")
        if self.outside or abs(eps - given) > 1e-9:
            where = ", added to the standard deviation" if self.outside else ""
            yield Cause.at("layernorm-eps", part, f"epsilon is {eps:.4g}{where}; the checkpoint's is {given:g}")


WAYS = tuple(Divided(unbiased, outside) for outside in (False, True) for unbiased in (False, True))


def over(dims: Sequence[int], x: Tensor) -> Moments:
    dims = tuple(dims)
    count = math.prod(x.shape[dim] for dim in dims)
    return Moments(x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True), count)


def every_reading(shape: Sequence[int], heads: int) -> dict[str, Reading]:
    """Return GPT-2's own mean and variance, and :func:`readings`."""
    return {OWN: partial(over, (2,)), **readings(shape, heads)}


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
        found["every token is normalised with the mean and the variance of token 0"] = partial(_of_token, 0)
        found["every token is normalised with the mean and the variance of the last token"] = partial(_of_token, -1)
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
    for half, which in ((0, "first"), (1, "second")):
        found[f"the variance is that of the {which} half of the features"] = partial(_half, half)
    found["it is divided by the mean absolute deviation"] = partial(_away, lambda away: away.mean(-1, keepdim=True))
    found["the median of the features is taken for their mean"] = _median
    found["the median of the features is taken for their mean, and for the variance"] = partial(_about, _median)
    found["it is divided by the largest deviation"] = partial(_away, lambda away: away.amax(-1, keepdim=True))
    found["it is divided by the span of the features"] = _span
    found["it is divided by the length of the vector"] = partial(_away, lambda away: away.square().sum(-1, keepdim=True).sqrt())
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


def _of_token(at: int, x: Tensor) -> Moments:
    return over((2,), x[:, at, None])


def _moved(step: int, mean: bool, variance: bool, x: Tensor) -> Moments:
    own = over((2,), x)
    moved = [one.roll(step, 1) for one in own[:2]]
    if step == 1:
        for one, other in zip(moved, own[:2], strict=True):
            one[:, 0] = other[:, 0]
    return Moments(moved[0] if mean else own.mean, moved[1] if variance else own.variance, own.size)


def _half(number: int, x: Tensor) -> Moments:
    variance = over((2,), x.chunk(2, -1)[number] if x.shape[-1] > 1 else x).variance
    return Moments(x.mean(-1, keepdim=True), variance, x.shape[-1] // 2)


def _away(size: Callable[[Tensor], Tensor], x: Tensor) -> Moments:
    mean = x.mean(-1, keepdim=True)
    return Moments(mean, size((x - mean).abs()).square(), 0)


def _median(x: Tensor) -> Moments:
    return over((2,), x)._replace(mean=x.median(-1, keepdim=True).values)


def _span(x: Tensor) -> Moments:
    return Moments(x.mean(-1, keepdim=True), (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)).square(), 0)
