"""Other attention: factors of the scores, what is compared with what, masks, and softmaxes.

A mask says which key j a query t sees; ``a`` and ``e`` are the first token of the call and the one behind it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.port.alternative import Alternative, Changed, changed, family
from gpt2.port.diagnosis.causes import MASKED, SCORES
from gpt2.port.diagnosis.hypotheses import SCALES, TOGETHER, scale_faults
from gpt2.port.diagnosis.norms import layer_norm
from gpt2.port.diagnosis.scores import PAIRS
from gpt2.port.graph import ROWS, TEXT, Formula, Model, Site, State, right_scale, split

Mask = Callable[[Tensor, Tensor, int, int], Tensor]  # from t (T, 1) and j (S) to the visible keys (T, S)
LETTERS = {"q": "queries", "k": "keys", "v": "values"}
VALUES = {"attn.k": "the keys are mixed, not the values", "attn.q": "the queries are mixed"}
VALUES |= {"ln_1": "attention's input itself is mixed: there is no projection to values"}
VALUES |= {"x": "the stream is mixed as it is: there is no norm and no projection to values"}
MOST_TOKENS, MOST_WINDOW = 24, 64  # up to which every length of a prompt, and of a window, is tried on a small model


def lengths(model: Model, most: int = MOST_TOKENS) -> list[int]:
    """Return the lengths of a prompt, or of a window, that are tried: all of up to ``most`` tokens."""
    tokens = model.ids.shape[1]
    if tokens <= most and model.small:
        return list(range(1, tokens))
    return [1 << n for n in range(tokens.bit_length()) if 1 << n < tokens]


# The factor of the scores, and what is compared


@family
def scales(model: Model) -> Iterator[Alternative]:
    """Yield other factors of the scores."""
    config = model.config
    for label, scale in SCALES.items():
        by_layer = label == "by the layer" or config.scale_attn_by_inverse_layer_idx
        shown = 1 if by_layer and config.n_layer > 1 else 0
        found = scale_faults(config, shown, scale(config, shown), inverse_first=label == "by the layer")
        if not found:
            continue
        edit = Changed("attn.scores", lambda c, y, scale=scale: y * (scale(config, c.layer) / right_scale(config, c.layer)))
        words = [one.detail.partition(", 2")[0] if by_layer else one.detail for one in found]
        also = tuple((one.id, detail) for one, detail in zip(found[1:], words[1:], strict=True))
        same = lambda layer, scale=scale: math.isclose(scale(config, layer), right_scale(config, layer))  # noqa: E731
        yield Alternative(found[0].id, words[0], {"attn.scores": edit}, also=also, silent=same)


@family
def comparisons(model: Model) -> Iterator[Alternative]:
    """Yield other pairs of what is compared, and q and k that are normed, turned or shared."""
    config, heads = model.config, model.config.n_head
    for one, other in itertools.product("qkv", repeat=2):
        if (one, other) == ("q", "k"):
            continue
        words = PAIRS.get((one, other), f"the {LETTERS[one]} are compared with the {LETTERS[other]}")
        edits = {f"attn.{slot}h": _cut(source) for slot, source in (("q", one), ("k", other)) if slot != source}
        rare = (one, other) not in PAIRS
        yield Alternative("qkv-order", words, edits, fix=SCORES, rare=rare, shared=rare)
    for source, words in VALUES.items():
        yield Alternative("value-projection-wrong", words, {"attn.vh": _cut(source)})
    norms: Mapping[str, Callable[[Tensor], Tensor]] = {
        "scaled to length one (cosine attention)": lambda x: F.normalize(x, dim=-1),
        "normalised by a layer norm for each head": layer_norm,
        "normalised by an RMS norm for each head": partial(layer_norm, centred=False, square=True),
    }
    for (how, norm), scaled in itertools.product(norms.items(), (True, False)):
        words = f"queries and keys are {how} before they are compared" + (", and the scores are not scaled" if not scaled else "")
        edits = changed(norm, "attn.qh", "attn.kh")
        if not scaled:
            edits["attn.scores"] = Changed("attn.scores", lambda c, y: y / right_scale(config, c.layer))
        yield Alternative("extra-norm", words, edits, fix=SCORES, rare=True, shared=True)
    for head in range(heads if heads > 1 else 0):
        words = f"every head compares its queries with the keys of head {head}"
        fix = f"k = k.view(B, T, {heads}, head_size).transpose(1, 2)  # keys of its own for each head"
        edits = {"attn.kh": Changed("attn.kh", lambda c, y, head=head: y[:, [head]].expand_as(y))}
        yield Alternative("head-layout", words, edits, "attn.c_attn", fix=fix)
        words = f"every head weighs its values with the weights of head {head}"
        edits = {"attn.weights": Changed("attn.weights", lambda c, w, head=head: w[:, [min(head, w.shape[1] - 1)]].expand_as(w))}
        yield Alternative("head-layout", words, edits, rare=True, shared=True)
    if len(model.ids) > 1:
        words = "every row of the batch compares its queries with the keys of the first row (axis 0)"
        edits = {"attn.kh": Changed("attn.kh", lambda c, y: y[:1].expand_as(y))}
        yield Alternative("batch-dependent", words, edits, sees=ROWS)
    for halves, what in ((False, "neighbouring numbers"), (True, "the halves of a head")) if config.head_dim > 1 else ():
        words = f"queries and keys are turned by their position, {what} as pairs"
        edits = {node: Changed(node, lambda c, y, halves=halves: rotated(y, c.tokens, halves)) for node in ("attn.qh", "attn.kh")}
        yield Alternative("rotary-positions", words, edits, "attn", shared=True)
    words = "a number that grows with the distance of two tokens is taken from the scores (as in ALiBi)"
    yield Alternative("scale-wrong", words, {"attn.scores": Changed("attn.scores", _distant)}, shared=True)


def _cut(source: str) -> Formula:
    node = source if "_" in source or source == "x" or "." in source else f"attn.{source}"
    return lambda c, s: split(s[node], c.config.n_head)


def rotated(x: Tensor, tokens: Tensor, halves: bool) -> Tensor:
    """Return x (B, H, T, K) turned by the positions ``tokens`` (T, 1), as rotary embedding with a base of 10,000 does."""
    pairs = x.shape[-1] // 2
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    one, other = turning.chunk(2, -1) if halves else (turning[..., ::2], turning[..., 1::2])
    angle = tokens / 10000.0 ** (torch.arange(pairs) / max(pairs, 1))
    cos, sin = angle.to(x).cos(), angle.to(x).sin()
    parts = one * cos - other * sin, one * sin + other * cos
    return torch.cat([torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(-2), rest], -1)


def _distant(c: Site, scores: Tensor) -> Tensor:
    heads = scores.shape[1]
    slopes = 2.0 ** (-8.0 * (torch.arange(heads) + 1) / heads)
    return scores - (slopes[:, None, None] * (c.tokens - torch.arange(scores.shape[-1]))).to(scores)


# Masks and softmaxes

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
FILLED = ("", *list(MASKS)[1:2], list(MASKS)[3])  # masks whose hidden scores are tried with other numbers
FILLS = (0.0, 1e-9, -1e-9, -1e-5, -1.0, 1.0, -10.0, -100.0, -1000.0, 1e-20, 1e9)
# What shows only where a text is read in several calls.
IN_CALLS: dict[str, tuple[str, Mask]] = {
    "the mask begins anew in each call": ("cache-inconsistent", lambda t, j, a, e: j <= t - a),
    "a token sees those of its own call alone": ("cache-inconsistent", lambda t, j, a, e: (j <= t) & (j >= a)),
    "a token sees those of its own call alone, later ones too": ("cache-inconsistent", lambda t, j, a, e: (j >= a) & (t >= 0)),
    "in later calls, a token sees itself alone": ("cache-inconsistent", lambda t, j, a, e: (j <= t) & ((a == 0) | (j == t))),
    "in later calls, a token sees the first of all alone, as with a mask that begins anew in each step": (
        "cache-inconsistent",
        lambda t, j, a, e: (j <= t) & ((a == 0) | (j == 0)),
    ),
    "a token does not see the last one before its call": ("cache-inconsistent", lambda t, j, a, e: (j <= t) & (j != a - 1)),
}
AXES = {-2: "over the queries", 1: "over the heads", 0: "over the batch"}


def seen(c: Site, scores: Tensor, mask: Mask) -> Tensor:
    """Return the keys (t, S) that each query sees."""
    return mask(c.tokens, torch.arange(scores.shape[-1]), c.begin, c.end)


def _softmax(mask: Mask, fill: float, axis: int, c: Site, s: State) -> Tensor:
    """Return the weights; where nothing is seen, they are 0 if ``fill`` is minus infinity."""
    weights = s["attn.scores"].masked_fill(~seen(c, s["attn.scores"], mask), fill).softmax(axis)
    return weights.nan_to_num(0.0) if fill == -math.inf else weights


def _added(mask: Mask, c: Site, s: State) -> Tensor:
    """Return the weights if a large number is added to hidden scores: a token that may see nothing sees everything."""
    scores = s["attn.scores"]
    empty = ~seen(c, scores, mask).any(-1)
    return torch.where(empty[:, None], scores.softmax(-1), _softmax(mask, -1e30, -1, c, s))


def _after(mask: Mask, axis: int, c: Site, s: State) -> Tensor:
    return s["attn.scores"].softmax(axis) * seen(c, s["attn.scores"], mask)


def _weighed(
    id: str,
    words: str,
    formula: Formula,
    *also: tuple[str, str],
    sees: str = TEXT,
    rare: bool = False,
    shared: bool = False,
    steps: bool = False,
    fix: str | None = None,
) -> Alternative:
    edits = {"attn.weights": formula}
    return Alternative(id, words, edits, also=also, fix=fix, rare=rare, shared=shared, sees=sees, steps=steps)


def ahead(mask: Mask) -> bool:
    """Return whether a token sees a later one."""
    every = torch.arange(3)
    return bool(mask(every[:, None], every, 0, len(every)).triu(1).any())


@family
def masks(model: Model) -> Iterator[Alternative]:
    """Yield every mask with every number in the place of hidden scores, and the mask behind the softmax."""
    every = torch.arange(model.ids.shape[1])
    for words, (id, mask) in {"": ("", CAUSAL), **MASKS}.items():
        why = ((id, words),) if id else ()
        if id:
            yield _weighed(id, words, partial(_softmax, mask, -math.inf, -1), sees=TEXT if ahead(mask) else "")
        if not bool(mask(every[:, None], every, 0, len(every)).any(-1).all()):  # a token sees nothing
            yield _weighed(id, f"{words}; one that sees nothing sees all alike", partial(_softmax, mask, -1e30, -1))
            yield _weighed(id, f"{words}; one that sees nothing sees all", partial(_added, mask))
        for fill in FILLS if words in FILLED else ():
            number = "zero" if fill == 0 else f"{fill:g}"
            detail = f"masked scores become {number}, which softmax gives a share, instead of minus infinity"
            yield _weighed("mask-multiplied", detail, partial(_softmax, mask, fill, -1), *why, rare=bool(why))
        if words in FILLED:
            detail = "the mask is multiplied in after softmax, so the weights no longer sum to one"
            yield _weighed("mask-multiplied", detail, partial(_after, mask, -1), *why, rare=bool(why))


@family
def masks_in_calls(model: Model) -> Iterator[Alternative]:
    """Yield masks that go wrong in later calls, with every number in the place of hidden scores."""
    for words, (id, mask) in IN_CALLS.items():
        yield _weighed(id, words, partial(_softmax, mask, -math.inf, -1), steps=True)
    words = "the softmax divides by one more than the sum, as if an empty place of a cache, with a key of zeros, were seen"
    late = partial(_emptied, lambda t, a: (t >= 0) & (a > 0))
    yield _weighed("cache-inconsistent", f"in later calls, {words}", late, steps=True)


@family
def softmaxes(model: Model) -> Iterator[Alternative]:
    """Yield softmaxes over other axes, with every mask, and none at all."""
    sizes = {1: model.config.n_head, 0: len(model.ids)}
    for (axis, over), (why, (id, mask)) in itertools.product(AXES.items(), {"": ("", CAUSAL), **MASKS}.items()):
        if sizes.get(axis, 2) == 1:
            continue
        words, also = f"the softmax runs {over} (dim={axis}), not over the keys", ((id, why),) if id else ()
        sees = ROWS if axis == 0 else TEXT
        for fill, how in ((-math.inf, ""), (-1e30, "; where nothing is seen, all is alike")):
            formula = partial(_softmax, mask, fill, axis)
            yield _weighed("softmax-axis", words + how, formula, *also, sees=sees, rare=bool(also))
        if not id:
            multiplied = "mask-multiplied", "masked scores become zero, which softmax gives a share, instead of minus infinity"
            yield _weighed("softmax-axis", words, partial(_softmax, mask, 0.0, axis), multiplied, sees=sees, rare=True)
            yield _weighed("softmax-axis", f"{words}, and the mask behind it", partial(_after, mask, axis), sees=sees)
    for together, over in TOGETHER.items():
        yield _weighed(
            "softmax-axis", f"the softmax runs over {over}", partial(_over, together), sees=ROWS if 0 in together else TEXT
        )
    words = "the mask is added to the scores as zeros and ones, which hides nothing"
    yield _weighed("mask-missing", words, lambda c, s: (s["attn.scores"] + _causal(c, s)).softmax(-1))
    words = "ones are taken from the scores of later tokens, which hides nothing"
    yield _weighed("mask-missing", words, lambda c, s: (s["attn.scores"] - (~_causal(c, s)).to(s["attn.scores"])).softmax(-1))
    none = "scores weigh the values as they are, without a softmax"
    yield _weighed("softmax-missing", none, lambda c, s: s["attn.scores"] * _causal(c, s), sees="")
    words = "the scores take the place of the weights, divided by the number of tokens, without a softmax"
    yield _weighed("softmax-missing", words, lambda c, s: s["attn.scores"] * _causal(c, s) / s["attn.scores"].shape[-1])
    words = "the exponentials of the scores are not divided by their sum"
    yield _weighed("softmax-missing", words, lambda c, s: s["attn.scores"].exp() * _causal(c, s), sees="")
    largest = lambda c, s: (s["attn.scores"] - _hidden(c, s).amax(-1, keepdim=True)).exp() * _causal(c, s)  # noqa: E731
    yield _weighed("softmax-missing", f"{words}; the largest score is taken off", largest, sees="")
    words = "the softmax runs twice, the second time over its own result"
    yield _weighed("softmax-missing", words, _twice, sees="", rare=True)
    words = "the terms of the sum over tokens are assigned, not added: the last value alone counts, with its weight"
    alone = Changed("attn.weights", lambda c, w: w * (torch.arange(w.shape[-1]) == c.tokens))
    yield _weighed("value-projection-wrong", words, alone, sees="", rare=True, shared=True)


def _causal(c: Site, s: State) -> Tensor:
    return c.visible(s["attn.scores"].shape[-1])


def _hidden(c: Site, s: State) -> Tensor:
    return s["attn.scores"].masked_fill(~_causal(c, s), -math.inf)


def _twice(c: Site, s: State) -> Tensor:
    return _hidden(c, {"attn.scores": _hidden(c, s).softmax(-1)}).softmax(-1)


def _over(axes: tuple[int, ...], c: Site, s: State) -> Tensor:
    scores = _hidden(c, s)
    some = (scores - scores.amax(axes, keepdim=True)).exp()
    return some / some.sum(axes, keepdim=True)


@family
def windows(model: Model) -> Iterator[Alternative]:
    """Yield masks that hide earlier tokens, and softmaxes over empty places."""
    fix = f"{MASKED}  # no window: a token sees all tokens before it"

    def hides(words: str, visible: Mask) -> Alternative:
        mask: Mask = lambda t, j, a, e: (j <= t) & visible(t, j, a, e)  # noqa: E731
        formula = partial(_softmax, mask, -math.inf, -1)
        return _weighed("mask-strict", words, formula, sees="", fix=fix, rare=True, shared=True)

    yield replace(
        hides("a token sees the first one never, but for the first itself", lambda t, j, a, e: (j > 0) | (t == 0)), fix=None
    )
    for size in lengths(model, MOST_WINDOW):
        see = f"a token sees the last {size} tokens alone, itself among them" if size > 1 else "a token sees itself alone"
        yield hides(see, lambda t, j, a, e, n=size: j > t - n)
        yield hides(f"{see}, and the first of all", lambda t, j, a, e, n=size: (j > t - n) | (j == 0))
        if size > 1:
            words = f"a token sees those of its own {size} alone: attention runs in pieces"
            yield hides(words, lambda t, j, a, e, n=size: t // n == j // n)
            words = f"a token sees every one that is {size} before another, itself first"
            yield hides(words, lambda t, j, a, e, n=size: (t - j) % n == 0)
    words = "the softmax divides by one more than the sum, as if an empty place of a cache, with a key of zeros, were seen"
    yield _weighed("cache-inconsistent", words, partial(_emptied, lambda t, a: t >= 0), sees="", rare=True, shared=True)
    for size in sorted({model.ids.shape[1], model.config.n_positions}):
        words = f"the softmax runs over a buffer for {size} tokens, zero behind the last one, which takes a share"
        formula = partial(_emptied, lambda t, a, size=size: size - 1 - t)
        yield _weighed("mask-multiplied", words, formula, rare=True, shared=True)


def _emptied(count: Callable[[Tensor, int], Tensor], c: Site, s: State) -> Tensor:
    """Return the weights if as many keys and values of zero are seen as ``count`` gives for each query (T, 1)."""
    scores = _hidden(c, s)
    level = scores.amax(-1, keepdim=True).clamp(min=0)
    some = (scores - level).exp()
    return some / (some.sum(-1, keepdim=True) + count(c.tokens, c.begin).to(scores) * (-level).exp())
