"""What ports are known to compute in place of GPT-2's layer norm."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.hypotheses import Finding, Hypothesis

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, 1e-3, 1e-7, 1e-10, 1e-4, 1e-2, 1e-9, 1e-1, 1.0)


def norms(
    config: GPT2Config, part: str, weight: Tensor, bias: Tensor, others: dict[str, tuple[Tensor, Tensor]]
) -> list[Hypothesis]:
    """Of the norm that stands at ``part``, with its own parameters; ``others`` are those of other norms, by their name."""
    given = config.layer_norm_epsilon

    def found(id: str, detail: str) -> Finding:
        return Finding(id, part, detail)

    def eps_detail(eps: float, how: str = "") -> Finding:
        value = "no epsilon" if eps == 0 else f"epsilon {eps:g}"
        return found("layernorm-eps", f"{value}{how}; the checkpoint's is {given:g}, added to the variance")

    unbiased = found("layernorm-unbiased-variance", "the variance is divided by D - 1, as torch.var and torch.std do unless told")
    out = [Hypothesis("right", _norm(weight, bias, given))]
    for eps in EPSILONS:
        if eps != given:
            out.append(Hypothesis(f"eps {eps:g}", _norm(weight, bias, eps), (eps_detail(eps),)))
    for eps in (given, *EPSILONS):
        own = (unbiased,) if eps == given else (unbiased, eps_detail(eps))
        out.append(Hypothesis(f"unbiased eps {eps:g}", _norm(weight, bias, eps, correction=1), own))
    for correction, first in ((0, ()), (1, (unbiased,))):
        for eps in dict.fromkeys((given, *EPSILONS)):
            if eps:
                own = (*first, eps_detail(eps, " added to the standard deviation"))
                out.append(Hypothesis(f"outside {correction} {eps:g}", _norm(weight, bias, eps, correction, outside=True), own))
    nothing = "layernorm-not-normalising"
    one, zero = torch.ones_like(weight), torch.zeros_like(bias)
    out += [
        Hypothesis("affine only", lambda x: x * weight + bias, (found(nothing, "weight and bias are applied to x itself"),)),
        Hypothesis(
            "centred only",
            lambda x: (x - x.mean(-1, keepdim=True)) * weight + bias,
            (found(nothing, "the mean is subtracted, but nothing divides by the standard deviation"),),
        ),
        Hypothesis(
            "by the variance",
            lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + given) * weight + bias,
            (found(nothing, "it divides by the variance, not by its root"),),
        ),
        Hypothesis(
            "no affine", _norm(one, zero, given), (found("layernorm-without-affine", "neither weight nor bias is applied"),)
        ),
        Hypothesis("no weight", _norm(one, bias, given), (found("layernorm-without-affine", "the weight is not applied"),)),
        Hypothesis("no bias", _norm(weight, zero, given), (found("missing-bias", "the norm's bias is not applied"),)),
        Hypothesis(
            "one more",
            _norm(weight + 1, bias, given),
            (found("layernorm-without-affine", "one is added to the weight before it is applied"),),
        ),
    ]
    for eps in dict.fromkeys(
        (given, 1e-6, 1e-8, 0.0, 1e-5, 1e-12, torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps)
    ):
        without = found("missing-bias", "the norm's bias is not applied")
        plain = found("rmsnorm", "it divides by the root mean square and does not subtract the mean (RMSNorm)")
        bare = found("layernorm-without-affine", "neither weight nor bias is applied")
        out += [
            Hypothesis(f"rms {eps:g}", _rms(weight, bias, eps), (plain,)),
            Hypothesis(f"rms no bias {eps:g}", _rms(weight, zero, eps), (plain, without) if bool(bias.any()) else (plain,)),
            Hypothesis(f"rms no affine {eps:g}", _rms(one, zero, eps), (plain, bare)),
            Hypothesis(
                f"rms outside {eps:g}",
                lambda x, eps=eps: x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * weight + bias,
                (plain, eps_detail(eps, " added to the root")),
            ),
            Hypothesis(
                f"rms by deviation {eps:g}",
                lambda x, eps=eps: x / (x.var(-1, keepdim=True, correction=0) + eps).sqrt() * weight + bias,
                (found("rmsnorm", "it divides by the standard deviation and does not subtract the mean"),),
            ),
            Hypothesis(
                f"rms by unbiased deviation {eps:g}",
                lambda x, eps=eps: x / (x.var(-1, keepdim=True) + eps).sqrt() * weight + bias,
                (found("rmsnorm", "it divides by the standard deviation and does not subtract the mean"), unbiased),
            ),
            Hypothesis(
                f"centred over rms {eps:g}",
                lambda x, eps=eps: (
                    (x - x.mean(-1, keepdim=True)) * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias
                ),
                (found("rmsnorm", "it subtracts the mean, but divides by the root mean square of what was not centred"),),
            ),
        ]
    for axes, words in (((1,), "over the positions"), ((0,), "over the batch"), ((1, 2), "over positions and width together")):
        for affine in ((weight, bias), (one, zero)):
            label = f"axes {axes} {affine[0] is weight}"
            out.append(Hypothesis(label, _norm(*affine, given, axes=axes), (found("layernorm-axis", f"the norm runs {words}"),)))
    for axes in ((0, 1),):
        out.append(
            Hypothesis(
                "batch and positions",
                _norm(weight, bias, given, axes=axes),
                (found("layernorm-axis", "the norm runs over batch and positions, as batch normalisation does"),),
            )
        )
    for name, (other_weight, other_bias) in others.items():
        swapped = found("norms-swapped", f"the parameters of {name} are applied here")
        out.append(Hypothesis(f"{name} for it", _norm(other_weight, other_bias, given), (swapped,)))
        for eps in EPSILONS[1:6]:
            out.append(Hypothesis(f"{name} eps {eps:g}", _norm(other_weight, other_bias, eps), (swapped, eps_detail(eps))))
        out.append(Hypothesis(f"{name} unbiased", _norm(other_weight, other_bias, given, correction=1), (swapped, unbiased)))
        out.append(
            Hypothesis(
                f"{name} rms",
                _rms(other_weight, other_bias, given),
                (swapped, found("rmsnorm", "it divides by the root mean square and does not subtract the mean (RMSNorm)")),
            )
        )
    if bool((weight == 1).all()) and not bool(bias.any()):  # then these are another way of saying that there is no norm
        idle = ("affine only", "no affine", "no weight", "no bias", "rms no")
        out = [hypothesis for hypothesis in out if not hypothesis.label.startswith(idle)]
    return out


def _norm(
    weight: Tensor, bias: Tensor, eps: float, correction: int = 0, outside: bool = False, axes: tuple[int, ...] = (-1,)
) -> Callable[[Tensor], Tensor]:
    def formula(x: Tensor) -> Tensor:
        centred = x - x.mean(axes, keepdim=True)
        variance = centred.square().sum(axes, keepdim=True) / max(math.prod(x.shape[axis] for axis in axes) - correction, 1)
        return centred / (variance.sqrt() + eps if outside else (variance + eps).sqrt()) * weight + bias

    return formula


def _rms(weight: Tensor, bias: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias
