"""Other attention: factors of the scores, and what is compared with what."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.alternatives.alternative import Alternative, Changed, changed, family
from gpt2.port.alternatives.norm_formulas import layer_norm
from gpt2.port.graph import ROWS, Formula, Model, Site, State, right_scale, split
from gpt2.port.terms.causes import SCORES, Cause

ROUNDED = "rounded to float32"
OFFICIAL_SIZE = 64  # of a head, in all official models
PAIRS = {
    ("q", "k"): "",
    ("q", "q"): "queries are compared with queries, not with keys",
    ("k", "k"): "keys are compared with keys: there are no queries",
}
LETTERS = {"q": "queries", "k": "keys", "v": "values"}
VALUES = {"attn.k": "the keys are mixed, not the values", "attn.q": "the queries are mixed"}
VALUES |= {"ln_1": "attention's input itself is mixed: there is no projection to values"}
VALUES |= {"x": "the stream is mixed as it is: there is no norm and no projection to values"}


def scale_faults(
    config: GPT2Config, layer: int, factor: float, inverse_first: bool = False, exact: bool = False
) -> tuple[Cause, ...]:
    """Return the faults that ``factor`` on the scores shows; ``inverse_first``: try the layer's number first.

    ``exact``: the factor was measured in float64, so that a constant rounded to float32 shows.
    """
    width, size, number = config.n_embd, config.head_dim, layer + 1
    root, right = 1 / math.sqrt(size), right_scale(config, layer)

    def fault(id: str, detail: str) -> Cause:
        return Cause.at(id, "attn", detail, "by the layer's number" if id == "scale-inverse-layer" else "")

    def is_factor(value: float) -> bool:
        return math.isclose(factor, value, rel_tol=1e-7)

    if is_factor(right):
        if not exact or math.isclose(factor, right, rel_tol=1e-10):
            return ()
        return (fault("scale-wrong", f"the factor of the scores is rounded to float32: {factor:.12g} for {right:.12g}"),)
    inverse = f"the scores are also divided by the number of the layer{f', {number}' if number > 1 else ''}"
    by_layer = ("scale-inverse-layer", root / number, inverse)
    if config.scale_attn_by_inverse_layer_idx:
        by_layer = ("scale-inverse-layer", root, "the scores are not divided by the layer's number, as the config asks")
    known = [
        ("scale-missing", 1.0, "the scores are not scaled"),
        ("scale-by-width", 1 / math.sqrt(width), "the scores are divided by the root of the width n_embd"),
        ("scale-twice", 1 / size, "the scores are divided by the root of a head's size twice"),
        ("scale-twice", root / math.sqrt(width), "the scores are divided by the root of the width and of a head's size"),
        ("scale-by-width", 1 / width, "the scores are divided by the width n_embd"),
        ("scale-wrong", math.sqrt(size), "the scores are multiplied by the root of a head's size, not divided"),
        ("scale-wrong", 1 / math.sqrt(config.n_head), "the scores are divided by the root of the number of heads"),
        ("scale-wrong", 1 / math.sqrt(OFFICIAL_SIZE), f"the scores are divided by 8, as heads of {OFFICIAL_SIZE} need it"),
        ("scale-wrong", size**-0.25, "the fourth root of a head's size divides the queries or the keys alone"),
    ]
    known.insert(0 if inverse_first or config.scale_attn_by_inverse_layer_idx else len(known), by_layer)
    head_size = " (1/sqrt(head size))" if math.isclose(right, root) else ""
    wanted = f"the checkpoint's attention multiplies them by {right:.6g}{head_size}"
    if factor == 0:
        words = "the scores are multiplied by zero, as by 1 / n in integers, so that a token sees all others alike"
        return (fault("scale-wrong", f"{words}; {wanted}"),)
    for id, value, words in known:
        if is_factor(value):
            return (fault(id, f"{words}; {wanted}"),)
    for id, value, words in known[:6] if number > 1 else ():
        if is_factor(value / number):
            return fault(id, words), fault("scale-inverse-layer", inverse)
    return (fault("scale-wrong", f"the scores are multiplied by {factor:.6g}; {wanted}"),)


# Factors of the scores in a block that ports apply, the right one among them; by label.
SCALES: dict[str, Callable[[GPT2Config, int], float]] = {
    "by the head size": lambda config, layer: 1 / math.sqrt(config.head_dim),
    "none": lambda config, layer: 1.0,
    "by the width": lambda config, layer: 1 / math.sqrt(config.n_embd),
    "twice": lambda config, layer: 1 / config.head_dim,
    "by the layer": lambda config, layer: 1 / math.sqrt(config.head_dim) / (layer + 1),
    "by both": lambda config, layer: 1 / math.sqrt(config.head_dim * config.n_embd),
    "by the width, no root": lambda config, layer: 1 / config.n_embd,
    "multiplied": lambda config, layer: math.sqrt(config.head_dim),
    "by the heads": lambda config, layer: 1 / math.sqrt(config.n_head),
    "by 8": lambda config, layer: 1 / math.sqrt(OFFICIAL_SIZE),
    "on one side": lambda config, layer: config.head_dim**-0.25,
    "doubled": lambda config, layer: 2 / math.sqrt(config.head_dim),
    "halved": lambda config, layer: 0.5 / math.sqrt(config.head_dim),
    "zero": lambda config, layer: 0.0,
    ROUNDED: lambda config, layer: float(torch.tensor(right_scale(config, layer), dtype=torch.float32)),
}


@family
def scales(model: Model) -> Iterator[Alternative]:
    """Yield other factors of the scores."""
    config = model.config
    for label, scale in SCALES.items():
        by_layer = label == "by the layer" or config.scale_attn_by_inverse_layer_idx
        shown = 1 if by_layer and config.n_layer > 1 else 0
        found = scale_faults(config, shown, scale(config, shown), label == "by the layer", exact=label == ROUNDED)
        if not found:
            continue
        edit = Changed("attn.scores", lambda c, y, scale=scale: y * (scale(config, c.layer) / right_scale(config, c.layer)))
        words = [one.detail.partition(", 2")[0] if by_layer else one.detail for one in found]
        also = tuple((one.id, detail) for one, detail in zip(found[1:], words[1:], strict=True))
        same = lambda layer, scale=scale: math.isclose(scale(config, layer), right_scale(config, layer))  # noqa: E731
        yield Alternative(found[0].id, words[0], {"attn.scores": edit}, also=also, silent=same)


@family
def capped(model: Model) -> Iterator[Alternative]:
    """Yield scores with a soft cap, as Gemma 2 has."""
    for cap in (50.0, 30.0, 20.0):
        edit = Changed("attn.scores", lambda c, y, cap=cap: cap * (y / cap).tanh())
        yield Alternative(
            "scale-wrong", f"the scores have a soft cap: {cap:g} tanh(score / {cap:g})", {"attn.scores": edit}, rare=True
        )


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
    words = "the weights are averaged over the heads, and every head weighs its values with those"
    edits = {"attn.weights": Changed("attn.weights", lambda c, w: w.mean(1, keepdim=True).expand_as(w))}
    yield Alternative("head-layout", words, edits, fix="y = weights @ v  # each head with its own weights")
    if len(model.ids) > 1:
        words = "every row of the batch compares its queries with the keys of the first row (axis 0)"
        edits = {"attn.kh": Changed("attn.kh", lambda c, y: y[:1].expand_as(y))}
        yield Alternative("batch-dependent", words, edits, sees=ROWS)
        words = "attention runs over the rows of the batch, not over the tokens, as of (T, B, D)"
        fix = "nn.MultiheadAttention(..., batch_first=True)  # or x.transpose(0, 1) before it and behind it"
        for mask, what in ((True, "each row sees those before it"), (False, "each row sees all rows")):
            edits = {"attn.mixed": partial(_over_rows, mask)}
            yield Alternative("batch-dependent", f"{words}: {what}", edits, sees=ROWS, fix=fix)
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


def _over_rows(mask: bool, c: Site, s: State) -> Tensor:
    q, k, v = (s[f"attn.{name}h"].permute(2, 1, 0, 3) for name in "qkv")  # (T, H, B, K)
    scores = right_scale(c.config, c.layer) * q @ k.mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & mask
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).permute(2, 1, 0, 3)


def _distant(c: Site, scores: Tensor) -> Tensor:
    heads = scores.shape[1]
    slopes = 2.0 ** (-8.0 * (torch.arange(heads) + 1) / heads)
    return scores - (slopes[:, None, None] * (c.tokens - torch.arange(scores.shape[-1]))).to(scores)
