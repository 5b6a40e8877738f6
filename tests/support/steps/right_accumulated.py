"""Right training steps that accumulate gradients, or whose rate follows a schedule."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from support.ports import logits
from support.steps.faults import SCHEDULE
from support.steps.right import V, adamw, loss_of, right


def accumulated(parts, divide, rows=None):
    def make(s):
        def make_step(model):
            optimizer = adamw(model.train(), s)

            def step(x, y):
                total, losses = 0.0, []
                count = (rows and len(x) // rows) or parts
                for xb, yb in zip(x.chunk(count), y.chunk(count), strict=True):
                    loss = loss_of(model, xb, yb)
                    total += loss.item() / count
                    losses.append(loss / count if divide in ("loss", "sum") else loss)
                    if divide != "sum":
                        losses.pop().backward()
                if divide == "sum":
                    sum(losses).backward()
                if divide == "gradients":
                    for p in model.parameters():
                        p.grad /= count
                if s.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), s.clip)
                optimizer.step()
                optimizer.zero_grad()
                return total

            return step

        return make_step

    return make


right("accumulated, loss divided", "nano", grad_accum=2)(accumulated(2, "loss"))
right("accumulated, gradients divided", "mha", grad_accum=2)(accumulated(2, "gradients"))
right("losses of two parts summed, one backward pass", "nano", grad_accum=2)(accumulated(2, "sum"))
right("accumulated by row", grad_accum=4, clip=0.0)(accumulated(4, "loss"))
right("ranks averaged")(accumulated(2, "gradients"))


@right("accumulated by tokens, prompts left out", "mha", grad_accum=2, prompt="prompt")
@right("accumulated by tokens", "nano", grad_accum=2)
def by_tokens(s):
    def make_step(model):
        optimizer = adamw(model.train(), s)

        def step(x, y):
            optimizer.zero_grad()
            count, total = (y != -100).sum(), 0.0
            for xb, yb in zip(x.split(2), y.split(2), strict=True):
                loss = F.cross_entropy(logits(model, xb, V).flatten(0, 1), yb.flatten(), reduction="sum") / count
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), s.clip)
            optimizer.step()
            return total

        return step

    return make_step


def scheduled(scheduler_of):
    def make(s):
        def make_step(model):
            optimizer = adamw(model.train(), s)
            scheduler = scheduler_of(optimizer, s)

            def step(x, y):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), s.clip)
                optimizer.step()
                scheduler.step()
                return loss.detach()

            return step

        return make_step

    return make


def factor(n, s):
    if n < s.warmup:
        return (n + 1) / s.warmup
    part = min(1.0, (n - s.warmup) / (s.steps - s.warmup))
    return (s.min_lr + (s.lr - s.min_lr) * 0.5 * (1 + math.cos(math.pi * part))) / s.lr


right("warm-up", warmup=3)(
    scheduled(lambda optimizer, s: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / s.warmup)))
)
right("cosine", "nano", steps=6, min_lr=0.0)(
    scheduled(lambda optimizer, s: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, s.steps))
)
right("warm-up, then cosine", "mha", **SCHEDULE)(
    scheduled(lambda optimizer, s: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: factor(n, s)))
)
