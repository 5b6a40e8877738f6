"""The right training step, computed apart from the styles and from the product: F.cross_entropy and torch.optim.AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.ports import logits
from support.steps.faults import Settings

Batch = tuple[Tensor, Tensor]


def batches(settings: Settings, count: int, vocabulary: int, seed: int = 11) -> list[Batch]:
    """Batches of ids and next ids (B, T), each other than the last; with ``padded``, some targets are -100."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(vocabulary, (settings.batch_size, settings.context + 1), generator=generator)
        ids[0, 1] = ids[1, 2] = 0  # token 0 is an ordinary token
        x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        if settings.padded:
            y[-1, 3:] = -100
            y[0, -1] = -100
        found.append((x, y))
    return found


def rate(n: int, s: Settings) -> float:
    """The rate of step ``n`` from 0: linear warm-up, then a cosine."""
    if n < s.warmup:
        return s.lr * (n + 1) / s.warmup
    done = min(1.0, (n - s.warmup) / max(1, s.steps - s.warmup))
    return s.min_lr + (s.lr - s.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def right_run(module: nn.Module, settings: Settings, data: Iterable[Batch], vocabulary: int) -> list[list[Tensor]]:
    """Parameters after each step of the right training; ``module`` is changed."""
    parameters = list(module.parameters())
    groups = [{"params": [p], "weight_decay": settings.weight_decay * (p.ndim >= 2)} for p in parameters]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), foreach=False)
    module.train()
    found = []
    for n, (x, y) in enumerate(data):
        optimizer.zero_grad()
        found_logits = logits(module, x, vocabulary)
        F.cross_entropy(found_logits.flatten(0, 1), y.flatten(), ignore_index=-100).backward()
        if settings.clip:
            nn.utils.clip_grad_norm_(parameters, settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate(n, settings)
        optimizer.step()
        found.append([p.detach().clone() for p in parameters])
    return found


def run(module: nn.Module, make_step: Callable, data: Iterable[Batch]) -> list[list[Tensor]]:
    """Parameters of ``module`` after each call of its author's step; it is changed."""
    parameters = list(module.parameters())  # before make_step, which may replace one
    step, found = make_step(module), []
    for x, y in data:
        step(x.clone(), y.clone())
        found.append([p.detach().clone() for p in parameters])
    return found


def apart(found: list[list[Tensor]], expected: list[list[Tensor]], lr: float) -> float:
    """The largest difference of a parameter after any step, in units of the learning rate."""
    return max(
        float((a - b).abs().max()) / lr
        for ours, theirs in zip(found, expected, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
