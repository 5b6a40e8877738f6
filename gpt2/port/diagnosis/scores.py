"""Ways in which ports cut out heads and compare tokens: GPT-2's ``q @ k.mT``, and those that are wrong.

Shapes: y (B, T, D); q, k split into heads (B, H, T, K); scores (B, H, T, T), before they are scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.causes import SCORES
from gpt2.port.diagnosis.search import Fault

PAIRS = {
    ("q", "k"): "",
    ("q", "q"): "queries are compared with queries, not with keys",
    ("k", "k"): "keys are compared with keys: there are no queries",
}
COSINE = "queries and keys are scaled to length one before they are compared (cosine attention)"


class Layout(Enum):
    """How heads are cut out of the width; the value describes the fault."""

    RIGHT = ""
    VIEWED = "heads are cut out by view(B, H, T, K) without a transpose, which mixes positions and heads"
    INTERLEAVED = "a head is made of every n_head-th column, not of neighbouring ones"
    TIME_FIRST = "heads are cut out of (T, B, D) by a view, which mixes positions, rows and heads"

    def split(self, y: Tensor, heads: int) -> Tensor:
        """Split (B, T, D) into (B, H, T, K)."""
        batch, tokens, _ = y.shape
        return {
            Layout.RIGHT: y.unflatten(-1, (heads, -1)).transpose(1, 2),
            Layout.VIEWED: y.reshape(batch, heads, tokens, -1),
            Layout.INTERLEAVED: y.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2),
            Layout.TIME_FIRST: y.transpose(0, 1).reshape(batch, heads, tokens, -1),
        }[self]

    def merge(self, y: Tensor) -> Tensor:
        """Merge (B, H, T, K) into (B, T, D)."""
        batch, _, tokens, _ = y.shape
        return {
            Layout.RIGHT: y.transpose(1, 2).flatten(2),
            Layout.VIEWED: y.reshape(batch, tokens, -1),
            Layout.INTERLEAVED: y.permute(0, 2, 3, 1).flatten(2),
            Layout.TIME_FIRST: y.permute(2, 0, 1, 3).reshape(batch, tokens, -1),
        }[self]


@dataclass(frozen=True, eq=False)
class Scoring:
    """One way to compare tokens: the layout, the heads, what is multiplied with what; ``shared``: the one head compared with.

    ``queries``, ``keys`` (B, T, D).
    """

    queries: Tensor
    keys: Tensor
    layout: Layout
    heads: int
    faults: tuple[Fault, ...] = ()
    cosine: bool = False
    shared: int | None = None

    @cached_property
    def value(self) -> Tensor:
        """Scores (B, H, T, T), not scaled."""
        q, k = (self.layout.split(y, self.heads) for y in (self.queries, self.keys))
        if self.cosine:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.shared is not None:
            k = k[:, self.shared, None]
        return q @ k.mT

    @property
    def usual_factor(self) -> float:
        """What divides the scores of heads this wide."""
        return math.sqrt(self.heads / self.queries.shape[-1])


def right_scorings(parts: dict[str, Tensor], config: GPT2Config) -> Iterator[Scoring]:
    """Yield the comparison of queries with keys in every layout, GPT-2's own first; ``parts``: q and k, (B, T, D)."""
    for layout in Layout:
        faults = (Fault("head-layout", "attn", layout.value),) if layout.value else ()
        yield Scoring(parts["q"], parts["k"], layout, config.n_head, faults)


def wrong_scorings(parts: dict[str, Tensor], config: GPT2Config) -> Iterator[Scoring]:
    """Yield other comparisons that ports make, the most likely first."""
    n_head, width = config.n_head, config.n_embd
    counts = [n_head, 1, *(n for n in range(2, width + 1) if width % n == 0 and n != n_head)]
    for heads in counts:
        for (one, other), words in PAIRS.items():
            pair = (Fault("qkv-order", "attn", words, fix=SCORES),) if words else ()
            for cosine in (False, True):
                normed = (Fault("extra-norm", "attn", COSINE, fix=SCORES),) if cosine else ()
                faults = (*_head_count(heads, config), *pair, *normed)
                if faults:
                    yield Scoring(parts[one], parts[other], Layout.RIGHT, heads, faults, cosine)
    for head in range(n_head):
        words = f"every head compares its queries with the keys of head {head}"
        fix = f"k = k.view(B, T, {n_head}, head_size).transpose(1, 2)  # keys of its own for each head"
        shared = Fault("head-layout", "attn.c_attn", words, fix=fix, share="k")
        yield Scoring(parts["q"], parts["k"], Layout.RIGHT, n_head, (shared,), shared=head)

    if len(parts["k"]) > 1:
        firsts = parts["k"][:1].expand_as(parts["k"])
        words = "every row of the batch compares its queries with the keys of the first row (axis 0)"
        yield Scoring(parts["q"], firsts, Layout.RIGHT, n_head, (Fault("batch-dependent", "attn", words),))


def _head_count(heads: int, config: GPT2Config) -> tuple[Fault, ...]:
    if heads == config.n_head:
        return ()
    words = f"attention has {heads} heads, the checkpoint {config.n_head}"
    if heads == 1:
        words = f"attention has one head, as wide as the stream, and no split into heads; the checkpoint has {config.n_head}"
    return (Fault("head-layout", "attn", words, fix=f"n_head={config.n_head}  # each {config.head_dim} wide"),)
