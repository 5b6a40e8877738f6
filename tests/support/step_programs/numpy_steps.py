"""A GPT-2 in NumPy that trains: a backward pass and AdamW by hand. Mistakes are patches of it, in faults.toml.

`train(weights, heads, batches, settings)` returns what each step computed. Imports nothing of ours.
"""

import math

import numpy as np

C = math.sqrt(2 / math.pi)


def norm(x, w, b):
    mean = x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    z = (x - mean) * inverse
    return z * w + b, (z, inverse, w)


def norm_back(d, kept):
    z, inverse, w = kept
    dz = d * w
    dx = inverse * (dz - dz.mean(-1, keepdims=True) - z * (dz * z).mean(-1, keepdims=True))
    return dx, (d * z).sum((0, 1)), d.sum((0, 1))


def linear_back(d, x, w):
    return d @ w.T, np.einsum("btk,btn->kn", x, d), d.sum((0, 1))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


class Model:
    def __init__(self, weights, heads):
        self.w, self.heads = weights, heads
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("h."))

    def forward(self, ids):
        w, kept = self.w, []
        x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]
        for n in range(self.layers):
            at = f"h.{n}."
            a, k1 = norm(x, w[at + "ln_1.weight"], w[at + "ln_1.bias"])
            q, k, v = (self.split(t) for t in np.split(a @ w[at + "attn.c_attn.weight"] + w[at + "attn.c_attn.bias"], 3, -1))
            scores = q @ k.swapaxes(-1, -2) / np.asarray(math.sqrt(q.shape[-1]), x.dtype)
            scores = np.where(np.tri(ids.shape[1], dtype=bool), scores, np.asarray(-np.inf, x.dtype))
            p = softmax(scores)
            y = self.merge(p @ v)
            x = x + y @ w[at + "attn.c_proj.weight"] + w[at + "attn.c_proj.bias"]
            b, k2 = norm(x, w[at + "ln_2.weight"], w[at + "ln_2.bias"])
            f = b @ w[at + "mlp.c_fc.weight"] + w[at + "mlp.c_fc.bias"]
            t = np.tanh(C * (f + 0.044715 * f**3))
            g = 0.5 * f * (1 + t)
            x = x + g @ w[at + "mlp.c_proj.weight"] + w[at + "mlp.c_proj.bias"]
            kept.append((a, k1, q, k, v, p, y, b, k2, f, t, g))
        z, last = norm(x, w["ln_f.weight"], w["ln_f.bias"])
        return z @ w["wte.weight"].T, (ids, kept, z, last)

    def split(self, t):
        return t.reshape(*t.shape[:2], self.heads, -1).swapaxes(1, 2)

    def merge(self, t):
        t = t.swapaxes(1, 2)
        return t.reshape(*t.shape[:2], -1)

    def backward(self, dlogits, saved):
        """Gradients by name; the token embedding's two shares apart."""
        ids, kept, z, last = saved
        w, g = self.w, {}
        g["head"] = np.einsum("btv,btd->vd", dlogits, z)
        dx, g["ln_f.weight"], g["ln_f.bias"] = norm_back(dlogits @ w["wte.weight"], last)
        for n in reversed(range(self.layers)):
            at = f"h.{n}."
            a, k1, q, k, v, p, y, b, k2, f, t, act = kept[n]

            def back(name, d, x, at=at):
                d, g[at + name + ".weight"], g[at + name + ".bias"] = linear_back(d, x, w[at + name + ".weight"])
                return d

            d = back("mlp.c_proj", dx, act)
            d = d * (0.5 * (1 + t) + 0.5 * f * (1 - t * t) * C * (1 + 3 * 0.044715 * f * f))
            d, g[at + "ln_2.weight"], g[at + "ln_2.bias"] = norm_back(back("mlp.c_fc", d, b), k2)
            dx = dx + d
            dy = self.split(back("attn.c_proj", dx, y))
            dv, dp = p.swapaxes(-1, -2) @ dy, dy @ v.swapaxes(-1, -2)
            ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.asarray(math.sqrt(q.shape[-1]), dx.dtype)
            dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q
            d = np.concatenate([self.merge(t) for t in (dq, dk, dv)], -1)
            d, g[at + "ln_1.weight"], g[at + "ln_1.bias"] = norm_back(back("attn.c_attn", d, a), k1)
            dx = dx + d
        g["rows"] = np.zeros_like(w["wte.weight"])
        np.add.at(g["rows"], ids, dx)
        g["wpe.weight"] = np.zeros_like(w["wpe.weight"])
        g["wpe.weight"][: ids.shape[1]] = dx.sum(0)
        return g


def labels_of(ids, y):
    """Labels, -1 where there is none."""
    return y.copy()


def loss_and_gradient(model, ids, y):
    logits, saved = model.forward(ids)
    y = labels_of(ids, y)
    scale = logits.dtype.type(1.0)
    p = softmax(scale * logits)
    known = y >= 0
    target = np.zeros_like(p)
    np.put_along_axis(target, np.maximum(y, 0)[..., None], 1.0, -1)
    count = known.sum()
    losses = -(target * np.log(p)).sum(-1) * known
    g = model.backward((scale * (p - target) * known[..., None] / p.dtype.type(count)).astype(p.dtype), saved)
    head, rows = g.pop("head"), g.pop("rows")
    g["wte.weight"] = head + rows
    return losses.sum() / count, g


def clipped(g, limit):
    if not limit:
        return dict(g)
    total = math.sqrt(sum(float((t.astype(np.float64) ** 2).sum()) for t in g.values()))
    return {name: t * t.dtype.type(min(1, limit / (total + 1e-6))) for name, t in g.items()}


def update(w, g, state, step, s):
    """AdamW in place; `step` from 1."""
    b1, b2 = s["beta1"], s["beta2"]
    rate = s["lr"]
    eps = 1e-8
    for name, p in w.items():
        d = g[name]
        decay = s["weight_decay"] * float(p.ndim > 1)
        m, v, most, t = state.get(name, (np.zeros_like(p), np.zeros_like(p), np.zeros_like(p), 0))
        m = (b1 * m + (1 - b1) * d).astype(p.dtype)
        v = (b2 * v + (1 - b2) * d * d).astype(p.dtype)
        most, t = np.maximum(most, v), t + 1
        state[name] = m, v, most, t
        c1, c2 = 1 - b1**t, 1 - b2**t
        second = v / p.dtype.type(c2)
        root = np.sqrt(second) + p.dtype.type(eps)
        p -= p.dtype.type(rate * decay) * p
        p -= p.dtype.type(rate / c1) * m / root


def train(weights, heads, batches, s, dtype=np.float32):
    """Train on `batches` of (ids, next ids), one a step. Returns the records of the steps: loss, raw, used, after."""
    w = {name: t.astype(dtype) for name, t in weights.items()}
    state, records = {}, []
    parts = s["grad_accum"]
    for step, (ids, y) in enumerate(batches, 1):
        loss, total = 0.0, None
        for i, y_i in zip(np.split(ids, parts), np.split(y, parts), strict=True):
            part, g = loss_and_gradient(Model(w, heads), i, y_i)
            share = dtype(1 / parts)
            loss += float(part) * float(share)
            g = {name: t * share for name, t in g.items()}
            total = g if total is None else {name: t + total[name] for name, t in g.items()}
        used = clipped(total, s["clip"])
        update(w, used, state, step, s)
        moments = {key: {name: state[name][n] for name in w if name in state} for n, key in enumerate("mv")}
        after = {name: t.copy() for name, t in w.items()}
        records.append({"loss": dtype(loss), "raw": total, "used": used, "after": after, **moments})
    return records
