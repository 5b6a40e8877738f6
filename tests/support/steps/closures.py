"""Style 8: an optimizer of two functions over lists of tensors, as a tutorial derives it; `torch.autograd.grad`."""

import torch

from support.steps.faults import words
from support.steps.shared import batch_parts, betas, clipped, decay_of, loss_of, rate

WORDS = words("""
    rolled last-missing smoothed temperature accumulation-summed unclipped clipped-by-value decay-coupled decay-on-all
    decay-missing decay-tenth uncorrected corrected-late eps-inside eps-1e-6 betas-swapped rate-doubled moments-lost sgd
    decay-not-on-embeddings
""")


def adamw(has, s):
    (b1, b2), eps = betas(s, has), 1e-6 if "eps-1e-6" in has else 1e-8

    def init(params):
        return [(torch.zeros_like(p), torch.zeros_like(p)) for p in params], 0

    def update(params, grads, state, kinds):
        moments, t = init(params) if "moments-lost" in has else state
        lr, t, out, after = rate(t, s, has), t + 1, [], []
        at = t + ("corrected-late" in has)
        c1, c2 = (1.0, 1.0) if "uncorrected" in has else (1 - b1**at, 1 - b2**at)
        for p, g, (m, v), kind in zip(params, grads, moments, kinds, strict=True):
            decay = decay_of(kind, s, has)
            if "decay-coupled" in has:
                g, decay = g.add(p, alpha=decay), 0.0
            m = torch.lerp(g, m.to(g), b1)
            v = torch.lerp(g * g, v.to(g), b2)
            root = (v / c2 + eps).sqrt() if "eps-inside" in has else (v / c2).sqrt() + eps
            direction = g if "sgd" in has else m / c1 / root
            out.append(p * (1 - lr * decay) - lr * direction)
            after.append((m, v))
        return out, (after, t)

    return init, update


def make(has, s):
    def make_step(model):
        params = list(model.parameters())
        tables = model.wte.weight, model.wpe.weight
        kinds = ["bias" if p.ndim < 2 else "table" if any(p is one for one in tables) else "matrix" for p in params]
        init, update = adamw(has, s)
        state = init(params)

        def step(x, y):
            nonlocal state
            grads, total = [torch.zeros_like(p) for p in params], 0.0
            for xb, yb, share, factor in batch_parts(x, y, s, has):
                loss = loss_of(model(xb), xb, yb, has)
                grads = [g + factor * one for g, one in zip(grads, torch.autograd.grad(loss, params), strict=True)]
                total += loss.item() * share
            with torch.no_grad():
                new, state = update(params, clipped(grads, s, has), state, kinds)
                for p, value in zip(params, new, strict=True):
                    p.copy_(value)
            return total

        return step

    return make_step
