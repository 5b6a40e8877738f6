"""Known right and wrong formulas for GPT-2's layer norm: one function with many settings, and the faults of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.graph import Function
from gpt2.port.terms.causes import Cause

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, 1e-3, 1e-7, 1e-10, 1e-4, 1e-2, 1e-9, 1e-1, 1.0)
RMS_EPSILONS = (1e-6, 1e-8, 0.0, 1e-5, 1e-12, torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps)
RMS: dict[str, Any] = {"centred": False, "square": True}  # turns a layer norm into an RMS norm
AXES = {
    (1,): "over the positions",
    (0,): "over the batch",
    (1, 2): "over positions and width together",
    (0, 1): "over batch and positions, as batch normalisation does",
}


class NormFormula(NamedTuple):
    """A formula that a port may follow, the faults that this would show, and whether it mixes the rows of a batch."""

    label: str
    formula: Function
    faults: tuple[Cause, ...]
    mixes_rows: bool


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


def known_norms(config: GPT2Config, state: Mapping[str, Tensor], name: str) -> list[NormFormula]:
    """Return the hypotheses for the norm ``name`` (``h.0.ln_1``, ``ln_f``), the right one first."""

    def parameters(name: str) -> tuple[Tensor, Tensor]:
        return state[f"{name}.weight"], state[f"{name}.bias"]

    given, part = config.layer_norm_epsilon, name.rpartition(".")[2]
    epsilons = dict.fromkeys((given, *EPSILONS))
    weight, bias = parameters(name)
    own, plain = (weight, bias), (torch.ones_like(weight), torch.zeros_like(bias))
    trivial = bool((weight == 1).all()) and not bool(bias.any())  # these parameters have no effect
    out: list[NormFormula] = []

    def add(label: str, *faults: Cause, affine: tuple[Tensor, Tensor] = own, eps: float = given, **how: Any) -> None:
        formula = partial(layer_norm, weight=affine[0], bias=affine[1], eps=eps, **how)
        out.append(NormFormula(label, formula, faults, 0 in how.get("axes", ())))

    def fault(id: str, detail: str, kind: str = "") -> Cause:
        return Cause.at(id, part, detail, kind)

    def other_eps(eps: float, where: str = "") -> tuple[Cause, ...]:
        value = "no epsilon" if eps == 0 else f"epsilon {eps:g}"
        wrong = fault("layernorm-eps", f"{value}{where}; the checkpoint's is {given:g}, added to the variance")
        return (wrong,) if where or eps != given else ()

    unbiased = fault("layernorm-unbiased-variance", "the variance is divided by D - 1, as torch.var and torch.std do by default")
    rms = fault("rmsnorm", "it divides by the root mean square and does not subtract the mean (RMSNorm)")
    deviation = fault("rmsnorm", "it divides by the standard deviation and does not subtract the mean")
    uncentred = fault("rmsnorm", "it subtracts the mean, but divides by the root mean square of what was not centred")
    no_bias = fault("missing-bias", "the norm's bias is not applied")
    no_affine = fault("layernorm-without-affine", "neither weight nor bias is applied")

    for eps in epsilons:
        add("right" if eps == given else f"eps {eps:g}", *other_eps(eps), eps=eps)
    for eps in epsilons:
        add(f"unbiased {eps:g}", unbiased, *other_eps(eps), eps=eps, correction=1)
    for correction, first in ((0, ()), (1, (unbiased,))):
        for eps in filter(None, epsilons):
            outside = other_eps(eps, " added to the standard deviation")
            add(f"outside {correction} {eps:g}", *first, *outside, eps=eps, correction=correction, outside=True)

    undivided = "layernorm-not-normalising"
    if not trivial:
        add("affine only", fault(undivided, "weight and bias are applied to x itself"), centred=False, power=0.0)
    add("centred only", fault(undivided, "the mean is subtracted, but nothing divides by the standard deviation"), power=0.0)
    add("by the variance", fault(undivided, "it divides by the variance, not by its root"), power=1.0)
    for beside, words in ((True, "the standard deviation plus epsilon"), (False, "the standard deviation")):
        rooted = fault(undivided, f"it divides by the root of {words}")
        add(f"by the root of {words}", rooted, outside=beside, again=True)
    for brackets, words in ((1, "the mean alone is divided"), (0, "the mean alone is divided, and multiplied by the weight")):
        add(f"brackets {brackets}", fault(undivided, f"{words}: brackets around x - mean are missing"), brackets=brackets)
    add("by the square", fault(undivided, "it divides by the square of the variance"), power=2.0)
    if not trivial:
        add("no affine", no_affine, affine=plain)
        add("no weight", fault("layernorm-without-affine", "the weight is not applied"), affine=(plain[0], bias))
        add("no bias", no_bias, affine=(weight, plain[1]))
    added = fault("layernorm-without-affine", "one is added to the weight before it is applied")
    add("one more", added, affine=(weight + 1, bias))

    for eps in dict.fromkeys((given, *RMS_EPSILONS)):
        add(f"rms {eps:g}", rms, eps=eps, **RMS)
        if not trivial:
            add(f"rms no bias {eps:g}", rms, *[no_bias] * bool(bias.any()), affine=(weight, plain[1]), eps=eps, **RMS)
            add(f"rms no affine {eps:g}", rms, no_affine, affine=plain, eps=eps, **RMS)
        add(f"rms outside {eps:g}", rms, *other_eps(eps, " added to the root"), eps=eps, outside=True, **RMS)
        add(f"by deviation {eps:g}", deviation, eps=eps, centred=False)
        add(f"by unbiased deviation {eps:g}", deviation, unbiased, eps=eps, correction=1, centred=False)
        add(f"centred over rms {eps:g}", uncentred, eps=eps, square=True)

    for axes, words in AXES.items():
        axis = fault("layernorm-axis", f"the norm runs {words}")
        add(f"axes {axes}", axis, axes=axes)
        if axes != (0, 1):
            add(f"axes {axes} no affine", axis, affine=plain, axes=axes)

    others = {"ln_1": [name[:-1] + "2"], "ln_2": [name[:-1] + "1"]}
    for other in others.get(part, ["h.0.ln_1", f"h.{config.n_layer - 1}.ln_2"]):  # norms that may lend their parameters
        affine, shown = parameters(other), other if part == "ln_f" else other.rpartition(".")[2]
        swapped = fault("norms-swapped", f"the parameters of {shown} are applied here", "another norm's parameters")
        label = shown.rpartition(".")[2]
        for eps in (given, *EPSILONS[1:6]):
            add(f"{label} eps {eps:g}", swapped, *other_eps(eps), affine=affine, eps=eps)
        add(f"{label} unbiased", swapped, unbiased, affine=affine, correction=1)
        add(f"{label} rms", swapped, rms, affine=affine, **RMS)
    return out
