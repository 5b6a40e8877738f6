"""AdamW steps of the reference on one batch, with a recipe's settings: the parameters and the loss after each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gpt2.config import quoted
from gpt2.errors import InputError
from gpt2.measure.metrics import Progress
from gpt2.model import GPT2
from gpt2.traces.arrays import backward, stored
from gpt2.traces.batch import Batch
from gpt2.train.optim import adamw
from gpt2.train.recipe import Optim, build

KEYS = ("optim.lr", "optim.beta1", "optim.beta2", "optim.weight_decay", "optim.clip")


def optim_of(settings: Mapping[str, object]) -> Optim:
    """Return a recipe's optimizer with these settings (``{"optim.lr": 3e-4}``), else its defaults. Raises InputError."""
    table = {"min_lr": 0.0}  # the rate is constant
    for key, value in settings.items():
        if key not in KEYS:
            raise InputError(f"unknown setting {quoted(key)}; known are {', '.join(KEYS)}, the rate is constant")
        try:
            table[key.removeprefix("optim.")] = float(str(value))
        except ValueError:
            raise InputError(f"{key} is {quoted(str(value))}; give a number") from None
    return build({"optim": table}, "settings").optim


def described(optim: Optim) -> dict[str, object]:
    """Return all settings of the steps, as they are written beside the arrays."""
    values = {key: getattr(optim, key.removeprefix("optim.")) for key in KEYS}
    fixed = {"optimizer": "AdamW", "eps": 1e-8, "decayed": "matrices and embeddings", "rate": "constant", "dropout": 0.0}
    return {**values, **fixed}


def step(
    model: GPT2, batch: Batch, count: int, optim: Optim, dtype: torch.dtype, progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Train ``model`` in place for ``count`` steps; yield every parameter after each, and at the end all losses, (count + 1,).

    One step: gradients of the mean loss over the batch, clipped to a norm of ``optim.clip`` (0: never), then AdamW. No dropout.
    """
    optimizer = adamw(model, optim)
    losses = []
    for number in range(1, count + 1):
        progress(f"step {number} of {count}")
        optimizer.zero_grad()
        losses.append(backward(model, batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip or math.inf)
        optimizer.step()
        for name, parameter in model.named_parameters():
            yield f"step{number}.{name}", stored(parameter, dtype, name)
    losses.append(backward(model, batch))
    yield "losses", stored(torch.stack(losses), dtype, "losses")
