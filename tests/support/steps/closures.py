"""Style 8: an optimizer of two functions over lists of tensors, as a tutorial derives it; `torch.autograd.grad`."""

import torch

from support.steps.faults import words

WORDS = words("""
    rolled last-missing smoothed temperature accumulation-summed unclipped clipped-by-value decay-coupled decay-on-all
    decay-missing decay-tenth uncorrected corrected-late eps-inside eps-1e-6 betas-swapped rate-doubled moments-lost sgd
    decay-not-on-embeddings
""")


def adamw(has, s):
    b1, b2 = (s.beta2, s.beta1) if "betas-swapped" in has else (s.beta1, s.beta2)
    rate = 2 * s.lr if "rate-doubled" in has else s.lr
    eps = 1e-6 if "eps-1e-6" in has else 1e-8

    def init(params):
        return [(torch.zeros_like(p), torch.zeros_like(p)) for p in params], 0

    def decay_of(p, is_table):
        wanted = (p.ndim > 1 or "decay-on-all" in has) and "decay-missing" not in has
        wanted = wanted and not (is_table and "decay-not-on-embeddings" in has)
        return s.weight_decay * wanted * (0.1 if "decay-tenth" in has else 1.0)

    def update(params, grads, state, tables):
        moments, t = init(params) if "moments-lost" in has else state
        t, out, after = t + 1, [], []
        at = t + ("corrected-late" in has)
        c1, c2 = (1.0, 1.0) if "uncorrected" in has else (1 - b1**at, 1 - b2**at)
        for p, g, (m, v), is_table in zip(params, grads, moments, tables, strict=True):
            decay = decay_of(p, is_table)
            if "decay-coupled" in has:
                g, decay = g.add(p, alpha=decay), 0.0
            m = torch.lerp(g, m.to(g), b1)
            v = torch.lerp(g * g, v.to(g), b2)
            root = (v / c2 + eps).sqrt() if "eps-inside" in has else (v / c2).sqrt() + eps
            direction = g if "sgd" in has else m / c1 / root
            out.append(p * (1 - rate * decay) - rate * direction)
            after.append((m, v))
        return out, (after, t)

    return init, update


def clip(grads, has, limit):
    if not limit or "unclipped" in has:
        return grads
    if "clipped-by-value" in has:
        return [g.clamp(-limit / 50, limit / 50) for g in grads]
    norm = torch.stack([g.norm() for g in grads]).norm()
    return [g * (limit / (norm + 1e-6)).clamp(max=1.0) for g in grads]


def make(has, s):
    def make_step(model):
        params = list(model.parameters())
        tables = [p is model.wte.weight or p is model.wpe.weight for p in params]
        init, update = adamw(has, s)
        state = init(params)

        def loss_fn(x, y):
            logits = model(x) * (0.8 if "temperature" in has else 1.0)
            if "rolled" in has:
                y = torch.roll(x, -1, 1)
            if "last-missing" in has:
                logits, y = logits[:, :-1], y[:, :-1]
            log_p = logits.log_softmax(-1)
            wanted = log_p.gather(-1, y[..., None])[..., 0]
            wanted = 0.95 * wanted + 0.05 * log_p.mean(-1) if "smoothed" in has else wanted
            return -wanted.mean()

        def step(x, y):
            nonlocal state
            n, total = s.grad_accum, 0.0
            grads = [torch.zeros_like(p) for p in params]
            for xb, yb in zip(x.chunk(n), y.chunk(n), strict=True):
                loss = loss_fn(xb, yb)
                share = 1 if "accumulation-summed" in has else n
                grads = [g + one / share for g, one in zip(grads, torch.autograd.grad(loss, params), strict=True)]
                total += loss.item() / n
            with torch.no_grad():
                new, state = update(params, clip(grads, has, s.clip), state, tables)
                for p, value in zip(params, new, strict=True):
                    p.copy_(value)
            return total

        return step

    return make_step
