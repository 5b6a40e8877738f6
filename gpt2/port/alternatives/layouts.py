"""Values that are read by another index: how heads are cut and merged, and how many they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Changed, family
from gpt2.port.graph import ROWS, TEXT, Edits, Formula, Model, Site, State, right_scale, split

AXES = {"B": "batch", "H": "head", "T": "token", "K": "unit"}  # of the heads' results (B, H, T, K)
# How heads are cut out of the width (B, T, D): words, the axes as which its memory is read, with time first before, those as
# which heads are merged in the same way, and what a token's value depends on.
LAYOUTS = (
    ("heads are cut out by view(B, H, T, K) without a transpose, which mixes positions and heads", "BHTK", False, "BHTK", TEXT),
    ("a head is made of every n_head-th column, not of neighbouring ones", "BTKH", False, "BTKH", ""),
    ("heads are cut out of (T, B, D) by a view, which mixes positions, rows and heads", "BHTK", True, "TBHK", ROWS),
)
SUBSETS = ("q", "k", "v", "qk", "kv", "qv")
MERGED = {"BHTK": "heads are put side by side without transposing back, which mixes positions and heads"}


def _cut(order: str, turned: bool, letter: str, c: Site, s: State) -> Tensor:
    y, heads = s[f"attn.{letter}"], c.config.n_head
    sizes = {"B": len(y), "H": heads, "T": y.shape[1], "K": y.shape[2] // heads}
    y = y.transpose(0, 1) if turned else y
    return y.reshape([sizes[axis] for axis in order]).permute([order.index(axis) for axis in AXES])


def _merged(order: str, exchanged: bool, mixed: Tensor) -> Tensor:
    """Return (B, H, T, K) as (B, T, D) while it lies in memory as ``order``; ``exchanged``: rows and heads are, before."""
    rows, heads, tokens, size = mixed.shape
    mixed = mixed.reshape(heads, rows, tokens, size).transpose(0, 1) if exchanged else mixed
    return mixed.permute(["BHTK".index(axis) for axis in order]).reshape(rows, tokens, -1)


def _merging(order: str, exchanged: bool = False) -> Edits:
    return {"attn.heads": lambda c, s: _merged(order, exchanged, s["attn.mixed"])}


@family
def layouts(model: Model) -> Iterator[Alternative]:
    """Yield other ways to cut the width into heads and to merge them, and heads that attend to each other."""
    rows, heads = len(model.ids), model.config.n_head
    for words, order, turned, back, sees in LAYOUTS:
        cut: dict[str, Formula] = {f"attn.{one}h": partial(_cut, order, turned, one) for one in "qkv"}
        yield Alternative("head-layout", words, cut, sees=sees)
        yield Alternative("head-layout", MERGED.get(back, f"merged as if {words}"), _merging(back), sees=sees)
        yield Alternative("head-layout", f"{words}, and merged in the same way", {**cut, **_merging(back)}, sees=sees)
        for letters in SUBSETS:
            some = {f"attn.{one}h": cut[f"attn.{one}h"] for one in letters}
            yield Alternative("head-layout", f"of {', '.join(letters)}: {words}", some, rare=True, shared=True, sees=sees)
    numbers = torch.arange(model.ids.numel() * model.config.n_embd).reshape(rows, heads, model.ids.shape[1], -1)
    known = [_merged(order, False, numbers) for order in ("BTHK", *(layout[3] for layout in LAYOUTS))]  # the first is GPT-2's
    for order, exchanged in itertools.product(map("".join, itertools.permutations(AXES)), (False, True)):
        made = _merged(order, exchanged, numbers)
        if not any(torch.equal(made, other) for other in known):
            known.append(made)
            words = "rows and heads, which are one axis, are taken for heads and rows, and " if exchanged else ""
            words += "the heads' results are viewed as (B, T, D) while they lie in memory as "
            words += f"({', '.join(AXES[axis] for axis in order)})"
            sees = ROWS if rows > 1 else TEXT
            yield Alternative("head-layout", words, _merging(order, exchanged), rare=True, sees=sees)
    for masked, how in ((True, ", each those before it and itself"), (False, "")) if heads > 1 else ():
        words = f"the heads of one token attend to each other{how}, not the tokens"
        yield Alternative("head-layout", words, {"attn.heads": partial(_across, masked)}, rare=True, shared=True)


def _across(masked: bool, c: Site, s: State) -> Tensor:
    q, k, v = (split(s[f"attn.{one}"], c.config.n_head).transpose(1, 2) for one in "qkv")
    scores = q @ k.mT * right_scale(c.config, c.layer)  # (B, T, H, H)
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1) & masked
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).flatten(2)


@family
def head_counts(model: Model) -> Iterator[Alternative]:
    """Yield other numbers of heads, with their own factor of the scores and with GPT-2's."""
    own, width = model.config.n_head, model.config.n_embd
    for heads in (n for n in range(1, width + 1) if width % n == 0 and n != own):
        words = f"attention has {heads} heads, the checkpoint {own}"
        if heads == 1:
            words = f"attention has one head, as wide as the stream, and no split into heads; the checkpoint has {own}"
        fix, rare = f"n_head={own}  # each {model.config.head_dim} wide", heads not in (1, 2 * own)
        cut: dict[str, Formula] = {f"attn.{one}h": partial(_split, one, heads) for one in "qkv"}
        factor = Changed("attn.scores", lambda c, y, heads=heads: y * (heads / width) ** 0.5 / right_scale(c.config, c.layer))
        yield Alternative("head-layout", words, {**cut, "attn.scores": factor}, fix=fix, rare=rare)
        yield Alternative("head-layout", f"{words}, with the factor of {own} heads", cut, fix=fix, rare=rare)


def _split(letter: str, heads: int, c: Site, s: State) -> Tensor:
    return split(s[f"attn.{letter}"], heads)
