"""Known right and wrong formulas for GPT-2's mask, softmax, scale and positions; the right one comes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.search import Fault, Formula, Kind, Option
from gpt2.port.graph import ROWS, TEXT, right_scale

OFFICIAL_SIZE = 64  # of a head, in all official models
IN_PROMPT = "in the first {} tokens alone, as in a prompt before single steps"
IN_STEPS = "from token {} on, as in steps after a prompt"
SHOWN = 8  # tokens that a message names
MOST_SPANS = 32  # tokens after which positions may begin again

# Which keys (columns) a query (row) may attend to, of T tokens; by label.
ALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "right": lambda every: every.tril(),
    "missing": lambda every: every,
    "strict": lambda every: every.tril(-1),
    "all but first strict": lambda every: every.tril(-1) | (every.cumsum(0) + every.cumsum(1) == 2),
    "ahead": lambda every: every.tril(1),
    "future": lambda every: every.triu(),
    "strict future": lambda every: every.triu(1),
}
# Axes that a softmax runs over together, with words for a message.
TOGETHER = {
    (-2, -1): "the queries and keys of a head together (dim=(-2, -1)), not over the keys of each query",
    (1, -2, -1): "all heads, queries and keys of a row together, not over the keys of each query",
    (0, 1, -2, -1): "the whole array, as without an axis, not over the keys of each query",
}
INVERTED = Fault("mask-missing", "attn", "the mask is the wrong way round: a token sees itself and the future, not the past")
ALL_INVERTED = Fault(
    "mask-missing", "attn", "the mask is the wrong way round: a token sees the future alone, not itself or the past"
)
MASK_FAULTS: dict[str, tuple[Fault, ...]] = {
    "right": (),
    "missing": (Fault("mask-missing", "attn", "every token sees the whole sequence, the future too"),),
    "strict": (Fault("mask-strict", "attn", "a token sees only what came before it, and not itself"),),
    "all but first strict": (
        Fault("mask-strict", "attn", "a token sees only what came before it, but for the first, which sees itself"),
    ),
    "ahead": (Fault("mask-off-by-one", "attn", "a token sees the one after it"),),
    "future": (INVERTED,),
    "strict future": (ALL_INVERTED,),
}


def allowed(label: str, scores: Tensor) -> Tensor:
    """Return the boolean mask (T, T) of ``label`` for scores (..., T, T)."""
    return ALLOWED[label](torch.ones(scores.shape[-2:], dtype=torch.bool))


def mask_faults(seen: Tensor) -> tuple[Fault, ...]:
    """Return what is wrong with a boolean mask (T, T), true where a query (row) sees a key; nothing if it is GPT-2's.

    A known mask may be that of a prompt alone, before single steps with a cache, or of such steps.
    """
    known = {label: allowed(label, seen) for label in MASK_FAULTS}
    label = next((label for label, mask in known.items() if torch.equal(seen, mask)), None)
    if label is not None:
        return MASK_FAULTS[label]
    wrong = (seen != known["right"]).any(1).nonzero().flatten().tolist()
    lengths = {wrong[0], wrong[-1] + 1, wrong[-1] + 2}  # of a prompt, whose last token may be right
    for count in sorted(lengths & set(range(2, len(seen)))):
        for label, mask in known.items():
            prompt, steps = known["right"].clone(), known["right"].clone()
            prompt[:count, :count], steps[count:] = mask[:count, :count], mask[count:]
            for words, one in ((IN_PROMPT, prompt), (IN_STEPS, steps)):
                if torch.equal(seen, one):
                    return tuple(replace(fault, detail=f"{words.format(count)}: {fault.detail}") for fault in MASK_FAULTS[label])
    first, right = wrong[0], known["right"]
    for whose, rows in (
        ("the first of all alone", right[:1]),
        ("as many of the first tokens as are new", right[: len(right) - first]),
    ):
        if torch.equal(seen[first:], rows.expand(len(right) - first, -1)):
            words = f"{IN_STEPS.format(first)}: a token sees {whose}, as with a mask that begins anew in each step"
            return (Fault("cache-inconsistent", "attn", words),)
    ahead = seen.triu(1).any(1)
    token = int(ahead.nonzero()[0]) if bool(ahead.any()) else wrong[0]
    others = seen[token].nonzero().flatten().tolist()
    shown = f"{', '.join(map(str, others[:SHOWN])) or 'none'}{', ...' * (len(others) > SHOWN)}"
    words = f"a mask of its own: token {token} sees only tokens {shown}"
    return (Fault("mask-missing" if bool(ahead.any()) else "mask-strict", "attn", words),)


def _masked(label: str, fill: float, axis: int = -1) -> Formula:
    return lambda scores: scores.masked_fill(~allowed(label, scores), fill).softmax(axis)


def _cleared(label: str, axis: int = -1) -> Formula:
    return lambda scores: _masked(label, -math.inf, axis)(scores).nan_to_num(0.0)


def _added(label: str) -> Formula:
    """Return the weights if a large number is added to hidden scores: a token that may see nothing sees everything."""

    def formula(scores: Tensor) -> Tensor:
        empty = ~allowed(label, scores).any(-1)
        return torch.where(empty[:, None], scores.softmax(-1), _masked(label, -1e30)(scores))

    return formula


def _lowered(by: float) -> Formula:
    return lambda scores: (scores + by * ~allowed("right", scores)).softmax(-1)


def _after(label: str, axis: int = -1) -> Formula:
    return lambda scores: scores.softmax(axis) * allowed(label, scores)


def _over(axes: tuple[int, ...]) -> Formula:
    def formula(scores: Tensor) -> Tensor:
        seen = scores.masked_fill(~allowed("right", scores), -math.inf)
        some = (seen - seen.amax(axes, keepdim=True)).exp()
        return some / some.sum(axes, keepdim=True)

    return formula


class Weighing(NamedTuple):
    """A way from scores (B, H, T, T) to attention weights; ``axis``: of the softmax."""

    label: str
    formula: Formula
    faults: tuple[Fault, ...] = ()
    cost: float = 0.0
    axis: int = -1


@cache
def weighings() -> tuple[Weighing, ...]:
    """Return the known ways of mask and softmax, the right one first."""
    out: list[Weighing] = []

    def add(label: str, formula: Formula, *faults: Fault, cost: float = 0.0, axis: int = -1) -> None:
        out.append(Weighing(label, formula, faults, cost, axis))

    def fault(id: str, detail: str) -> Fault:
        return Fault(id, "attn", detail)

    for label, why in MASK_FAULTS.items():
        add(label, _masked(label, -math.inf), *why)
        if label.startswith("strict"):  # some token sees nothing
            add(f"{label} filled", _masked(label, -1e30), *why)
            add(f"{label} cleared", _cleared(label), *why)
            add(f"{label} added", _added(label), *why)
    few = "{:g} is {} masked scores, and other scores are as low: the future is seen"
    for fill in (-1e4, -1e5, -1e9):  # GPT-2's own weights, unless scores are this large
        add(f"filled {fill:g}", _masked("right", fill), fault("mask-multiplied", few.format(fill, "put in place of")))
        add(f"added {fill:g}", _lowered(fill), fault("mask-multiplied", few.format(fill, "added to")))
    multiplied = "masked scores become {}, which softmax gives a share, instead of minus infinity"
    after = fault("mask-multiplied", "the mask is multiplied in after softmax, so the weights no longer sum to one")
    for label in ("right", "strict", "ahead"):
        for fill in (0.0, 1e-9, -1e-9, -1.0, 1.0, -10.0, -100.0, -1000.0, 1e-20, 1e9):
            detail = fault("mask-multiplied", multiplied.format("zero" if fill == 0 else f"{fill:g}"))
            add(f"{label} fill {fill:g}", _masked(label, fill), detail, *MASK_FAULTS[label])
        add(f"{label} after", _after(label), after, *MASK_FAULTS[label])
    ones = fault("mask-missing", "the mask is added to the scores as zeros and ones, which hides nothing")
    add("ones added", lambda scores: (scores + allowed("right", scores)).softmax(-1), ones)
    add("ones taken", lambda scores: (scores - (~allowed("right", scores)).to(scores)).softmax(-1), ones)
    none = fault("softmax-missing", "scores weigh the values as they are, without a softmax")
    add("no softmax", lambda scores: scores * allowed("right", scores), none)
    undivided = fault("softmax-missing", "the exponentials of the scores are not divided by their sum")
    add("undivided", lambda scores: _exponentials(scores, 0.0), undivided)
    add("undivided below the largest", lambda scores: _exponentials(scores, _largest(scores)), undivided)
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        narrow = fault("reduced-precision", f"the scores are rounded to {name} before the softmax")
        add(f"scores in {name}", partial(_rounded, dtype), narrow)
    zero = fault("mask-multiplied", multiplied.format("zero"))
    for axis, words in ((-2, "over the queries"), (1, "over the heads"), (0, "over the batch")):
        wrong = fault("softmax-axis", f"the softmax runs {words} (dim={axis}), not over the keys")
        for label, why in MASK_FAULTS.items():
            add(f"{label} axis {axis}", _masked(label, -math.inf, axis), wrong, *why, axis=axis)
            if label.startswith("strict") or (axis >= 0 and label != "missing"):  # nothing along the axis is allowed somewhere
                add(f"{label} axis {axis} cleared", _cleared(label, axis), wrong, *why, axis=axis)
            add(f"{label} axis {axis} filled", _masked(label, -1e30, axis), wrong, *why, axis=axis)
        add(f"axis {axis} multiplied", _multiplied(axis), wrong, zero, axis=axis)
        add(f"axis {axis} after", _after("right", axis), wrong, axis=axis)
    for axes, words in TOGETHER.items():
        add(f"axes {axes}", _over(axes), fault("softmax-axis", f"the softmax runs over {words}"), axis=axes[0])
    return tuple(out)


def _largest(scores: Tensor) -> Tensor:
    return scores.masked_fill(~allowed("right", scores), -math.inf).amax(-1, keepdim=True)


def _exponentials(scores: Tensor, largest: Tensor | float) -> Tensor:
    return (scores - largest).exp() * allowed("right", scores)


def _rounded(dtype: torch.dtype, scores: Tensor) -> Tensor:
    return _masked("right", -math.inf)(scores.to(dtype).to(scores))


def _multiplied(axis: int) -> Formula:
    return lambda scores: (scores * allowed("right", scores)).softmax(axis)


def attention_weights(scores: Tensor, factor: float, cost: float = 0.0) -> Iterator[Option]:
    """Yield the possible results of mask and softmax on scores (B, H, T, T); ``factor`` scaled them, ``cost`` is its price."""
    for one in weighings():
        if one.axis < 0 or scores.size(one.axis) > 1:
            kind = Kind.RIGHT if one.label == "right" else Kind.OTHER
            make = partial(one.formula, scores)
            yield Option(one.label, make, one.faults, kind=kind, cost=cost + one.cost, factor=factor)


def scale_faults(
    config: GPT2Config, layer: int, factor: float, inverse_first: bool = False, exact: bool = False
) -> tuple[Fault, ...]:
    """Return the faults that ``factor`` on the scores shows; ``inverse_first``: try the layer's number first.

    ``exact``: the factor was measured in float64, so that a constant rounded to float32 shows.
    """
    width, size, number = config.n_embd, config.head_dim, layer + 1
    root, right = 1 / math.sqrt(size), right_scale(config, layer)

    def fault(id: str, detail: str) -> Fault:
        return Fault(id, "attn", detail, "by the layer's number" if id == "scale-inverse-layer" else "")

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
    "doubled": lambda config, layer: 2 / math.sqrt(config.head_dim),
    "halved": lambda config, layer: 0.5 / math.sqrt(config.head_dim),
    "zero": lambda config, layer: 0.0,
}


def likely_scales(config: GPT2Config, layer: int) -> list[float]:
    """Return factors to try if the scores are not recorded, the right one first."""
    return list(dict.fromkeys([right_scale(config, layer), *(scale(config, layer) for scale in SCALES.values())]))


def position_rows(ids: Tensor, room: int, shifts: Iterable[int], tokens: int) -> Iterator[tuple[str, Tensor, str]]:
    """Yield other rows of a position table of ``room`` rows, (T,) or (B, T), for ids (B, T); in words, and what they depend on.

    ``shifts``: by how many rows positions are tried to be off; ``tokens``: of the whole text, of which ``ids`` may be the first.
    """
    batch, at = len(ids), torch.arange(ids.shape[1])
    for n in sorted(set(shifts)):
        if n <= room - tokens:
            yield f"positions begin at row {n}, not at 0", at + n, ""
        if n <= tokens:
            yield f"positions begin at row -{n}, the end of the table", (at - n) % room, ""
            yield f"positions lag by {n}", (at - n).clamp(min=0), ""
    yield "positions count backwards", at.flip(0), TEXT
    yield "every token is given position 0", 0 * at, ""
    words = "rows of the position table are taken by token id, not by position"
    yield words, ids.clamp(max=room - 1), ""
    yield f"{words}, modulo its length", ids % room, ""
    words = "rows of the position table are taken by the row of the batch, not by position"
    yield words, torch.arange(batch)[:, None].expand_as(ids).clamp(max=room - 1), ROWS
    yield "positions go on from one row of the batch to the next", torch.arange(ids.numel()).view(ids.shape) % room, ROWS
    yield "positions go up by 2 from one token to the next", (2 * at).clamp(max=room - 1), ""
    yield "two tokens share each position", at // 2, ""
    yield "positions run ahead by 1, and the last two are one", (at + 1).clamp(max=min(len(at), room) - 1), TEXT
    for n in range(2, min(tokens, MOST_SPANS)):
        yield f"positions begin again after each {n} tokens", at % n, ""


def sinusoids(tokens: int, width: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the usual (T, D) tables of sines and cosines."""
    places = torch.arange(tokens, dtype=torch.float64)[:, None]
    half = torch.arange((width + 1) // 2, dtype=torch.float64)
    for label, powers in (("2i/D", 2 * half / width), ("i/(D/2 - 1)", half / max(len(half) - 1, 1)), ("4i/D", 4 * half / width)):
        angles = places / 10000.0**powers
        for words, waves in (("", (angles.sin(), angles.cos())), (" from the cosine", (angles.cos(), angles.sin()))):
            yield f"interleaved{words}, {label}", torch.stack(waves, -1).flatten(1)[:, :width]
            yield f"in halves{words}, {label}", torch.cat(waves, -1)[:, :width]
    every = torch.arange(width, dtype=torch.float64)
    for label, powers in (("", every / width), (", 2i/D", 2 * every / width)):
        angles = places / 10000.0**powers
        yield f"each column of its own frequency{label}", torch.where((every % 2).bool(), angles.cos(), angles.sin())
    yield "the sines alone", (places / 10000.0 ** (2 * (every // 2) / width)).sin()
