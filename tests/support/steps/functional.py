"""Style 5: pure functions over dictionaries of arrays, explicit state, gradients by torch.func; for the port `vmapped`."""

from typing import NamedTuple

import torch
from torch.func import functional_call, grad_and_value

from support.steps.faults import words
from support.steps.shared import betas, clipped, decay_of, loss_of, rate

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

    def update(params, grads, state):
        b1, b2 = betas(s, has)
        lr, t = rate(state.count, s, has), state.count + (2 if "corrected-late" in has else 1)
        decay = {k: decay_of("matrix" if decays(k, p) else "bias", s, has) for k, p in params.items()}
        if "decay-coupled" in has:
            grads, decay = {k: g + decay[k] * params[k] for k, g in grads.items()}, dict.fromkeys(decay, 0.0)
        mu = {k: b1 * m + (1 - b1) * grads[k] for k, m in state.mu.items()}
        nu = {k: b2 * v + (1 - b2) * grads[k].square() for k, v in state.nu.items()}
        one, two = (1.0, 1.0) if "uncorrected" in has else (1 - b1**t, 1 - b2**t)
        new = {}
        for k, p in params.items():
            root = torch.sqrt(nu[k] / two + 1e-8) if "eps-inside" in has else torch.sqrt(nu[k] / two) + 1e-8
            new[k] = p - lr * (mu[k] / one / root) - (1.0 if "decay-without-rate" in has else lr) * decay[k] * p
        return new, State(state.count + 1, mu, nu)

    def make_step(model):
        def loss_fn(params, x, y):
            return loss_of(functional_call(model, params, (x,)), x, y, has)

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
            grads = dict(zip(grads, clipped(list(grads.values()), s, has), strict=True))
            params, state = update(params, grads, state)
            with torch.no_grad():
                for k, p in model.named_parameters():
                    p.copy_(params[k])
            return total

        return step

    return make_step
