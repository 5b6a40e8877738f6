"""Other layer norms: formulas, epsilons, axes and numbers, each in all norms, in one of each block, or in the last."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative
from gpt2.port.graph import ROWS, TEXT, Formula, Model, Site

SOURCES = {"ln_1": "x", "ln_2": "mid", "ln_f": "x"}  # what each norm takes
TAKES = {"ln_1": "attention takes", "ln_2": "the feed-forward takes", "ln_f": "the head takes"}
OTHERS = {"ln_1": "ln_2", "ln_2": "ln_1"}
Norming = Callable[[Site, Tensor, str], Tensor]  # from a norm's input and its part
AXES = {
    (1,): "over the tokens, for each feature (dim=1)",
    (0,): "over the batch, for each token and feature (dim=0)",
    (0, 1): "over all tokens, for each feature, as a batch norm",
    (1, 2): "over tokens and features together",
    (0, 1, 2): "over the whole array, all rows, tokens and features together",
}
EPSILONS = (1e-5, 1e-6, 1e-8, 0.0, 1e-12, 1e-3, 1e-7, 1e-10, 1e-4, 1e-2, 1e-9, 1e-1, 1.0)
RMS_EPSILONS = (1e-6, 1e-8, 0.0, 1e-5, torch.finfo(torch.float32).eps)
TINY = 1e-12  # an epsilon that seldom shows
UNBIASED = "layernorm-unbiased-variance", "the variance is divided by D - 1, as torch.var and torch.std do by default"
RMS_NORM = "rmsnorm", "it divides by the root mean square and does not subtract the mean (RMSNorm)"
WITHOUT_BIAS = "missing-bias", "the norm's bias is not applied"
WITHOUT_AFFINE = "layernorm-without-affine", "neither weight nor bias is applied"
# What a norm applies of its weight and bias; all but one more show only where the weight is not 1, or the bias not 0.
Affine = Callable[[Any, Any], tuple[Any, Any]]
NO_BIAS: Affine = lambda weight, bias: (weight, 0 * bias)  # noqa: E731
NO_WEIGHT: Affine = lambda weight, bias: (0 * weight + 1, bias)  # noqa: E731
NO_AFFINE: Affine = lambda weight, bias: (0 * weight + 1, 0 * bias)  # noqa: E731
ONE_MORE: Affine = lambda weight, bias: (weight + 1, bias)  # noqa: E731
# Formulas with the checkpoint's epsilon: cause, words, and the settings of `layer_norm`.
NOT_NORMALISING: dict[str, dict[str, Any]] = {
    "the mean is subtracted, but nothing divides by the standard deviation": {"outer": 0.0},
    "it divides by the variance, not by its root": {"outer": 1.0},
    "it divides by the root of the standard deviation plus epsilon": {"inner": 0.5, "outer": 0.5},
    "it divides by the root of the standard deviation": {"outer": 0.25},
    "it divides by the square of the variance": {"outer": 2.0},
    "the mean alone is divided: brackets around x - mean are missing": {"brackets": 1},
    "the mean alone is divided, and multiplied by the weight: brackets around x - mean are missing": {"brackets": 0},
    "weight and bias are applied to x itself": {"rms": True, "outer": 0.0},
}
FORMULAS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(("layernorm-not-normalising", words, how) for words, how in NOT_NORMALISING.items()),
    ("layernorm-without-affine", "one is added to the weight before it is applied", {"affine": ONE_MORE}),
    ("layernorm-without-affine", "the weight is not applied", {"affine": NO_WEIGHT}),
    (*WITHOUT_AFFINE, {"affine": NO_AFFINE}),
    (*WITHOUT_BIAS, {"affine": NO_BIAS}),
)


def layer_norm(
    x: Tensor,
    weight: Tensor | float = 1.0,
    bias: Tensor | float = 0.0,
    eps: float = 1e-5,
    *,
    affine: Affine | None = None,
    correction: int = 0,
    axes: tuple[int, ...] = (-1,),
    rms: bool = False,
    inner: float = 1.0,
    outer: float = 0.5,
    brackets: int = 2,
) -> Tensor:
    """Normalise over ``axes``: divide by (variance^inner + eps)^outer. ``rms``: the mean is not subtracted.

    ``brackets``: the mean alone is divided, without those around x - mean, 1, and around the normalised value too, 0.
    """
    weight, bias = affine(weight, bias) if affine else (weight, bias)
    mean = torch.zeros_like(x[..., :1]) if rms else x.mean(axes, keepdim=True)
    count = max(math.prod(x.shape[axis] for axis in axes) - correction, 1)
    centred = x if rms else x - mean
    divisor = ((centred.square().sum(axes, keepdim=True) / count) ** inner + eps) ** outer
    if brackets < 2:
        return (x - mean / divisor) * weight + bias if brackets else x - mean / divisor * weight + bias
    return centred / divisor * weight + bias


def normed(part: str, make: Norming) -> Formula:
    source = SOURCES[part]
    return lambda c, s: make(c, s[source], part)


def in_norms(one: Alternative, make: Norming, parts: Iterable[str] = SOURCES) -> Iterator[Alternative]:
    """Yield the alternative ``one`` with ``make`` for a norm: in all ``parts`` together, and in those of a block alone."""
    formulas = {part: normed(part, make) for part in parts}
    yield replace(one, formulas=formulas)
    yield from (replace(one, formulas={part: formulas[part]}) for part in OTHERS)


def _formula(how: Mapping[str, Any], c: Site, x: Tensor, part: str) -> Tensor:
    weight, bias = c.numbers(part)
    if (how.get("affine", ONE_MORE) is not ONE_MORE or how.get("outer", 1) == 0) and (weight == 1).all() and not bias.any():
        return c.norm(x, part)  # another cause has a better name for it
    return layer_norm(x, weight, bias, **how)


def formulas(model: Model) -> Iterator[Alternative]:
    """Yield other formulas of the norms, other axes, and norms that are left out, or run twice."""
    rows, given = len(model.ids), model.config.layer_norm_epsilon
    some: list[tuple[tuple[tuple[str, str], ...], bool, dict[str, Any]]] = []  # causes, whether it is rare, and the formula
    for correction, eps, outside in itertools.product((0, 1), dict.fromkeys((given, *EPSILONS)), (False, True)):
        value = f"epsilon {eps:g}" if eps > TINY else f"no epsilon, or one of at most {TINY:g}"
        where = " added to the standard deviation" if outside else ""
        wrong = ("layernorm-eps", f"{value}{where}; the checkpoint's is {given:g}, added to the variance")
        causes = (*[UNBIASED] * correction, *[wrong] * (outside or eps != given))
        if causes and (eps or not outside):
            power = {"inner": 0.5, "outer": 1.0} if outside else {}
            some.append((causes, outside or len(causes) > 1, {"eps": eps, "correction": correction, **power}))
    some += [(((id, words),), False, {"eps": given, **how}) for id, words, how in FORMULAS]
    for eps in dict.fromkeys((given, *RMS_EPSILONS)):
        rms: dict[str, Any] = {"eps": eps, "rms": True}
        some += [((RMS_NORM,), False, rms), ((RMS_NORM, WITHOUT_BIAS), True, {**rms, "affine": NO_BIAS})]
        some.append(((RMS_NORM, WITHOUT_AFFINE), True, {**rms, "affine": NO_AFFINE}))
    for ((id, words), *also), rare, how in some:
        one = Alternative(id, words, {}, also=tuple(also), rare=rare, key=f"epsilon {how['eps']:g}")
        yield from in_norms(one, partial(_formula, how))
    for (dims, words), correction in itertools.product(AXES.items(), (0, 1)):
        if (rows == 1 and 0 in dims) or (dims == (1,) and model.ids.shape[1] == 1):
            continue  # over an axis of one entry, a norm gives its bias alone, as other faults do
        also = [(UNBIASED[0], "the variance is divided by one less than the number of entries")] * correction
        one = Alternative("layernorm-axis", f"the norm runs {words}", {}, also=tuple(also), rare=True, shared=True)
        make = partial(_formula, {"eps": given, "axes": dims, "correction": correction})
        yield from in_norms(replace(one, sees=ROWS if 0 in dims else TEXT), make)
    one = Alternative("extra-norm", "the norm runs twice, the second time on its own result", {}, rare=True)
    yield from in_norms(one, lambda c, x, part: c.norm(c.norm(x, part), part))
    none = {part: (lambda c, s, source=source: s[source]) for part, source in SOURCES.items()}
    for part, who in TAKES.items():
        id, what = ("final-norm-missing", "the last norm") if part == "ln_f" else ("norm-missing", "a norm before it")
        yield Alternative(id, f"{who} the stream as it is, without {what}", {part: none[part]})
    words = "both branches take the stream as it is, without norms before them"
    yield Alternative("norm-missing", words, {part: none[part] for part in OTHERS})


def numbers(model: Model) -> Iterator[Alternative]:
    """Yield norms with the weight or bias of the other norm of the block."""
    for leaves, what in (((0,), "the weight is"), ((1,), "the bias is"), ((0, 1), "weight and bias are")):
        id = "norms-swapped" if len(leaves) == 2 else "wrong-tensor"
        one = Alternative(id, f"{what} taken from the other norm of the block", {}, rare=len(leaves) == 1)
        yield from in_norms(one, partial(_swapped, leaves), OTHERS)


def _swapped(leaves: tuple[int, ...], c: Site, x: Tensor, part: str) -> Tensor:
    """Return the norm with the weight (0) or bias (1) of the other norm."""
    own, other = c.numbers(part), c.numbers(OTHERS[part])
    weight, bias = (other[leaf] if leaf in leaves else own[leaf] for leaf in (0, 1))
    return layer_norm(x, weight, bias, c.config.layer_norm_epsilon)
