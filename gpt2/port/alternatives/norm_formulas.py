"""Right and wrong formulas of GPT-2's layer norm: one function with many settings, and the causes of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

EPSILONS = (1e-5, 1e-6, 1e-8, 0.0, 1e-12, 1e-3, 1e-7, 1e-10, 1e-4, 1e-2, 1e-9, 1e-1, 1.0)
RMS_EPSILONS = (1e-6, 1e-8, 0.0, 1e-5, torch.finfo(torch.float32).eps)
TINY = 1e-12  # an epsilon that seldom shows
RMS: dict[str, Any] = {"centred": False, "square": True}  # turns a layer norm into an RMS norm
Causes = tuple[tuple[str, str], ...]  # ids and words
# What a norm applies of its weight and bias, and which of them.
BOTH, NO_BIAS, NO_WEIGHT, NO_AFFINE, ITSELF, ONE_MORE = "weight and bias", "weight", "bias", "", "both, on x", "weight + 1"
SHOWN = (NO_BIAS, NO_WEIGHT, NO_AFFINE, ITSELF)  # what does not show where the weight is one and the bias zero
UNBIASED = "layernorm-unbiased-variance", "the variance is divided by D - 1, as torch.var and torch.std do by default"
RMS_NORM = "rmsnorm", "it divides by the root mean square and does not subtract the mean (RMSNorm)"
DEVIATION = "rmsnorm", "it divides by the standard deviation and does not subtract the mean"
UNCENTRED = "rmsnorm", "it subtracts the mean, but divides by the root mean square of what was not centred"
WITHOUT_BIAS = "missing-bias", "the norm's bias is not applied"
WITHOUT_AFFINE = "layernorm-without-affine", "neither weight nor bias is applied"
# What does not divide by the standard deviation, with the settings of that.
UNDIVIDED: dict[str, dict[str, Any]] = {
    "the mean is subtracted, but nothing divides by the standard deviation": {"power": 0.0},
    "it divides by the variance, not by its root": {"power": 1.0},
    "it divides by the root of the standard deviation plus epsilon": {"outside": True, "again": True},
    "it divides by the root of the standard deviation": {"again": True},
    "it divides by the square of the variance": {"power": 2.0},
    "the mean alone is divided: brackets around x - mean are missing": {"brackets": 1},
    "the mean alone is divided, and multiplied by the weight: brackets around x - mean are missing": {"brackets": 0},
}


def layer_norm(
    x: Tensor,
    weight: Tensor | float = 1.0,
    bias: Tensor | float = 0.0,
    eps: float = 1e-5,
    *,
    correction: int = 0,
    outside: bool = False,
    axes: tuple[int, ...] = (-1,),
    centred: bool = True,
    square: bool = False,
    power: float = 0.5,
    again: bool = False,
    brackets: int = 2,
) -> Tensor:
    """Normalise over ``axes``. ``outside``: epsilon is added to the root. ``centred``: subtract the mean from the numerator.
    ``square``: divide by the root mean square. ``power``: 0.5 takes the root of the variance.
    ``again``: takes the root of the divisor, too. ``brackets``: without those around x - mean, 1, and without those around the
    normalised value too, 0, the mean alone is divided.
    """
    mean = x.mean(axes, keepdim=True)
    middle = x - mean
    count = max(math.prod(x.shape[axis] for axis in axes) - correction, 1)
    spread = (x if square else middle).square().sum(axes, keepdim=True) / count
    divisor = spread**power + eps if outside else (spread + eps) ** power
    if brackets < 2:
        return (x - mean / divisor) * weight + bias if brackets else x - mean / divisor * weight + bias
    return (middle if centred else x) / (divisor.sqrt() if again else divisor) * weight + bias


def applied(weight: Tensor, bias: Tensor, affine: str) -> tuple[Tensor, Tensor]:
    """Return what is applied of a norm's weight and bias."""
    ones, zeros = torch.ones_like(weight), torch.zeros_like(bias)
    known = {NO_BIAS: (weight, zeros), NO_WEIGHT: (ones, bias), NO_AFFINE: (ones, zeros), ONE_MORE: (weight + 1, bias)}
    return known.get(affine, (weight, bias))


def wrong_norms(given: float) -> Iterator[tuple[Causes, bool, str, dict[str, Any]]]:
    """Yield the causes of each wrong formula, whether it is rare, what it applies, and its settings of :func:`layer_norm`.

    ``given``: the checkpoint's epsilon.
    """
    epsilons = dict.fromkeys((given, *EPSILONS))

    def other(eps: float, where: str = "") -> Causes:
        value = f"epsilon {eps:g}" if eps > TINY else f"no epsilon, or one of at most {TINY:g}"
        wrong = "layernorm-eps", f"{value}{where}; the checkpoint's is {given:g}, added to the variance"
        return (wrong,) if where or eps != given else ()

    for correction, first in ((0, ()), (1, (UNBIASED,))):
        for eps in epsilons:
            if causes := (*first, *other(eps)):
                yield causes, len(causes) > 1, BOTH, {"eps": eps, "correction": correction}
            if eps:
                outside = {"eps": eps, "correction": correction, "outside": True}
                yield (*first, *other(eps, " added to the standard deviation")), True, BOTH, outside
    for words, how in UNDIVIDED.items():
        yield (("layernorm-not-normalising", words),), False, BOTH, {"eps": given, **how}
    yield (("layernorm-without-affine", "one is added to the weight before it is applied"),), False, ONE_MORE, {"eps": given}
    unnormed = {"centred": False, "power": 0.0}
    yield (("layernorm-not-normalising", "weight and bias are applied to x itself"),), False, ITSELF, unnormed
    yield (WITHOUT_AFFINE,), False, NO_AFFINE, {"eps": given}
    yield (("layernorm-without-affine", "the weight is not applied"),), False, NO_WEIGHT, {"eps": given}
    yield (WITHOUT_BIAS,), False, NO_BIAS, {"eps": given}
    for eps in dict.fromkeys((given, *RMS_EPSILONS)):
        yield (RMS_NORM,), False, BOTH, {"eps": eps, **RMS}
        yield (RMS_NORM, WITHOUT_BIAS), True, NO_BIAS, {"eps": eps, **RMS}
        yield (RMS_NORM, WITHOUT_AFFINE), True, NO_AFFINE, {"eps": eps, **RMS}
        yield (DEVIATION,), True, BOTH, {"eps": eps, "centred": False}
        yield (UNCENTRED,), True, BOTH, {"eps": eps, "square": True}
