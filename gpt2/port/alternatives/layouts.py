"""Values that are read by another index: how heads are cut and merged, and how many they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Changed, family
from gpt2.port.graph import ROWS, TEXT, Edits, Formula, Model, Site, State, right_scale, split

AXES = {"batch": 0, "head": 1, "token": 2, "unit": 3}  # of the heads' results (B, H, T, K)
SUBSETS = ("q", "k", "v", "qk", "kv", "qv")
MERGED = "heads are put side by side without transposing back, which mixes positions and heads"


class HeadLayout(Enum):
    """How heads are cut out of the width; the value describes the fault."""

    RIGHT = ""
    VIEWED = "heads are cut out by view(B, H, T, K) without a transpose, which mixes positions and heads"
    INTERLEAVED = "a head is made of every n_head-th column, not of neighbouring ones"
    TIME_FIRST = "heads are cut out of (T, B, D) by a view, which mixes positions, rows and heads"

    def split(self, y: Tensor, heads: int) -> Tensor:
        """Split (B, T, D) into (B, H, T, K)."""
        batch, tokens, _ = y.shape
        return {
            HeadLayout.RIGHT: y.unflatten(-1, (heads, -1)).transpose(1, 2),
            HeadLayout.VIEWED: y.reshape(batch, heads, tokens, -1),
            HeadLayout.INTERLEAVED: y.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2),
            HeadLayout.TIME_FIRST: y.transpose(0, 1).reshape(batch, heads, tokens, -1),
        }[self]

    def merge(self, y: Tensor) -> Tensor:
        """Merge (B, H, T, K) into (B, T, D)."""
        batch, _, tokens, _ = y.shape
        return {
            HeadLayout.RIGHT: y.transpose(1, 2).flatten(2),
            HeadLayout.VIEWED: y.reshape(batch, tokens, -1),
            HeadLayout.INTERLEAVED: y.permute(0, 2, 3, 1).flatten(2),
            HeadLayout.TIME_FIRST: y.permute(2, 0, 1, 3).reshape(batch, tokens, -1),
        }[self]


def _cut(layout: HeadLayout, letters: str) -> dict[str, Formula]:
    def formula(letter: str) -> Formula:
        return lambda c, s: layout.split(s[f"attn.{letter}"], c.config.n_head)

    return {f"attn.{letter}h": formula(letter) for letter in letters}


@family
def layouts(model: Model) -> Iterator[Alternative]:
    """Yield other ways to cut the width into heads and to merge them."""
    for layout in HeadLayout:
        if layout is HeadLayout.RIGHT:
            continue
        sees = ROWS if layout is HeadLayout.TIME_FIRST else "" if layout is HeadLayout.INTERLEAVED else TEXT
        merging: Edits = {"attn.heads": lambda c, s, layout=layout: layout.merge(s["attn.mixed"])}
        yield Alternative("head-layout", layout.value, _cut(layout, "qkv"), sees=sees)
        yield Alternative(
            "head-layout", MERGED if layout is HeadLayout.VIEWED else f"merged as if {layout.value}", merging, sees=sees
        )
        words = f"{layout.value}, and merged in the same way"
        yield Alternative("head-layout", words, {**_cut(layout, "qkv"), **merging}, sees=sees)
        for letters in SUBSETS:
            words = f"of {', '.join(letters)}: {layout.value}"
            yield Alternative("head-layout", words, _cut(layout, letters), rare=True, shared=True, sees=sees)


@family
def merges(model: Model) -> Iterator[Alternative]:
    """Yield heads whose results are put together from memory with axes in another order, and heads that attend to each other."""
    rows, heads = len(model.ids), model.config.n_head
    numbers = torch.arange(model.ids.numel() * model.config.n_embd).reshape(rows, heads, model.ids.shape[1], -1)
    known = [layout.merge(numbers) for layout in HeadLayout]  # GPT-2's own, and those above
    for order, exchanged in itertools.product(itertools.permutations(AXES), (False, True)):
        way = partial(_in_memory, order, exchanged)
        made = way(numbers)
        if any(torch.equal(made, other) for other in known):
            continue
        known.append(made)
        words = "rows and heads, which are one axis, are taken for heads and rows, and " if exchanged else ""
        words += f"the heads' results are viewed as (B, T, D) while they lie in memory as ({', '.join(order)})"
        edits: Edits = {"attn.heads": lambda c, s, way=way: way(s["attn.mixed"])}
        yield Alternative("head-layout", words, edits, rare=True, sees=ROWS if rows > 1 else TEXT)
    for masked, words in ((True, ", each those before it and itself"), (False, "")) if heads > 1 else ():
        detail = f"the heads of one token attend to each other{words}, not the tokens"
        yield Alternative("head-layout", detail, {"attn.heads": partial(_across, masked)}, rare=True, shared=True)


def _in_memory(order: tuple[str, ...], exchanged: bool, mixed: Tensor) -> Tensor:
    rows, heads, tokens, size = mixed.shape
    mixed = mixed.reshape(heads, rows, tokens, size).transpose(0, 1) if exchanged else mixed
    return mixed.permute([AXES[one] for one in order]).reshape(rows, tokens, -1)


def _across(masked: bool, c: Site, s: State) -> Tensor:
    q, k, v = (split(s[f"attn.{one}"], c.config.n_head).transpose(1, 2) for one in "qkv")
    scores = q @ k.mT * right_scale(c.config, c.layer)  # (B, T, H, H)
    if masked:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1) @ v).flatten(2)


@family
def head_counts(model: Model) -> Iterator[Alternative]:
    """Yield other numbers of heads, with their own factor of the scores and with GPT-2's."""
    own, width = model.config.n_head, model.config.n_embd
    for heads in (n for n in range(1, width + 1) if width % n == 0 and n != own):
        words = f"attention has {heads} heads, the checkpoint {own}"
        if heads == 1:
            words = f"attention has one head, as wide as the stream, and no split into heads; the checkpoint has {own}"
        fix = f"n_head={own}  # each {model.config.head_dim} wide"
        cut: dict[str, Formula] = {f"attn.{one}h": _split(one, heads) for one in "qkv"}
        factor = Changed("attn.scores", lambda c, y, heads=heads: y * (heads / width) ** 0.5 / right_scale(c.config, c.layer))
        rare = heads not in (1, 2 * own)
        yield Alternative("head-layout", words, {**cut, "attn.scores": factor}, fix=fix, rare=rare)
        yield Alternative("head-layout", f"{words}, with the factor of {own} heads", cut, fix=fix, rare=rare)


def _split(letter: str, heads: int) -> Formula:
    return lambda c, s: split(s[f"attn.{letter}"], heads)
