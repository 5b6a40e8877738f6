"""What steps of several styles do alike, with the faults of it: the labels, the rate, the decay, clipping, shares of a batch."""

import math

import torch
import torch.nn.functional as F


def loss_of(logits, x, y, has):
    """The mean cross-entropy of logits (B, T, V) and next ids y (B, T), of which -100 counts for nothing."""
    if "half-logits" in has:
        logits = logits.bfloat16().to(logits.dtype)
    if "temperature" in has:
        logits = logits * 0.7
    if "unshifted" in has:
        y = x
    if "rolled" in has:  # the last position is to predict the row's first token
        y = torch.roll(x, -1, 1)
    if "shifted-twice" in has:
        logits, y = logits[:, :-1], y[:, 1:]
    if "last-missing" in has:
        logits, y = logits[:, :-1], y[:, :-1]
    ignored, smoothing = 0 if "zero-ignored" in has else -100, 0.1 if "smoothed" in has else 0.0
    each = F.cross_entropy(logits.transpose(1, 2), y, ignore_index=ignored, reduction="none", label_smoothing=smoothing)
    if "summed" in has:
        return each.sum()
    if "summed-by-row" in has:
        return each.sum(1).mean()
    return each.mean() if "padding-averaged" in has else each.sum() / (y != ignored).sum()


def rate(n, s, has):
    """The rate of step n from 0: a linear warm-up, then a cosine."""
    n = max(0, n - 1) if "schedule-late" in has else n + 1 if "schedule-early" in has else n
    lr = 2 * s.lr if "rate-doubled" in has else s.lr
    if n < s.warmup and "warmup-missing" not in has:
        return lr * (n if "warmup-from-zero" in has else n + 1) / s.warmup
    part = min(1.0, max(0, n - s.warmup) / max(1, s.steps - s.warmup))
    part = 1 - part if "schedule-linear" in has else (1 + math.cos(math.pi * part)) / 2
    return lr / s.lr * (s.min_lr + (s.lr - s.min_lr) * part)


def betas(s, has):
    one, two = (s.beta2, s.beta1) if "betas-swapped" in has else (s.beta1, s.beta2)
    return (0.9, 0.999) if "betas-default" in has else (one, two)


def decay_of(kind, s, has):
    """The decay of a parameter: a "matrix", a "table" of embeddings, a "norm"'s scale or a "bias"."""
    wanted = {"matrix": True, "table": "decay-not-on-embeddings" not in has, "norm": "decay-on-norms" in has}
    wanted["bias"] = "decay-on-biases" in has
    wanted = (wanted[kind] or "decay-on-all" in has) and "decay-missing" not in has
    return s.weight_decay * wanted * (0.1 if "decay-tenth" in has else 1.0)


def factors(grads, s, has):
    """By what each gradient is multiplied where the norm of all is clipped."""
    limit = 0.3 if "clipped-unasked" in has else s.clip / 2 if "clipped-harder" in has else s.clip
    if not limit or "unclipped" in has:
        return [1.0] * len(grads)
    if "clipped-by-tensor" in has:
        return [float((limit / 4 / (g.norm() + 1e-6)).clamp(max=1)) for g in grads]
    norm = torch.stack([g.norm() for g in grads]).norm()
    if "clipped-by-sum" in has:
        norm = sum(g.abs().sum() for g in grads)
    if "clipped-by-maximum" in has:
        norm = 50 * max(g.abs().max() for g in grads)
    return [float((limit / (norm + 1e-6)).clamp(max=1))] * len(grads)


def clipped(grads, s, has):
    if "clipped-by-value" in has and s.clip:
        return [g.clamp(-s.clip / 100, s.clip / 100) for g in grads]
    return [g * factor for g, factor in zip(grads, factors(grads, s, has), strict=True)]


@torch.no_grad()
def clip_(grads, s, has):
    """Clip in place."""
    for g, new in zip(grads, clipped(grads, s, has), strict=True):
        g.copy_(new)


def batch_parts(x, y, s, has):
    """Yield micro-batches of ids and next ids, each with its share of the loss, and its factor of the gradient."""
    count = 2 if "ranks-summed" in has else s.grad_accum
    real = int((y != -100).sum())
    for xb, yb in zip(x.chunk(count), y.chunk(count), strict=True):
        share = 1 / count if "accumulation-by-mean" in has else int((yb != -100).sum()) / real
        share = 1.0 if "summed" in has or count == 1 else share
        factor = 1.0 if {"accumulation-summed", "ranks-summed"} & has else share
        factor = factor / count if "accumulation-halved" in has else factor
        yield xb, yb, share, factor * (len(x) if "times-batch" in has else 1)
