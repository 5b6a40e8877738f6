"""Other masks and softmaxes: which keys a query sees, what is put in the place of hidden scores, and over what is summed.

A mask says which key j a query t sees; ``a`` and ``e`` are the first token of the call and the one behind it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Changed, Weighing, family
from gpt2.port.graph import ROWS, TEXT, Formula, Model, Site, State
from gpt2.port.terms.causes import MASKED

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # from t (T, 1) and j (S) to the visible keys (T, S)
# Axes that exponentials are summed over together, and over which the largest is taken off.
TOGETHER = (
    ((-2,), (-1,), "the queries (dim=-2), not over the keys; each query's largest is taken off before"),
    ((-2, -1), (-2, -1), "the queries and keys of a head together (dim=(-2, -1)), not over the keys of each query"),
)
MOST_TOKENS, MOST_WINDOW = 24, 64  # up to which every length of a prompt, and of a window, is tried on a small model
CAUSAL: Mask = lambda t, j, a, e: j <= t  # noqa: E731
MASKS: dict[str, tuple[str, Mask]] = {
    "every token sees the whole sequence, the future too": ("mask-missing", lambda t, j, a, e: j >= 0 * t),
    "a token sees only what came before it, and not itself": ("mask-strict", lambda t, j, a, e: j < t),
    "a token sees only what came before it, but for the first, which sees itself": (
        "mask-strict",
        lambda t, j, a, e: (j < t) | ((t == 0) & (j == 0)),
    ),
    "a token sees the one after it": ("mask-off-by-one", lambda t, j, a, e: j <= t + 1),
    "the mask is the wrong way round: a token sees itself and the future, not the past": (
        "mask-missing",
        lambda t, j, a, e: j >= t,
    ),
    "the mask is the wrong way round: a token sees the future alone, not itself or the past": (
        "mask-missing",
        lambda t, j, a, e: j > t,
    ),
}
FILLED = ("", *list(MASKS)[1:2])  # masks whose hidden scores are tried with other numbers
FEW = (-1e4, -1e5, -1e9)  # which hide nothing where scores are as low
FILLS = (0.0, 1e-9, -1e-9, -1e-5, -1.0, 1.0, -10.0, -100.0, -1000.0, 1e9)
# What shows only where a text is read in several calls.
IN_CALLS: dict[str, Mask] = {
    "the mask begins anew in each call": lambda t, j, a, e: j <= t - a,
    "a token sees those of its own call alone": lambda t, j, a, e: (j <= t) & (j >= a),
    "a token sees those of its own call alone, later ones too": lambda t, j, a, e: (j >= a) & (t >= 0),
}
AXES = {-2: "over the queries", 1: "over the heads", 0: "over the batch"}


def _masked(mask: Mask, fill: float, scores: Tensor, t: Tensor, a: Tensor, e: Tensor, axis: int = -1) -> Tensor:
    """Return the weights; where nothing is seen, they are 0 if ``fill`` is minus infinity."""
    keys = torch.arange(scores.shape[-1])
    weights = scores.masked_fill(~mask(t, keys, a, e), fill).masked_fill(keys >= e, -math.inf).softmax(axis)
    return weights.nan_to_num(0.0) if fill == -math.inf else weights


def _added(mask: Mask, scores: Tensor, t: Tensor, a: Tensor, e: Tensor) -> Tensor:
    """Return the weights if a large number is added to hidden scores: a token that may see nothing sees everything."""
    keys = torch.arange(scores.shape[-1])
    empty = ~(mask(t, keys, a, e) & (keys < e)).any(-1)
    return torch.where(
        empty[:, None], scores.masked_fill(keys >= e, -math.inf).softmax(-1), _masked(mask, -1e30, scores, t, a, e)
    )


def _after(mask: Mask, scores: Tensor, t: Tensor, a: Tensor, e: Tensor) -> Tensor:
    keys = torch.arange(scores.shape[-1])
    return scores.masked_fill(keys >= e, -math.inf).softmax(-1) * mask(t, keys, a, e)


def _lowered(by: float, scores: Tensor, t: Tensor, a: Tensor, e: Tensor) -> Tensor:
    """Return the weights of scores of which hidden ones have a number added."""
    keys = torch.arange(scores.shape[-1])
    return (scores + by * (keys > t)).masked_fill(keys >= e, -math.inf).softmax(-1)


def _softmax(mask: Mask, fill: float, axis: int, c: Site, s: State) -> Tensor:
    """Return the weights of a softmax over an axis of a call."""
    return _masked(mask, fill, s["attn.scores"], c.tokens, torch.tensor(c.begin), torch.tensor(c.end), axis)


def _weighed(id: str, words: str, formula: Formula, *also: tuple[str, str], sees: str = TEXT, **how: Any) -> Alternative:
    return Alternative(id, words, {"attn.weights": formula}, also=also, sees=sees, **how)


def ahead(mask: Mask) -> bool:
    """Return whether a token sees a later one."""
    every = torch.arange(3)
    return bool(mask(every[:, None], every, every[:1], every[-1:] + 1).triu(1).any())


def lengths(model: Model, most: int = MOST_TOKENS) -> list[int]:
    """Return the lengths of a prompt, or of a window, that are tried: all of up to ``most`` tokens."""
    tokens = model.ids.shape[1]
    if tokens <= most and model.small:
        return list(range(1, tokens))
    return [1 << n for n in range(tokens.bit_length()) if 1 << n < tokens]


@family
def masks(model: Model) -> Iterator[Alternative]:
    """Yield every mask with every number in the place of hidden scores, and the mask behind the softmax."""
    every = torch.arange(model.ids.shape[1])
    for words, (id, mask) in {"": ("", CAUSAL), **MASKS}.items():
        why = ((id, words),) if id else ()
        if id:
            yield _weighed(id, words, Weighing(partial(_masked, mask, -math.inf)), sees=TEXT if ahead(mask) else "")
        if not bool(mask(every[:, None], every, every[:1], every[-1:] + 1).any(-1).all()):  # a token sees nothing
            yield _weighed(id, f"{words}; one that sees nothing sees all alike", Weighing(partial(_masked, mask, -1e30)))
            yield _weighed(id, f"{words}; one that sees nothing sees all", Weighing(partial(_added, mask)))
        for fill in FEW if mask is CAUSAL else ():
            few = f"{fill:g} is {{}} masked scores, and other scores are as low: the future is seen"
            yield _weighed("mask-multiplied", few.format("put in place of"), Weighing(partial(_masked, mask, fill)))
            yield _weighed("mask-multiplied", few.format("added to"), Weighing(partial(_lowered, fill)))
        for fill in FILLS if words in FILLED else ():
            number = "zero" if fill == 0 else f"{fill:g}"
            detail = f"masked scores become {number}, which softmax gives a share, instead of minus infinity"
            yield _weighed("mask-multiplied", detail, Weighing(partial(_masked, mask, fill)), *why, rare=bool(why))
        if words in FILLED:
            detail = "the mask is multiplied in after softmax, so the weights no longer sum to one"
            yield _weighed("mask-multiplied", detail, Weighing(partial(_after, mask)), *why, rare=bool(why))


@family
def masks_in_calls(model: Model) -> Iterator[Alternative]:
    """Yield masks that go wrong in later calls."""
    for words, mask in IN_CALLS.items():
        formula = Weighing(partial(_masked, mask, -math.inf))
        yield _weighed("cache-inconsistent", words, formula, steps=True, at_once=ahead(mask))


@family
def softmaxes(model: Model) -> Iterator[Alternative]:
    """Yield softmaxes over other axes, with every mask, and none at all."""
    sizes = {1: model.config.n_head, 0: len(model.ids)}
    for axis, over in AXES.items():
        if sizes.get(axis, 2) == 1:
            continue
        words, sees = f"the softmax runs {over} (dim={axis}), not over the keys", ROWS if axis == 0 else TEXT
        for (why, (id, mask)), fill in itertools.product({"": ("", CAUSAL), **MASKS}.items(), (-math.inf, -1e30)):
            also, how = ((id, why),) if id else (), "; where nothing is seen, all is alike" if fill > -math.inf else ""
            yield _weighed("softmax-axis", words + how, partial(_softmax, mask, fill, axis), *also, sees=sees, rare=bool(id))
    words = "the softmax runs over the queries (dim=-2), not over the keys, and the mask behind it"
    yield _weighed("softmax-axis", words, lambda c, s: s["attn.scores"].softmax(-2) * _causal(c, s))
    for axes, largest, over in TOGETHER:
        yield _weighed("softmax-axis", f"the softmax runs over {over}", partial(_over, axes, largest))
    words = "the mask is added to the scores as zeros and ones, which hides nothing"
    yield _weighed("mask-missing", words, lambda c, s: (s["attn.scores"] + _causal(c, s)).softmax(-1))
    none = "scores weigh the values as they are, without a softmax"
    yield _weighed("softmax-missing", none, lambda c, s: s["attn.scores"] * _causal(c, s), sees="")
    words = "the exponentials of the scores are not divided by their sum"
    yield _weighed("softmax-missing", words, lambda c, s: s["attn.scores"].exp() * _causal(c, s), sees="")
    words = "the terms of the sum over tokens are assigned, not added: the last value alone counts, with its weight"
    alone = Changed("attn.weights", lambda c, w: w * (torch.arange(w.shape[-1]) == c.tokens))
    yield _weighed("value-projection-wrong", words, alone, sees="", rare=True, shared=True)


def _causal(c: Site, s: State) -> Tensor:
    return c.visible(s["attn.scores"].shape[-1])


def _hidden(c: Site, s: State) -> Tensor:
    return s["attn.scores"].masked_fill(~_causal(c, s), -math.inf)


def _over(summed: tuple[int, ...], compared: tuple[int, ...], c: Site, s: State) -> Tensor:
    """Return exponentials divided by their sum over some axes, from scores less their largest over others."""
    scores = _hidden(c, s)
    some = (scores - scores.amax(compared, keepdim=True)).exp()
    return some / some.sum(summed, keepdim=True)


@family
def windows(model: Model) -> Iterator[Alternative]:
    """Yield masks that hide earlier tokens, and a softmax over one key more."""
    fix = f"{MASKED}  # no window: a token sees all tokens before it"
    for size in lengths(model, MOST_WINDOW):
        words = f"a token sees the last {size} tokens alone, itself among them" if size > 1 else "a token sees itself alone"
        mask: Mask = lambda t, j, a, e, n=size: (j <= t) & (j > t - n)  # noqa: E731
        formula = Weighing(partial(_masked, mask, -math.inf))
        yield _weighed("mask-strict", words, formula, sees="", fix=fix, rare=True, shared=True)
    words = "the softmax divides by one more than the sum, as if an empty place of a cache, with a key of zeros, were seen"
    yield _weighed("cache-inconsistent", words, Weighing(_one_more), sees="", rare=True, shared=True)


def _one_more(scores: Tensor, t: Tensor, a: Tensor, e: Tensor) -> Tensor:
    """Return the weights if one key and value of zeros is seen as well."""
    scores = scores.masked_fill(torch.arange(scores.shape[-1]) > t, -math.inf)
    level = scores.amax(-1, keepdim=True).clamp(min=0)
    some = (scores - level).exp()
    return some / (some.sum(-1, keepdim=True) + (-level).exp())
