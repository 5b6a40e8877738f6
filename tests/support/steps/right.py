"""Right training steps of many kinds: each is AdamW with decay on matrices and embeddings, in another author's way."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from support.ports import logits
from support.steps import SCHEDULE, SETTINGS, Step, made_with
from support.steps.plain import rate

V = 67  # vocabulary of support.faulty.CONFIG
RIGHT_STEPS: dict[str, Step] = {}


def right(name: str, kind: str = "ours", *, slow: bool = False, **changes: float | str) -> Callable:
    def register(make: Callable) -> Callable:
        RIGHT_STEPS[name] = Step(make, kind, replace(SETTINGS, **changes), slow=slow)
        return make

    return register


def groups(model, s):
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if (p.ndim > 1) is on], "weight_decay": s.weight_decay * on} for on in (True, False)
    ]


def adamw(model, s, **options):
    return torch.optim.AdamW(groups(model, s), lr=s.lr, betas=(s.beta1, s.beta2), **options)


def loss_of(model, x, y):
    return F.cross_entropy(logits(model, x, V).flatten(0, 1), y.flatten())


def plain(s, new_optimizer=adamw, loss=loss_of, prepare=lambda model: model, scheduler=None):
    """`make_step` of a plain step; each argument is what one variety does in its own way."""

    def make_step(model):
        trained = prepare(model.train())
        optimizer = new_optimizer(model, s)
        schedule = scheduler(optimizer, s) if scheduler else None

        def step(x, y):
            optimizer.zero_grad()
            total = loss(trained, x, y)
            total.backward()
            if s.clip:
                nn.utils.clip_grad_norm_(model.parameters(), s.clip)
            optimizer.step()
            if schedule:
                schedule.step()
            return total.detach()

        return step

    return make_step


def shifts_by_itself(model, x, y):
    """As a library whose model takes labels equal to its ids: the whole row of T + 1 goes in."""
    row = torch.cat([x, y[:, -1:]], dim=1)
    return F.cross_entropy(model(row)[:, :-1].flatten(0, 1), row[:, 1:].flatten())


def summed(model, x, y):
    return sum(loss_of(model, *part) / 2 for part in zip(x.chunk(2), y.chunk(2), strict=True))


def within_backward(model, s):
    """Each parameter has an optimizer of its own, which updates it as soon as its gradient is there."""
    for p in model.parameters():
        own = torch.optim.AdamW([p], lr=s.lr, betas=(s.beta1, s.beta2), weight_decay=s.weight_decay * (p.ndim > 1))
        p.register_post_accumulate_grad_hook(lambda p, own=own: own.step() or own.zero_grad())
    return Mock()  # an optimizer with nothing left to do


def cosine(optimizer, s):
    return LambdaLR(optimizer, lambda n: rate(n, s) / s.lr)


right("groups", "nano")(plain)
right("groups, fused", "encoder_layer")(lambda s: plain(s, lambda model, s: adamw(model, s, fused=True)))
right("no clipping", "nano", clip=0.0)(plain)
right("prompts left out, other betas and rate", "nano", padded="x", lr=6e-4, min_lr=6e-4, beta1=0.8, weight_decay=0.01)(plain)
right("the model's own loss", "nano")(lambda s: plain(s, loss=lambda model, x, y: model(x, y)[1]))
right("shifts by itself, over one more token")(lambda s: plain(s, loss=shifts_by_itself))
right("losses of two parts summed, one backward pass", "nano", grad_accum=2)(lambda s: plain(s, loss=summed))
right("autocast", "nano")(lambda s: plain(s, loss=torch.autocast("cpu", torch.bfloat16)(loss_of)))
right("torch.compile", "mha", slow=True)(lambda s: plain(s, prepare=lambda model: torch.compile(model, backend="aot_eager")))
right("by hand, prompts left out", "nano", grad_accum=2, padded="x")(lambda s: made_with("", s))
right("update within the backward pass", "mha", clip=0.0)(lambda s: plain(s, within_backward))
right("warm-up, then cosine", "mha", **SCHEDULE)(lambda s: plain(s, scheduler=cosine))
