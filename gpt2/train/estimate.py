"""Estimate the peak memory of a run before it begins."""

import torch
from torch import nn

from gpt2.config import GPT2Config
from gpt2.model import GPT2
from gpt2.train.bigram import Bigram, BigramConfig
from gpt2.train.loss import even
from gpt2.train.recipe import Recipe

FLOAT, BF16 = 4, 2  # bytes
BIGRAM_COPIES = 2  # its logits alive at once: their log-softmax, and the logits or their gradient


def peak_memory(model: GPT2 | Bigram, recipe: Recipe, shards: int = 1) -> int:
    """Estimate the bytes of weights, gradients, AdamW's moments and the activations of one part of a batch, without PyTorch's
    own.

    Measured peaks were 0.99 to 1.08 times this (gpt2's shape, float32, CPU; `tools/bench_train.py`).
    """
    casts = sum(p.numel() * BF16 for p in model.parameters() if p.ndim > 1) if recipe.precision == "bf16" else 0  # by autocast
    return lasting(model) // shards + casts + passing(model.config, recipe)


def lasting(model: nn.Module) -> int:
    """Return the bytes kept from first to last step; a trained parameter has a gradient and two moments."""
    return sum(p.numel() * FLOAT * (4 if p.requires_grad else 1) for p in model.parameters())


def passing(config: GPT2Config | BigramConfig, recipe: Recipe) -> int:
    """Return the bytes of logits, and of activations kept for the backward pass, for one of ``grad_accum`` parts of a batch."""
    tokens, precision = recipe.batch_size // recipe.grad_accum * recipe.context, BF16 if recipe.precision == "bf16" else 0
    if not isinstance(config, GPT2Config):
        return tokens * config.vocab_size * (BIGRAM_COPIES * FLOAT + precision)
    logits = len(even(torch.empty(tokens, 0), config.vocab_size)[0]) * config.vocab_size * (FLOAT + precision)
    logits += config.vocab_size * config.n_embd * precision  # the embedding's gradient from one of its parts
    return logits + tokens * kept_per_token(config, recipe)


def kept_per_token(config: GPT2Config, recipe: Recipe) -> int:
    """Return the bytes that autograd keeps per token, over all layers.

    A block of width d and feed-forward width f keeps: inputs and outputs of both norms (4 d), q, k and v (3 d), attention's
    result and its copy with merged heads (2 d), the feed-forward before and after its activation (2 f), and two dropout masks.
    Only ``attn_dropout`` keeps attention weights. Checkpointing keeps every block's input and one block.
    """
    d, f = config.n_embd, config.inner
    product = BF16 if recipe.precision == "bf16" else FLOAT  # bytes of a product's inputs and results; norms read float32
    block: float = 2 * d * FLOAT + (7 * d + 2 * f) * product + 2 * config.n_head * FLOAT  # the last: one number a row
    if recipe.dropout:
        block += 2 * d
    if recipe.attn_dropout:
        block += 3.25 * config.n_head * recipe.context * product
    blocks = config.n_layer * d * FLOAT + block if recipe.checkpointing else config.n_layer * block
    return int(blocks + 2 * d * FLOAT)
