"""Values that are read by another index: how heads are cut and merged, and how many they are."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Changed
from gpt2.port.graph import ROWS, TEXT, Edits, Formula, Model, Site, State, right_scale, split

AXES = {"B": "batch", "H": "head", "T": "token", "K": "unit"}  # of the heads' results (B, H, T, K)
# How heads are cut out of the width (B, T, D), and merged: the axes as which memory is read, words, and what a token depends on.
LAYOUTS = {
    "BHTK": ("heads are cut out by view(B, H, T, K) without a transpose, which mixes positions and heads", TEXT),
    "BTKH": ("a head is made of every n_head-th column, not of neighbouring ones", ""),
}
SUBSETS = ("q", "k", "v", "qk", "kv", "qv")
MERGED = {"BHTK": "heads are put side by side without transposing back, which mixes positions and heads"}


def _cut(order: str, letter: str, c: Site, s: State) -> Tensor:
    y, heads = s[f"attn.{letter}"], c.config.n_head
    sizes = {"B": len(y), "H": heads, "T": y.shape[1], "K": y.shape[2] // heads}
    return y.reshape([sizes[axis] for axis in order]).permute([order.index(axis) for axis in AXES])


def _merged(order: str, exchanged: bool, mixed: Tensor) -> Tensor:
    """Return (B, H, T, K) as (B, T, D) while it lies in memory as ``order``; ``exchanged``: rows and heads are, before."""
    rows, heads, tokens, size = mixed.shape
    mixed = mixed.reshape(heads, rows, tokens, size).transpose(0, 1) if exchanged else mixed
    return mixed.permute(["BHTK".index(axis) for axis in order]).reshape(rows, tokens, -1)


def _merging(order: str, exchanged: bool = False) -> Edits:
    return {"attn.heads": lambda c, s: _merged(order, exchanged, s["attn.mixed"])}


def layouts(model: Model) -> Iterator[Alternative]:
    """Yield other ways to cut the width into heads and to merge them."""
    rows, heads = len(model.ids), model.config.n_head
    for order, (words, sees) in LAYOUTS.items():
        cut: dict[str, Formula] = {f"attn.{one}h": partial(_cut, order, one) for one in "qkv"}
        yield Alternative("head-layout", words, cut, sees=sees)
        yield Alternative("head-layout", MERGED.get(order, f"merged as if {words}"), _merging(order), sees=sees)
        yield Alternative("head-layout", f"{words}, and merged in the same way", {**cut, **_merging(order)}, sees=sees)
        for letters in SUBSETS:
            some = {f"attn.{one}h": cut[f"attn.{one}h"] for one in letters}
            yield Alternative("head-layout", f"of {', '.join(letters)}: {words}", some, rare=True, shared=True, sees=sees)
    numbers = torch.arange(model.ids.numel() * model.config.n_embd).reshape(rows, heads, model.ids.shape[1], -1)
    known = [_merged(order, False, numbers) for order in ("BTHK", *LAYOUTS)]  # the first is GPT-2's
    for order, exchanged in itertools.product(map("".join, itertools.permutations(AXES)), (False, True)):
        made = _merged(order, exchanged, numbers)
        if not any(torch.equal(made, other) for other in known):
            known.append(made)
            words = "rows and heads, which are one axis, are taken for heads and rows, and " if exchanged else ""
            words += "the heads' results are viewed as (B, T, D) while they lie in memory as "
            words += f"({', '.join(AXES[axis] for axis in order)})"
            sees = ROWS if rows > 1 else TEXT
            yield Alternative("head-layout", words, _merging(order, exchanged), rare=True, sees=sees)


def head_counts(model: Model) -> Iterator[Alternative]:
    """Yield other numbers of heads, with their own factor of the scores and with GPT-2's."""
    own, width = model.config.n_head, model.config.n_embd
    for heads in (n for n in range(1, width + 1) if width % n == 0 and n != own):
        words = f"attention has {heads} heads, the checkpoint {own}"
        if heads == 1:
            words = f"attention has one head, as wide as the stream, and no split into heads; the checkpoint has {own}"
        fix, rare = f"n_head={own}  # each {model.config.head_dim} wide", heads not in (1, 2 * own)
        cut: dict[str, Formula] = {f"attn.{one}h": lambda c, s, n=heads, q=f"attn.{one}": split(s[q], n) for one in "qkv"}
        factor = Changed("attn.scores", lambda c, y, heads=heads: y * (heads / width) ** 0.5 / right_scale(c.config, c.layer))
        yield Alternative("head-layout", words, {**cut, "attn.scores": factor}, fix=fix, rare=rare)
        yield Alternative("head-layout", f"{words}, with the factor of {own} heads", cut, fix=fix, rare=rare)
