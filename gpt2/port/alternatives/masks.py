"""Other masks and softmaxes: which keys a query sees, what is put in the place of hidden scores, and over what is summed.

A mask says which key j a query t sees; ``a`` is the first token of the call.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Changed, lengths
from gpt2.port.graph import ROWS, TEXT, Formula, Model, Site, State
from gpt2.port.terms.causes import MASKED

Mask = Callable[[Tensor, Tensor, int], Tensor]  # from t (T, 1) and j (S) to the visible keys (T, S)
MOST_WINDOW = 64  # up to which every length of a window is tried on a small model
CAUSAL: Mask = lambda t, j, a: j <= t  # noqa: E731
TURNED = "the mask is the wrong way round: a token sees"
MASKS: dict[str, tuple[str, Mask]] = {
    "every token sees the whole sequence, the future too": ("mask-missing", lambda t, j, a: j >= 0 * t),
    "a token sees only what came before it, and not itself": ("mask-strict", lambda t, j, a: j < t),
    "a token sees only what came before it, but for the first, which sees itself": (
        "mask-strict",
        lambda t, j, a: (j < t) | ((t == 0) & (j == 0)),
    ),
    "a token sees the one after it": ("mask-off-by-one", lambda t, j, a: j <= t + 1),
    f"{TURNED} itself and the future, not the past": ("mask-missing", lambda t, j, a: j >= t),
    f"{TURNED} the future alone, not itself or the past": ("mask-missing", lambda t, j, a: j > t),
}
TINY = 1e-9  # written for -1e9
FILLS = (0.0, TINY, -TINY, -1e-5, -1.0, 1.0, -10.0, -100.0, -1e3, -1e4, -1e5, -1e9, 1e9)  # in place of hidden scores
# What shows only where a text is read in several calls.
IN_CALLS: dict[str, Mask] = {
    "the mask begins anew in each call": lambda t, j, a: j <= t - a,
    "a token sees those of its own call alone": lambda t, j, a: (j <= t) & (j >= a),
    "a token sees those of its own call alone, later ones too": lambda t, j, a: (j >= a) & (t >= 0),
}
AXES = {-2: "over the queries", 1: "over the heads", 0: "over the batch"}


def _summed_over_queries(scores: Tensor, seen: Tensor) -> Tensor:
    scores = scores.masked_fill(~seen, -math.inf)
    some = (scores - scores.amax(-1, keepdim=True)).exp()
    return some / some.sum(-2, keepdim=True)


def _one_more(scores: Tensor, seen: Tensor) -> Tensor:
    """Return the weights if one key and value of zeros is seen as well."""
    level = scores.masked_fill(~seen, -math.inf).amax(-1, keepdim=True).clamp(min=0)
    some = (scores - level).exp() * seen
    return some / (some.sum(-1, keepdim=True) + (-level).exp())


def _weighed(id: str, words: str, formula: Formula, *also: tuple[str, str], sees: str = TEXT, **how: Any) -> Alternative:
    return Alternative(id, words, {"attn.weights": formula}, also=also, sees=sees, **how)


def seeing(mask: Mask, fill: float = -math.inf, axis: int = -1) -> Formula:
    """Return the formula of the weights with a mask; where nothing is seen, they are 0 if ``fill`` is minus infinity."""

    def weights(c: Site, s: State) -> Tensor:
        scores = s["attn.scores"]
        return scores.masked_fill(~mask(c.tokens, torch.arange(scores.shape[-1]), c.begin), fill).softmax(axis).nan_to_num(0.0)

    return weights


def _visibly(weigh: Callable[[Tensor, Tensor], Tensor]) -> Formula:
    return lambda c, s: weigh(s["attn.scores"], c.visible(s["attn.scores"].shape[-1]))


def ahead(mask: Mask) -> bool:
    """Return whether a token sees a later one."""
    return bool(mask(torch.arange(3)[:, None], torch.arange(3), 0).triu(1).any())


def _or_all(mask: Mask) -> Mask:
    """Let a token that sees nothing see all tokens."""
    return lambda t, j, a: (seen := mask(t, j, a)) | ~seen.any(-1, keepdim=True)


def masks(model: Model) -> Iterator[Alternative]:
    """Yield other masks, other numbers in the place of hidden scores, the mask behind the softmax, and windows."""
    every = torch.arange(model.ids.shape[1])
    for words, (id, mask) in MASKS.items():
        yield _weighed(id, words, seeing(mask), sees=TEXT if ahead(mask) else "")
        seen = mask(every[:, None], every, 0)
        if not bool(seen.any(-1).all()):  # a token sees nothing
            yield _weighed(id, f"{words}; one that sees nothing sees all alike", seeing(mask, -1e30))
            yield _weighed(
                id, f"{words}; one that sees nothing sees all by score, as the mask's number is small", seeing(_or_all(mask))
            )
        if not bool(seen.tril(-1).any()):  # no token sees the past: the mask is the wrong way round
            yield _weighed(id, f"{words}; hidden scores become {TINY:g}", seeing(mask, TINY), rare=True)
    for fill in FILLS:
        words = f"masked scores become {fill:g}, which softmax gives a share, instead of minus infinity"
        yield _weighed("mask-multiplied", words.replace("become 0,", "become zero,"), seeing(CAUSAL, fill))
    for words, mask in IN_CALLS.items():
        yield _weighed("cache-inconsistent", words, seeing(mask), steps=True)
    fix = f"{MASKED}  # no window: a token sees all tokens before it"
    for size in lengths(model, MOST_WINDOW):
        words = f"a token sees the last {size} tokens alone, itself among them" if size > 1 else "a token sees itself alone"
        window = seeing(lambda t, j, a, n=size: (j <= t) & (j > t - n))
        yield _weighed("mask-strict", words, window, sees="", fix=fix, rare=True, shared=True)


def softmaxes(model: Model) -> Iterator[Alternative]:
    """Yield softmaxes over other axes, with every mask, and none at all."""
    sizes = {1: model.config.n_head, 0: len(model.ids)}
    for axis, over in AXES.items():
        words, sees = f"the softmax runs {over} (dim={axis}), not over the keys", ROWS if axis == 0 else TEXT
        some = itertools.product({"": ("", CAUSAL), **MASKS}.items(), (-math.inf, -1e30)) if sizes.get(axis, 2) > 1 else ()
        for (why, (id, mask)), fill in some:
            also, how = ((id, why),) if id else (), "; where nothing is seen, all is alike" if fill > -math.inf else ""
            yield _weighed("softmax-axis", words + how, seeing(mask, fill, axis), *also, sees=sees, rare=bool(id))
    words = "the mask is multiplied in after softmax, so the weights no longer sum to one"
    yield _weighed("mask-multiplied", words, _visibly(lambda scores, seen: scores.softmax(-1) * seen))
    words = "the softmax runs over the queries (dim=-2), not over the keys, and the mask behind it"
    yield _weighed("softmax-axis", words, _visibly(lambda scores, seen: scores.softmax(-2) * seen))
    words = "the softmax runs over the queries (dim=-2), not over the keys; each query's largest is taken off before"
    yield _weighed("softmax-axis", words, _visibly(_summed_over_queries))
    words = "the mask is added to the scores as zeros and ones, which hides nothing"
    yield _weighed("mask-missing", words, _visibly(lambda scores, seen: (scores + seen).softmax(-1)))
    words = "scores weigh the values as they are, without a softmax"
    yield _weighed("softmax-missing", words, _visibly(torch.mul), sees="")
    words = "the terms of the sum over tokens are assigned, not added: the last value alone counts, with its weight"
    alone = Changed("attn.weights", lambda c, w: w * (torch.arange(w.shape[-1]) == c.tokens))
    yield _weighed("value-projection-wrong", words, alone, sees="", rare=True, shared=True)
    words = "the softmax divides by one more than the sum, as if an empty place of a cache, with a key of zeros, were seen"
    yield _weighed("cache-inconsistent", words, _visibly(_one_more), sees="", rare=True, shared=True)
