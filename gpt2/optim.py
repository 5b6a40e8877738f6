"""AdamW: its settings, its parameter groups, and the learning rate as a function of the step."""

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


def described(default: Any, meaning: str) -> Any:
    """Return the field of a key with its meaning in a line, which ``gpt2 train RECIPE --settings`` shows."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Optim:
    """AdamW with linear warm-up and cosine decay (:func:`learning_rate`)."""

    lr: float = described(1e-3, "learning rate after the warm-up")
    min_lr: float = described(1e-4, "learning rate towards which the decay goes")
    warmup: int = described(100, "steps of linear warm-up")
    beta1: float = described(0.9, "decay of AdamW's mean of gradients")
    beta2: float = described(0.99, "decay of AdamW's mean of their squares")
    weight_decay: float = described(0.1, "AdamW's decay, of matrices and embeddings")
    clip: float = described(1.0, "largest norm of all gradients together; 0: no limit")


def learning_rate(step: int, steps: int, optim: Optim) -> float:
    """Return the rate at ``step`` (from 0) of ``steps``: linear warm-up to ``lr``, then cosine decay to ``min_lr``."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    progress = (step - optim.warmup) / max(1, steps - optim.warmup)
    return optim.min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * (optim.lr - optim.min_lr)


class AdamW(torch.optim.AdamW):
    """torch's own, without the import of torch's compiler, which takes a second: ``compile=true`` compiles the model alone."""

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def adamw(model: nn.Module, optim: Optim) -> AdamW:
    """Return AdamW (Loshchilov and Hutter, 2019) with weight decay on matrices and embeddings, not on biases and norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=True)
