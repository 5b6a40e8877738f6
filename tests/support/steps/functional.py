"""A right step of pure functions over dictionaries of arrays, gradients by torch.func; for the port `vmapped`."""

import torch
from torch.func import functional_call, grad_and_value
from torch.nn.functional import cross_entropy

from support.steps.reference import rate


def decays(name, p):
    leaf = name.rpartition(".")[2]
    return not leaf.startswith("b") and leaf not in ("offset", "scale")


def clipped(grads, limit):
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    return {k: g * (limit / (norm + 1e-6)).clamp(max=1) if limit else g for k, g in grads.items()}


def update(params, grads, state, s):
    count, mu, nu = state
    lr, t = rate(count, s), count + 1
    mu = {k: s.beta1 * m + (1 - s.beta1) * grads[k] for k, m in mu.items()}
    nu = {k: s.beta2 * v + (1 - s.beta2) * grads[k].square() for k, v in nu.items()}
    new = {}
    for k, p in params.items():
        direction = mu[k] / (1 - s.beta1**t) / (torch.sqrt(nu[k] / (1 - s.beta2**t)) + 1e-8)
        new[k] = p - lr * direction - lr * s.weight_decay * decays(k, p) * p
    return new, (t, mu, nu)


def make(s):
    def make_step(model):
        def loss_fn(params, x, y):
            return cross_entropy(functional_call(model, params, (x,)).transpose(1, 2), y)

        params = {k: p.detach().clone() for k, p in model.named_parameters()}
        zeros = {k: torch.zeros_like(p) for k, p in params.items()}
        state = 0, zeros, zeros

        def step(x, y):
            nonlocal params, state
            grads, total, share = zeros, 0.0, 1 / s.grad_accum
            for xb, yb in zip(x.chunk(s.grad_accum), y.chunk(s.grad_accum), strict=True):
                found, loss = grad_and_value(loss_fn)(params, xb, yb)
                grads = {k: g + found[k] * share for k, g in grads.items()}
                total += float(loss) / s.grad_accum
            params, state = update(params, clipped(grads, s.clip), state, s)
            with torch.no_grad():
                for k, p in model.named_parameters():
                    p.copy_(params[k])
            return total

        return step

    return make_step
