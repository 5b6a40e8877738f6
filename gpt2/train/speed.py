"""Measure this machine's GEMM rate when a run begins: it decides precision "auto", and is the reference for ``mfu``.

Data sheets do not decide: bfloat16 is half as fast as float32 on an AVX-512 CPU without AMX, and many times as fast elsewhere.
"""

import time
from dataclasses import replace
from typing import TypeGuard

import torch

from gpt2.config import GPT2Config
from gpt2.train.bigram import BigramConfig
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
SPEEDUP_THRESHOLD = 1.3  # bf16 is chosen above this ratio of GEMM rates: casts cost time, and only products gain
MIN_WIDTH = 128  # in a narrower model, products do not take most of the time
MEASURE_SECONDS = 0.1  # per dtype


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
    a, b = (
        torch.ones(shape, dtype=DTYPES[precision], device=device)
        for shape in ((rows, config.n_embd), (config.n_embd, config.inner))
    )
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
