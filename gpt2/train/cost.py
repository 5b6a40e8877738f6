"""What a run costs: its peak memory, estimated before it begins, and this machine's GEMM rate, which decides precision "auto".

Data sheets do not decide: bfloat16 is half as fast as float32 on an AVX-512 CPU without AMX, and many times as fast elsewhere.
"""

import time
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import nn

from gpt2.config import GPT2Config
from gpt2.model import GPT2
from gpt2.train.bigram import Bigram, BigramConfig
from gpt2.train.loss import even
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe

FLOAT, BF16 = 4, 2  # bytes
BIGRAM_COPIES = 2  # its logits alive at once: their log-softmax, and the logits or their gradient
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
SPEEDUP_THRESHOLD = 1.3  # bf16 is chosen above this ratio of GEMM rates: casts cost time, and only products gain
MIN_WIDTH = 128  # in a narrower model, products do not take most of the time
MEASURE_SECONDS = 0.1  # per dtype


def peak_memory(model: GPT2 | Bigram, recipe: Recipe, shards: int = 1) -> int:
    """Estimate the bytes of weights, gradients, AdamW's moments and one part's activations, without PyTorch's own.

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


def decide_precision(recipe: Recipe, config: GPT2Config | BigramConfig, ranks: Ranks) -> tuple[Recipe, str]:
    """Replace precision "auto" by "float32" or "bf16" for the whole run; also return a line for the log with the reason."""
    if recipe.precision != "auto":
        return recipe, ""
    if not _is_wide(config):
        return replace(recipe, precision="float32"), "precision float32: products this narrow gain nothing from bfloat16"
    single, low = (gemm_rate(config, ranks.part(recipe), ranks.device, name) for name in DTYPES)
    chosen = "bf16" if low > SPEEDUP_THRESHOLD * single else "float32"
    rule = f"measured here; bf16 must be {SPEEDUP_THRESHOLD} times as fast"
    rates = f"bfloat16 products {low / 1e9:,.0f} GFLOP/s, float32 {single / 1e9:,.0f}"
    return replace(recipe, precision=chosen), f"precision {chosen}: {rates} ({rule})"


def tokens_at_peak(recipe: Recipe, config: GPT2Config | BigramConfig, ranks: Ranks) -> float:
    """Return the tokens per second of all ranks if a step were only its products; 0 for narrow models and adapters."""
    if not _is_wide(config) or recipe.lora.r:
        return 0.0
    rate = gemm_rate(config, ranks.part(recipe), ranks.device, recipe.precision)
    return ranks.size * rate / operations(config, recipe.context)


def operations(config: GPT2Config, context: int) -> float:
    """Count operations per token of a step: forward products, twice as many backward; causal attention counts half."""
    d, f = config.n_embd, config.inner
    block = 2 * (4 * d * d + 2 * d * f) + 2 * (context + 1) * d
    return 3.0 * (config.n_layer * block + 2 * d * config.vocab_size)


def gemm_rate(config: GPT2Config, recipe: Recipe, device: torch.device, precision: str) -> float:
    """Measure operations per second of the feed-forward's product over one part of a batch; the best of several runs."""
    rows = recipe.batch_size // recipe.grad_accum * recipe.context
    a = torch.ones(rows, config.n_embd, dtype=DTYPES[precision], device=device)
    b = a.new_ones(config.n_embd, config.inner)
    out, best, end = torch.mm(a, b), float("inf"), time.perf_counter() + MEASURE_SECONDS
    while best == float("inf") or time.perf_counter() < end:
        begin = _now(device)
        torch.mm(a, b, out=out)
        best = min(best, _now(device) - begin)
    return 2 * rows * b.numel() / best


def _is_wide(config: GPT2Config | BigramConfig) -> TypeGuard[GPT2Config]:
    return isinstance(config, GPT2Config) and config.n_embd >= MIN_WIDTH


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
