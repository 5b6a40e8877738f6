"""Compute attention from q, k and v in ways that show no weights like GPT-2's: other axes, tiles that are not rescaled.

Shapes: q, k, v and the mixture (B, H, T, K).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpt2.port.diagnosis.search import Fault


def each_token(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Iterator[tuple[Tensor, Fault]]:
    """Yield mixtures over the heads of each token alone: axes of tokens and heads that have changed places."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))  # (B, T, H, K)
    scores = q @ k.mT * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    for words, seen in ((" that come before", scores.masked_fill(hidden, -torch.inf)), ("", scores)):
        made = seen.softmax(-1) @ v
        text = f"each token is alone: its heads attend to its other heads{words}, not tokens to tokens"
        for other, value in (("", made), ("; what comes out is in another order", made.transpose(1, 2).reshape(made.shape))):
            yield value.transpose(1, 2), Fault("head-layout", "attn", text + other)


def tiled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Iterator[tuple[Tensor, Fault]]:
    """Yield mixtures tile by tile of keys, in which what was summed before is not rescaled when the maximum grows."""
    tokens = q.shape[2]
    scores = (q @ k.mT * scale).masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
    most = scores.cummax(-1).values
    for size in range(1, tokens):
        last = (torch.arange(tokens) // size * size + size - 1).clamp(max=tokens - 1)
        stale = (scores - most[..., last]).exp().nan_to_num(0.0)  # by the largest score up to the tile's end
        right = (scores - most[..., -1:]).exp()
        for what, top, total in (("sum and mixture", stale, stale), ("the mixture", stale, right), ("the sum", right, stale)):
            words = f"keys are taken in tiles of {size}, and {what} of earlier tiles is not rescaled when the largest score grows"
            yield top @ v / total.sum(-1, keepdim=True), Fault("softmax-missing", "attn", words)
