"""Ways to compute the same logits: together or alone, padded, with a cache, with another attention function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpt2.decoder import Decoder
from gpt2.model import GPT2, AttentionFunction

PADDING = 7  # an odd number, so that rows begin at another place in memory
PIECE = 32  # tokens that are read at a time with a cache

Run = Callable[[Tensor], Tensor]  # rows of ids (R, T) -> logits (R, T, V)


def alone(model: GPT2) -> Run:
    """Run each row by itself: the baseline."""
    return lambda rows: torch.cat([model(row[None]) for row in rows])


def together(model: GPT2) -> Run:
    return lambda rows: model(rows)


def padded(model: GPT2) -> Run:
    """Run each row with padding on its left."""

    def run(rows: Tensor) -> Tensor:
        wide = torch.cat((rows.new_zeros(len(rows), PADDING), rows), dim=1)
        mask = torch.ones_like(wide)
        mask[:, :PADDING] = 0
        return torch.cat([model(row[None], attention_mask=real[None])[:, PADDING:] for row, real in zip(wide, mask, strict=True)])

    return run


def in_pieces(model: GPT2) -> Run:
    """Read the rows with a cache, some tokens at a time."""

    def run(rows: Tensor) -> Tensor:
        cache = model.new_cache(len(rows), rows.size(1))
        return torch.cat([model(piece, cache=cache) for piece in rows.split(PIECE, dim=1)], dim=1)

    return run


def one_at_a_time(model: GPT2) -> Run:
    """Read the rows as generation does: with a cache, one token at a time."""
    decoder = Decoder(model)

    def run(rows: Tensor) -> Tensor:
        cache = model.new_cache(len(rows), rows.size(1))
        first = decoder.prefill(rows[:, :1], cache)[:, None]
        return torch.cat([first, *(decoder.decode(column, cache) for column in rows[:, 1:].split(1, dim=1))], dim=1)

    return run


@contextmanager
def attending(model: GPT2, attend: AttentionFunction) -> Iterator[None]:
    """Compute attention with ``attend`` for the time of the ``with`` block."""
    before = [block.attn.attend for block in model.h]
    try:
        model.use_attention(attend)
        yield
    finally:
        for block, attention in zip(model.h, before, strict=True):
            block.attn.attend = attention
