"""Formulas that ports are known to compute in place of GPT-2's layer norm."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.hypotheses import Fault, Hypothesis

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, 1e-3, 1e-7, 1e-10, 1e-4, 1e-2, 1e-9, 1e-1, 1.0)
RMS_EPSILONS = (1e-6, 1e-8, 0.0, 1e-5, 1e-12, torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps)
AXES = {(1,): "over the positions", (0,): "over the batch", (1, 2): "over positions and width together"}


def norms(
    config: GPT2Config, part: str, weight: Tensor, bias: Tensor, others: dict[str, tuple[Tensor, Tensor]]
) -> list[Hypothesis]:
    """Hypotheses for the norm at ``part``, with its own ``weight`` and ``bias`` (D,); the right one comes first.

    ``others`` are the parameters of other norms, by their names: the port may apply them here.
    """
    given = config.layer_norm_epsilon
    one, zero = torch.ones_like(weight), torch.zeros_like(bias)
    trivial = bool((weight == 1).all()) and not bool(bias.any())  # applying these parameters is the same as not applying them
    out: list[Hypothesis] = []

    def add(label: str, formula: Callable[[Tensor], Tensor], *faults: Fault) -> None:
        out.append(Hypothesis(label, formula, faults))

    def fault(id: str, detail: str, kind: str = "") -> Fault:
        return Fault(id, part, detail, kind)

    def other_eps(eps: float, where: str = "") -> Fault:
        value = "no epsilon" if eps == 0 else f"epsilon {eps:g}"
        return fault("layernorm-eps", f"{value}{where}; the checkpoint's is {given:g}, added to the variance")

    unbiased = fault("layernorm-unbiased-variance", "the variance is divided by D - 1, as torch.var and torch.std do by default")
    rms = fault("rmsnorm", "it divides by the root mean square and does not subtract the mean (RMSNorm)")
    deviation = fault("rmsnorm", "it divides by the standard deviation and does not subtract the mean")
    uncentred = fault("rmsnorm", "it subtracts the mean, but divides by the root mean square of what was not centred")
    no_bias = fault("missing-bias", "the norm's bias is not applied")
    no_affine = fault("layernorm-without-affine", "neither weight nor bias is applied")

    add("right", _norm(weight, bias, given))
    for eps in EPSILONS:
        if eps != given:
            add(f"eps {eps:g}", _norm(weight, bias, eps), other_eps(eps))
    for eps in dict.fromkeys((given, *EPSILONS)):
        add(f"unbiased {eps:g}", _norm(weight, bias, eps, 1), unbiased, *([] if eps == given else [other_eps(eps)]))
    for correction, first in ((0, ()), (1, (unbiased,))):
        for eps in filter(None, dict.fromkeys((given, *EPSILONS))):
            outside = other_eps(eps, " added to the standard deviation")
            add(f"outside {correction} {eps:g}", _norm(weight, bias, eps, correction, outside=True), *first, outside)

    nothing = "layernorm-not-normalising"
    if not trivial:
        add("affine only", lambda x: x * weight + bias, fault(nothing, "weight and bias are applied to x itself"))
    centred = fault(nothing, "the mean is subtracted, but nothing divides by the standard deviation")
    add("centred only", lambda x: (x - x.mean(-1, keepdim=True)) * weight + bias, centred)
    add(
        "by the variance",
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + given) * weight + bias,
        fault(nothing, "it divides by the variance, not by its root"),
    )
    if not trivial:
        add("no affine", _norm(one, zero, given), no_affine)
        add("no weight", _norm(one, bias, given), fault("layernorm-without-affine", "the weight is not applied"))
        add("no bias", _norm(weight, zero, given), no_bias)
    added = fault("layernorm-without-affine", "one is added to the weight before it is applied")
    add("one more", _norm(weight + 1, bias, given), added)

    for eps in dict.fromkeys((given, *RMS_EPSILONS)):
        add(f"rms {eps:g}", _norm(weight, bias, eps, centred=False, square=True), rms)
        if not trivial:
            add(f"rms no bias {eps:g}", _norm(weight, zero, eps, centred=False, square=True), rms, *[no_bias] * bool(bias.any()))
            add(f"rms no affine {eps:g}", _norm(one, zero, eps, centred=False, square=True), rms, no_affine)
        outside = other_eps(eps, " added to the root")
        add(f"rms outside {eps:g}", _norm(weight, bias, eps, centred=False, square=True, outside=True), rms, outside)
        add(f"by deviation {eps:g}", _norm(weight, bias, eps, centred=False), deviation)
        add(f"by unbiased deviation {eps:g}", _norm(weight, bias, eps, 1, centred=False), deviation, unbiased)
        add(f"centred over rms {eps:g}", _norm(weight, bias, eps, square=True), uncentred)

    for axes, words in AXES.items():
        for label, affine in (("", (weight, bias)), (" no affine", (one, zero))):
            add(f"axes {axes}{label}", _norm(*affine, given, axes=axes), fault("layernorm-axis", f"the norm runs {words}"))
    batch = fault("layernorm-axis", "the norm runs over batch and positions, as batch normalisation does")
    add("batch and positions", _norm(weight, bias, given, axes=(0, 1)), batch)

    for name, affine in others.items():
        swapped = fault("norms-swapped", f"the parameters of {name} are applied here", "another norm's parameters")
        label = name.rpartition(".")[2]
        add(f"{label} for it", _norm(*affine, given), swapped)
        for eps in EPSILONS[1:6]:
            add(f"{label} eps {eps:g}", _norm(*affine, eps), swapped, other_eps(eps))
        add(f"{label} unbiased", _norm(*affine, given, 1), swapped, unbiased)
        add(f"{label} rms", _norm(*affine, given, centred=False, square=True), swapped, rms)
    return out


def bare_norm(eps: float, *, rms: bool = False) -> Callable[[Tensor], Tensor]:
    """A layer norm, or an RMS norm, without weight and bias."""
    return _norm(1.0, 0.0, eps, centred=not rms, square=rms)


def _norm(
    weight: Tensor | float,
    bias: Tensor | float,
    eps: float,
    correction: int = 0,
    *,
    outside: bool = False,
    axes: tuple[int, ...] = (-1,),
    centred: bool = True,
    square: bool = False,
) -> Callable[[Tensor], Tensor]:
    """A norm over ``axes``. ``outside``: epsilon is added to the root; ``centred``: the mean is subtracted from what is divided;
    ``square``: divided by the root mean square instead of the standard deviation."""

    def formula(x: Tensor) -> Tensor:
        middle = x - x.mean(axes, keepdim=True)
        count = max(math.prod(x.shape[axis] for axis in axes) - correction, 1)
        spread = (x if square else middle).square().sum(axes, keepdim=True) / count
        return (middle if centred else x) / (spread.sqrt() + eps if outside else (spread + eps).sqrt()) * weight + bias

    return formula
