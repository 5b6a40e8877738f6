"""AdamW with its parameter groups, and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from gpt2.train.recipe import Optim


def learning_rate(step: int, steps: int, optim: Optim) -> float:
    """Return the rate at ``step`` (from 0) of ``steps``: linear warm-up to ``lr``, then cosine decay to ``min_lr``."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    progress = (step - optim.warmup) / max(1, steps - optim.warmup)
    return optim.min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * (optim.lr - optim.min_lr)


def adamw(model: nn.Module, optim: Optim) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov and Hutter, 2019) with weight decay on matrices and embeddings, not on biases and norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=True)
