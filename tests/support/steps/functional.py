"""Style 5: pure functions over dictionaries of arrays, explicit state, gradients by torch.func; for the port `vmapped`."""

import math
from typing import NamedTuple

import torch
from torch.func import functional_call, grad_and_value

from support.steps.faults import words

WORDS = words("""
    unshifted summed-by-row last-missing clipped-by-value unclipped clipped-by-tensor decay-coupled decay-on-all
    eps-inside uncorrected corrected-late betas-swapped accumulation-summed moments-lost schedule-early smoothed
    decay-without-rate
""")


class State(NamedTuple):
    count: int
    mu: dict
    nu: dict


def decays(name, p):
    leaf = name.rpartition(".")[2]
    return not leaf.startswith("b") and leaf not in ("offset", "scale")


def make(has, s):
    def init(params):
        zeros = {k: torch.zeros_like(p) for k, p in params.items()}
        return State(0, zeros, dict(zeros))

    def schedule(count):
        n = count + 1 if "schedule-early" in has else count
        warm = s.lr * (n + 1) / s.warmup if n < s.warmup else None
        part = min(1.0, max(0, n - s.warmup) / max(1, s.steps - s.warmup))
        return warm if warm is not None else s.min_lr + (s.lr - s.min_lr) * (1 + math.cos(math.pi * part)) / 2

    def clip(grads):
        if not s.clip or "unclipped" in has:
            return grads
        if "clipped-by-value" in has:
            return {k: g.clamp(-0.02, 0.02) for k, g in grads.items()}
        if "clipped-by-tensor" in has:
            return {k: g * torch.clamp(s.clip / 8 / (g.norm() + 1e-6), max=1.0) for k, g in grads.items()}
        norm = torch.sqrt(sum((g**2).sum() for g in grads.values()))
        return {k: g * torch.clamp(s.clip / (norm + 1e-6), max=1.0) for k, g in grads.items()}

    def update(params, grads, state):
        b1, b2 = (s.beta2, s.beta1) if "betas-swapped" in has else (s.beta1, s.beta2)
        lr, t = schedule(state.count), state.count + (2 if "corrected-late" in has else 1)
        if "decay-coupled" in has:
            grads = {k: g + s.weight_decay * params[k] if decays(k, params[k]) else g for k, g in grads.items()}
        mu = {k: b1 * m + (1 - b1) * grads[k] for k, m in state.mu.items()}
        nu = {k: b2 * v + (1 - b2) * grads[k].square() for k, v in state.nu.items()}
        one, two = (1.0, 1.0) if "uncorrected" in has else (1 - b1**t, 1 - b2**t)
        new = {}
        for k, p in params.items():
            root = torch.sqrt(nu[k] / two + 1e-8) if "eps-inside" in has else torch.sqrt(nu[k] / two) + 1e-8
            decay = s.weight_decay if (decays(k, p) or "decay-on-all" in has) and "decay-coupled" not in has else 0.0
            new[k] = p - lr * (mu[k] / one / root) - (1.0 if "decay-without-rate" in has else lr) * decay * p
        return new, State(state.count + 1, mu, nu)

    def make_step(model):
        def loss_fn(params, x, y):
            logits = functional_call(model, params, (x,))
            if "unshifted" in has:
                y = x
            if "last-missing" in has:
                logits, y = logits[:, :-1], y[:, :-1]
            log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
            wanted = torch.nn.functional.one_hot(y, logits.size(-1)).to(logits.dtype)
            if "smoothed" in has:
                wanted = 0.9 * wanted + 0.1 / logits.size(-1)
            each = -(wanted * log_p).sum(-1)
            return each.sum(1).mean() if "summed-by-row" in has else each.mean()

        params = {k: p.detach().clone() for k, p in model.named_parameters()}
        state = init(params)

        def step(x, y):
            nonlocal params, state
            if "moments-lost" in has:
                state = init(params)
            grads, total = {k: torch.zeros_like(p) for k, p in params.items()}, 0.0
            for xb, yb in zip(x.split(len(x) // s.grad_accum), y.split(len(x) // s.grad_accum), strict=True):
                found, loss = grad_and_value(loss_fn)(params, xb, yb)
                share = 1 if "accumulation-summed" in has else 1 / s.grad_accum
                grads = {k: g + found[k] * share for k, g in grads.items()}
                total += float(loss) / s.grad_accum
            params, state = update(params, clip(grads), state)
            with torch.no_grad():
                for k, p in model.named_parameters():
                    p.copy_(params[k])
            return total

        return step

    return make_step
