"""How much memory a run will take, before it takes it."""

from __future__ import annotations

import torch
from torch import nn

from gpt2.config import GPT2Config
from gpt2.train.loss import even
from gpt2.train.recipe import Recipe

FLOAT, BF16 = 4, 2  # bytes
PASSED = 2  # copies of a bigram's logits alive at once: their log-softmax, and the logits or their gradient


def peak_memory(model: nn.Module, recipe: Recipe, shards: int = 1) -> int:
    """Bytes of weights, gradients, AdamW's two moments, and one part of a batch on its way through; what torch itself takes is
    not in it. Its parts are held against what autograd keeps, in `tests/train/test_estimate.py`. Steps of gpt2's shape on a CPU,
    in float32, peaked at 1.03 to 1.08 times this with 4 windows of 64, at 0.99 times with 4 of 256 (`tools/bench_train.py`).
    ``shards`` ranks keep a slice each of what stays.
    """
    casts = sum(p.numel() * BF16 for p in model.parameters() if p.ndim > 1) if recipe.precision == "bf16" else 0  # autocast's
    return standing(model) // shards + casts + passing(model.config, recipe)


def standing(model: nn.Module) -> int:
    """Bytes that stay from the first step to the last: a parameter that is trained has a gradient and two moments."""
    return sum(p.numel() * FLOAT * (4 if p.requires_grad else 1) for p in model.parameters())


def passing(config: object, recipe: Recipe) -> int:
    """Bytes of activations kept for the backward pass, and of logits, for one of ``grad_accum`` parts of a batch."""
    tokens, precision = recipe.batch_size // recipe.grad_accum * recipe.context, BF16 if recipe.precision == "bf16" else 0
    if not isinstance(config, GPT2Config):
        return tokens * config.vocab_size * (PASSED * FLOAT + precision)
    logits = len(even(torch.empty(tokens, 0), config.vocab_size)[0]) * config.vocab_size * (FLOAT + precision)
    logits += config.vocab_size * config.n_embd * precision  # the embedding's gradient from one of its parts
    return logits + tokens * kept_per_token(config, recipe)


def kept_per_token(config: GPT2Config, recipe: Recipe) -> int:
    """Bytes that autograd keeps of one token, all layers together; where blocks are computed again, of what goes into each, and
    of one block at a time.

    Of a block of width d and feed-forward f: the inputs of both norms (2 d), their outputs (2 d), q, k and v (3 d), what
    attention returns and its copy with the heads side by side (2 d), the feed-forward before and after its activation (2 f);
    with dropout, two masks of a byte an entry (d / 2). Attention weights are never kept, except where ``attn_dropout``
    takes the fused kernel away: then they are, three times and with their mask, for each of n_head heads and ``context`` tokens.
    """
    d, f = config.n_embd, config.inner
    product = BF16 if recipe.precision == "bf16" else FLOAT  # of what goes into a product or comes out; norms read float32
    block = 2 * d * FLOAT + (7 * d + 2 * f) * product + 2 * config.n_head * FLOAT  # the last: norms and softmax, a number a row
    if recipe.dropout:
        block += 2 * d
    if recipe.attn_dropout:
        block += 3.25 * config.n_head * recipe.context * product
    blocks = config.n_layer * d * FLOAT + block if recipe.checkpointing else config.n_layer * block
    return int(blocks + 2 * d * FLOAT)
