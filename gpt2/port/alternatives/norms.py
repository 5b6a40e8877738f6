"""Other layer norms: formulas, axes, numbers and repetitions, each in all norms, in one of each block, or in the last.

Formulas with other epsilons, divisors and weights are those of :mod:`.norm_formulas`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, family
from gpt2.port.alternatives.norm_formulas import BOTH, SHOWN, applied, layer_norm, wrong_norms
from gpt2.port.graph import ROWS, TEXT, Formula, Model, Site

SOURCES = {"ln_1": "x", "ln_2": "mid", "ln_f": "x"}  # what each norm takes
OTHERS = {"ln_1": "ln_2", "ln_2": "ln_1"}
Norming = Callable[[Site, Tensor, str], Tensor]  # from a norm's input and its part
Numbers = tuple[Tensor, Tensor]  # weight and bias (D,)
AXES = {
    (1,): "over the tokens, for each feature (dim=1)",
    (0,): "over the batch, for each token and feature (dim=0)",
    (0, 1): "over all tokens, for each feature, as a batch norm",
    (1, 2): "over tokens and features together",
    (0, 1, 2): "over the whole array, all rows, tokens and features together",
}


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


@family
def axes(model: Model) -> Iterator[Alternative]:
    """Yield norms over other axes. Over an axis of one entry, a norm gives its bias alone, as other faults do: not tried."""
    rows, eps = len(model.ids), model.config.layer_norm_epsilon
    unbiased = "layernorm-unbiased-variance", "the variance is divided by one less than the number of entries"
    for (dims, words), also in itertools.product(AXES.items(), ((), (unbiased,))):
        if (rows == 1 and 0 in dims) or (dims == (1,) and model.ids.shape[1] == 1):
            continue
        sees, how = ROWS if 0 in dims else TEXT, {"eps": eps, "axes": dims, "correction": len(also)}
        one = Alternative("layernorm-axis", f"the norm runs {words}", also=also, rare=True, shared=True, sees=sees)
        yield from in_norms(one, partial(_formula, BOTH, how))


@family
def numbers(model: Model) -> Iterator[Alternative]:
    """Yield norms with other weights and biases."""
    ways: dict[str, tuple[Callable[[Site, str], Numbers], tuple[str, ...]]] = {
        "cut to the first number, for all features": (_first, tuple(SOURCES)),
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
