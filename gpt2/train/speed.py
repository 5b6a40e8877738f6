"""What matrix products can do here, measured as a run begins: the choice of its precision, and the yardstick of its pace.

Not from a data sheet, whose figure nobody has seen on their own machine: bfloat16 is half as fast as float32 on one device (an
AVX-512 CPU without AMX) and many times as fast on the next.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from gpt2.config import GPT2Config
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
WORTH = 1.3  # how much faster bfloat16 products must be, because its casts, and all that is no product, make no one faster
LEAST_WIDTH = 128  # of a narrower model the products are not what takes the time, and their speed says nothing
BUDGET = 0.1  # seconds for the speed of one dtype


def settled(recipe: Recipe, config: object, ranks: Ranks) -> tuple[Recipe, str]:
    """``recipe`` with the precision "auto" decided, once and for the whole run, and a line that says why."""
    if recipe.precision != "auto":
        return recipe, ""
    if not _tells(config):
        return replace(recipe, precision="float32"), "precision float32: products this narrow gain nothing from another"
    single, low = (gemm_rate(config, ranks.part(recipe), ranks.device, name) for name in DTYPES)
    chosen = "bf16" if low > WORTH * single else "float32"
    rates = f"bfloat16 products {low / 1e9:,.0f} GFLOP/s, float32 {single / 1e9:,.0f}"
    return replace(recipe, precision=chosen), f"precision {chosen}: {rates} (measured here; bf16 must be {WORTH} times as fast)"


def tokens_at_peak(recipe: Recipe, config: object, ranks: Ranks) -> float:
    """Tokens a second, of all ranks, if a step were nothing but its products, each as fast as the feed-forward's measured alone;
    0 where that says nothing: of a narrow model, or one most of whose weights are frozen.
    """
    if not _tells(config) or recipe.lora.r:
        return 0.0
    rate = gemm_rate(config, ranks.part(recipe), ranks.device, recipe.precision)
    return ranks.size * rate / operations(config, recipe.context)


def operations(config: GPT2Config, context: int) -> float:
    """Multiplications and additions for one token of a training step: every product on the way forward, and twice as much on the
    way back; of causal attention the half that is needed; nothing for what is computed again.
    """
    d, f = config.n_embd, config.inner
    block = 2 * (4 * d * d + 2 * d * f) + 2 * (context + 1) * d
    return 3.0 * (config.n_layer * block + 2 * d * config.vocab_size)


def gemm_rate(config: GPT2Config, recipe: Recipe, device: torch.device, precision: str) -> float:
    """Operations a second of the feed-forward's product, all tokens of one part of a batch at once; the best of several."""
    rows = recipe.batch_size // recipe.grad_accum * recipe.context
    a, b = (
        torch.ones(shape, dtype=DTYPES[precision], device=device)
        for shape in ((rows, config.n_embd), (config.n_embd, config.inner))
    )
    out, best, end = torch.mm(a, b), float("inf"), time.perf_counter() + BUDGET
    while best == float("inf") or time.perf_counter() < end:
        begin = _now(device)
        torch.mm(a, b, out=out)
        best = min(best, _now(device) - begin)
    return 2 * rows * b.numel() / best


def _tells(config: object) -> bool:
    return isinstance(config, GPT2Config) and config.n_embd >= LEAST_WIDTH


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
