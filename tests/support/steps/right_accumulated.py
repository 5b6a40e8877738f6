"""Right training steps that accumulate gradients, or whose rate follows a schedule."""

from __future__ import annotations

import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from support.ports import logits
from support.steps.faults import SCHEDULE
from support.steps.reference import rate
from support.steps.right import V, loss_of, plain, right


def parts_of(count):
    """The losses of ``count`` parts of a batch."""

    def losses(model, x, y):
        return (loss_of(model, xb, yb) for xb, yb in zip(x.chunk(count), y.chunk(count), strict=True))

    return losses


def divided(count):
    return lambda model, x, y: (loss / count for loss in parts_of(count)(model, x, y))


def summed(model, x, y):
    yield sum(loss / 2 for loss in parts_of(2)(model, x, y))


right("accumulated, loss divided", "nano", grad_accum=2)(lambda s: plain(s, losses=divided(2)))
right("losses of two parts summed, one backward pass", "nano", grad_accum=2)(lambda s: plain(s, losses=summed))


@right("accumulated by tokens, prompts left out", "mha", grad_accum=2, padded="x")
@right("accumulated by tokens", "nano", grad_accum=2)
def by_tokens(s):
    def losses(model, x, y):
        count = (y != -100).sum()
        for xb, yb in zip(x.split(2), y.split(2), strict=True):
            yield F.cross_entropy(logits(model, xb, V).flatten(0, 1), yb.flatten(), reduction="sum") / count

    return plain(s, losses=losses)


def scheduled(scheduler):
    return lambda s: plain(s, scheduler=scheduler)


def factor(n, s):
    return rate(n, s) / s.lr


right("warm-up", warmup=3)(scheduled(lambda optimizer, s: LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / s.warmup))))
right("cosine", "nano", steps=6, min_lr=0.0)(scheduled(lambda optimizer, s: CosineAnnealingLR(optimizer, s.steps)))
right("warm-up, then cosine", "mha", **SCHEDULE)(scheduled(lambda optimizer, s: LambdaLR(optimizer, lambda n: factor(n, s))))
