"""Estimate the peak memory of a run before it begins."""

import torch
from torch import nn

from gpt2.config import GPT2Config
from gpt2.model import GPT2
from gpt2.train.bigram import Bigram, BigramConfig
from gpt2.train.loss import even
from gpt2.train.recipe import Recipe

FLOAT, BF16 = 4, 2  # bytes
BIGRAM_COPIES = 2  # of its logits alive at once: their log-softmax, and the logits or their gradient


def peak_memory(model: GPT2 | Bigram, recipe: Recipe, shards: int = 1) -> int:
    """Bytes of weights, gradients, AdamW's two moments and the activations of one part of a batch, without PyTorch itself.

    `tests/train/test_estimate.py` compares its parts with what autograd keeps. Steps of gpt2's shape in float32 on a CPU peaked
    at 1.03 to 1.08 times this with 4 windows of 64, and at 0.99 times with 4 of 256 (`tools/bench_train.py`). Under FSDP, each of
    ``shards`` ranks keeps a part of weights, gradients and moments.
    """
    casts = sum(p.numel() * BF16 for p in model.parameters() if p.ndim > 1) if recipe.precision == "bf16" else 0  # by autocast
    return lasting(model) // shards + casts + passing(model.config, recipe)


def lasting(model: nn.Module) -> int:
    """Bytes that stay from the first step to the last; a trained parameter has a gradient and two moments."""
    return sum(p.numel() * FLOAT * (4 if p.requires_grad else 1) for p in model.parameters())


def passing(config: GPT2Config | BigramConfig, recipe: Recipe) -> int:
    """Bytes of logits, and of activations kept for the backward pass, for one of ``grad_accum`` parts of a batch."""
    tokens, precision = recipe.batch_size // recipe.grad_accum * recipe.context, BF16 if recipe.precision == "bf16" else 0
    if not isinstance(config, GPT2Config):
        return tokens * config.vocab_size * (BIGRAM_COPIES * FLOAT + precision)
    logits = len(even(torch.empty(tokens, 0), config.vocab_size)[0]) * config.vocab_size * (FLOAT + precision)
    logits += config.vocab_size * config.n_embd * precision  # the embedding's gradient from one of its parts
    return logits + tokens * kept_per_token(config, recipe)


def kept_per_token(config: GPT2Config, recipe: Recipe) -> int:
    """Bytes that autograd keeps of one token in all layers; with checkpointing, each block's input and one whole block.

    A block of width d and feed-forward f keeps: the inputs of both norms (2 d), their outputs (2 d), q, k and v (3 d),
    attention's result and its copy with merged heads (2 d), the feed-forward before and after its activation (2 f); with dropout,
    two masks of one byte an entry. Attention weights are kept only with ``attn_dropout``, which prevents the fused kernel: then
    three times and with their mask, for n_head heads and ``context`` tokens.
    """
    d, f = config.n_embd, config.inner
    product = BF16 if recipe.precision == "bf16" else FLOAT  # of a product's inputs and results; norms read float32
    block: float = 2 * d * FLOAT + (7 * d + 2 * f) * product + 2 * config.n_head * FLOAT  # the last: one number a row
    if recipe.dropout:
        block += 2 * d
    if recipe.attn_dropout:
        block += 3.25 * config.n_head * recipe.context * product
    blocks = config.n_layer * d * FLOAT + block if recipe.checkpointing else config.n_layer * block
    return int(blocks + 2 * d * FLOAT)
