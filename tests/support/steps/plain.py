"""A right training step as one reads it in a script: micro-batches, AdamW by hand, a schedule. Faults are patches of it."""

import math

import torch
import torch.nn.functional as F

LAST_RUN = {}


class Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx, slope):
        return slope * (ctx.saved_tensors[0] > 0)  # of a ReLU


def kind_of(name, p):
    if p.ndim > 1:
        return "table" if "wte" in name or "wpe" in name else "matrix"
    return "norm" if "ln_" in name and name.endswith("weight") else "bias"


def loss_of(model, x, y):
    logits = model(x)[0]
    logits = logits * 1.0
    labels = y.clone()
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100, label_smoothing=0.0)
    return each.sum() / (labels != -100).sum()


def rate(n, s):
    if n < s.warmup:
        return s.lr * (n + 1) / s.warmup
    part = min(1.0, (n - s.warmup) / max(1, s.steps - s.warmup))
    return s.min_lr + (s.lr - s.min_lr) * (1 + math.cos(math.pi * part)) / 2


def clip(grads, limit):
    norm = torch.stack([g.norm() for g in grads]).norm()
    for g in grads:
        if limit:
            g *= min(1.0, limit / (float(norm) + 1e-6))


class AdamW:
    def __init__(self, named, s):
        self.s, self.named, self.t, self.state = s, named, 0, {}

    def step(self, lr):
        self.t += 1
        b1, b2, eps, t = self.s.beta1, self.s.beta2, 1e-8, self.t
        for name, p in self.named:
            if p.grad is None:
                continue
            kind, g = kind_of(name, p), p.grad
            decay = self.s.weight_decay * (kind in ("table", "matrix"))
            held = self.state.setdefault(name, dict.fromkeys(("m", "v", "most"), torch.zeros_like(p)))
            held["m"] = b1 * held["m"].to(p) + (1 - b1) * g
            held["v"] = b2 * held["v"].to(p) + (1 - b2) * g * g
            held["most"] = torch.maximum(held["most"].to(p), held["v"])
            c1, c2, v = 1 - b1**t, 1 - b2**t, held["v"]
            direction = held["m"] / c1 / ((v / c2).sqrt() + eps)
            p -= lr * decay * p
            p -= lr * direction


def make(s):
    def make_step(model):
        model.train()
        params = list(model.parameters())
        optimizer, done, scale = AdamW(list(model.named_parameters()), s), [0], [1.0]

        @torch.no_grad()
        def update():
            grads = [p.grad for p in params if p.grad is not None]
            for g in grads:
                g /= scale[0]
            clip(grads, s.clip)
            optimizer.step(rate(done[0], s))

        def step(x, y):
            total, count = 0.0, int((y != -100).sum())
            model.zero_grad()
            for xb, yb in zip(x.chunk(s.grad_accum), y.chunk(s.grad_accum), strict=True):
                share = int((yb != -100).sum()) / count
                loss = loss_of(model, xb, yb)
                (loss * share * scale[0]).backward()
                total += float(loss.detach()) * share
            update()
            done[0] += 1
            return total

        return step

    return make_step
