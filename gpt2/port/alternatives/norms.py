"""Other layer norms: formulas, axes, numbers and repetitions, each in all norms, in one of each block, or in the last.

Formulas with other epsilons, divisors and weights are those of :mod:`.norm_formulas`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, family
from gpt2.port.alternatives.norm_formulas import SHOWN, applied, layer_norm, wrong_norms
from gpt2.port.graph import ROWS, TEXT, Formula, Model, Site

SOURCES = {"ln_1": "x", "ln_2": "mid", "ln_f": "x"}  # what each norm takes
OTHERS = {"ln_1": "ln_2", "ln_2": "ln_1"}
Norming = Callable[[Site, Tensor, str], Tensor]  # from a norm's input and its part
Numbers = tuple[Tensor, Tensor]  # weight and bias (D,)
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


def normed(part: str, make: Norming) -> Formula:
    """Return the formula of the norm ``part``."""
    source = SOURCES[part]
    return lambda c, s: make(c, s[source], part)


def in_norms(one: Alternative, make: Norming, parts: tuple[str, ...] = tuple(SOURCES)) -> Iterator[Alternative]:
    """Yield the alternative ``one`` with ``make`` for a norm: in all ``parts`` together, and in those of a block alone."""
    edits = {part: normed(part, make) for part in parts if part != "ln_f"}
    last = {"ln_f": normed("ln_f", make)} if "ln_f" in parts else {}
    yield replace(one, edits=edits, outside=last)
    for part, formula in edits.items() if len(edits) > 1 or (edits and last) else ():
        yield replace(one, edits={part: formula})


@family
def formulas(model: Model) -> Iterator[Alternative]:
    """Yield the formulas of that table, and norms that are left out."""
    for ((id, words), *also), rare, affine, how in wrong_norms(model.config.layer_norm_epsilon):
        one = Alternative(id, words, also=tuple(also), rare=rare, key=f"{affine} {how}")
        yield from in_norms(one, partial(_formula, affine, how))
    takes = {"ln_1": "attention takes", "ln_2": "the feed-forward takes", "ln_f": "the head takes"}
    for part, who in takes.items():
        edits = {part: lambda c, s, source=SOURCES[part]: s[source]}
        if part == "ln_f":
            yield Alternative("final-norm-missing", f"{who} the stream as it is, without the last norm", outside=edits)
        else:
            yield Alternative("norm-missing", f"{who} the stream as it is, without a norm before it", edits)
    words = "the norm runs twice, the second time on its own result"
    yield from in_norms(Alternative("extra-norm", words, rare=True), lambda c, x, part: c.norm(c.norm(x, part), part))
    both = {part: (lambda c, s, source=SOURCES[part]: s[source]) for part in OTHERS}
    yield Alternative("norm-missing", "both branches take the stream as it is, without norms before them", both)


def _formula(affine: str, how: Mapping[str, Any], c: Site, x: Tensor, part: str) -> Tensor:
    weight, bias = c.numbers(part)
    if affine in SHOWN and bool((weight == 1).all()) and not bool(bias.any()):
        return c.norm(x, part)  # another cause has a better name for it
    return layer_norm(x, *applied(weight, bias, affine), **how)


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


@family
def axes(model: Model) -> Iterator[Alternative]:
    """Yield norms with the mean and the variance of other entries."""
    unbiased = "layernorm-unbiased-variance", "the variance is divided by one less than the number of entries"
    for (words, reading), also in itertools.product(readings((*model.ids.shape, model.config.n_embd)).items(), ((), (unbiased,))):
        rows = any(name in words for dims, name in AXES.items() if 0 in dims)
        one = Alternative("layernorm-axis", words, also=also, rare=True, shared=True, sees=ROWS if rows else TEXT)
        yield from in_norms(one, of_moments(reading, bool(also)))


def of_moments(reading: Reading, unbiased: bool = False) -> Norming:
    def make(c: Site, x: Tensor, part: str) -> Tensor:
        weight, bias = c.numbers(part)
        return reading(x).normed(x, c.config.layer_norm_epsilon, unbiased) * weight + bias

    return make


@family
def numbers(model: Model) -> Iterator[Alternative]:
    """Yield norms with other weights and biases."""
    ways: dict[str, tuple[Callable[[Site, str], Numbers], tuple[str, ...]]] = {
        "cut to the first number, for all features": (_first, tuple(SOURCES)),
        "taken from each other": (lambda c, part: c.numbers(part)[::-1], tuple(SOURCES)),
        "taken from the other norm of the block": (lambda c, part: c.numbers(OTHERS[part]), tuple(OTHERS)),
    }
    for words, (change, parts) in ways.items():
        for leaves, what in (((0,), "the weight is"), ((1,), "the bias is"), ((0, 1), "weight and bias are")):
            id = "norms-swapped" if len(leaves) == 2 and parts == tuple(OTHERS) else "wrong-tensor"
            one = Alternative(id, f"{what} {words}", rare=id == "wrong-tensor")
            yield from in_norms(one, _applied(change, leaves), parts)


def _first(c: Site, part: str) -> Numbers:
    weight, bias = c.numbers(part)
    return weight[:1].expand_as(weight), bias[:1].expand_as(bias)


def _applied(change: Callable[[Site, str], Numbers], leaves: tuple[int, ...]) -> Norming:
    def make(c: Site, x: Tensor, part: str) -> Tensor:
        own, other = c.numbers(part), change(c, part)
        weight, bias = (other[leaf] if leaf in leaves else own[leaf] for leaf in (0, 1))
        return torch.layer_norm(x, weight.shape, weight, bias, c.config.layer_norm_epsilon)

    return make
