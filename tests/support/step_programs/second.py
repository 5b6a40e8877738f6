"""The second set: a functional GPT-2 with its layers stacked, q, k and v apart, matrices [out, in], as JAX programs have them.

Written after the engine was done, and not used to develop it. `dump(weights, heads, batches, faults, s)` returns arrays by name:
losses, gradients and parameters of each step, in float32, with Adam's moments as a program that saves everything would.
"""

import torch
import torch.nn.functional as F

FAULTS = {
    "labels-same": "labels-not-shifted",
    "labels-late": "labels-shifted-twice",
    "total-loss": "loss-not-averaged",
    "soft-labels": "label-smoothing",
    "cool": "logits-scaled",
    "grads-kept": "gradient-not-zeroed",
    "head-only": "tied-gradient-lost",
    "no-clip": "clip-missing",
    "clip-each": "clip-per-tensor",
    "clip-entries": "clip-by-value",
    "l2": "decay-coupled",
    "decay-everything": "decay-on-all",
    "decay-nothing": "decay-missing",
    "raw-moments": "bias-correction-missing",
    "count-from-two": "bias-correction-step",
    "root-of-sum": "eps-inside-root",
    "b1-b2": "betas-swapped",
    "lr-half": "rate-wrong",
    "fresh-moments": "momentum-lost",
    "plain-sgd": "optimizer-sgd",
}
NAMES = {
    "ln1_g": "ln_1.weight",
    "ln1_b": "ln_1.bias",
    "o_w": "attn.c_proj.weight",
    "o_b": "attn.c_proj.bias",
    "ln2_g": "ln_2.weight",
    "ln2_b": "ln_2.bias",
    "up_w": "mlp.c_fc.weight",
    "up_b": "mlp.c_fc.bias",
    "down_w": "mlp.c_proj.weight",
    "down_b": "mlp.c_proj.bias",
}


def tree(w):
    """The checkpoint's tensors as this program keeps them."""
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("h."))

    def stack(name):
        parts = [w[f"h.{n}.{name}"] for n in range(layers)]
        return torch.stack([p.t() if p.ndim == 2 else p for p in parts]).contiguous()

    out = {"tok": w["wte.weight"], "pos": w["wpe.weight"], "end_g": w["ln_f.weight"], "end_b": w["ln_f.bias"]}
    out |= {ours: stack(theirs) for ours, theirs in NAMES.items()}
    for leaf, short in (("weight", "w"), ("bias", "b")):
        for letter, part in zip("qkv", stack(f"attn.c_attn.{leaf}").chunk(3, 1), strict=True):
            out[f"{letter}_{short}"] = part.contiguous()
    return {name: t.detach().clone().float() for name, t in sorted(out.items())}


def logits(p, ids, heads, head):
    x = p["tok"][ids] + p["pos"][: ids.shape[1]]
    width = x.shape[-1]
    for n in range(len(p["ln1_g"])):
        a = F.layer_norm(x, (width,), p["ln1_g"][n], p["ln1_b"][n])
        q, k, v = (F.linear(a, p[f"{c}_w"][n], p[f"{c}_b"][n]).unflatten(-1, (heads, -1)).transpose(1, 2) for c in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(y, p["o_w"][n], p["o_b"][n])
        b = F.layer_norm(x, (width,), p["ln2_g"][n], p["ln2_b"][n])
        x = x + F.linear(F.gelu(F.linear(b, p["up_w"][n], p["up_b"][n]), approximate="tanh"), p["down_w"][n], p["down_b"][n])
    return F.layer_norm(x, (width,), p["end_g"], p["end_b"]) @ head.t()


def loss_of(p, ids, y, heads, faults):
    head = p["tok"]
    if "head-only" in faults:
        p = {**p, "tok": p["tok"].detach()}
    z = logits(p, ids, heads, head)
    if "labels-same" in faults:
        y = ids
    if "labels-late" in faults:
        y = torch.cat([y[:, 1:], torch.full_like(y[:, :1], -1)], 1)
    z = z / 1.25 if "cool" in faults else z
    mode = "sum" if "total-loss" in faults else "mean"
    smooth = 0.05 if "soft-labels" in faults else 0.0
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-1, reduction=mode, label_smoothing=smooth)


def clip(g, limit, faults):
    if "no-clip" in faults:
        return g
    if "clip-entries" in faults:
        return [t.clamp(-0.05, 0.05) for t in g]
    if "clip-each" in faults:
        return [t * min(1.0, 0.5 / float(t.norm())) for t in g]
    total = float(torch.stack([t.norm() for t in g]).norm())
    return [t * min(1.0, limit / total) for t in g]


def decays(name, faults):
    if "decay-nothing" in faults:
        return False
    return "decay-everything" in faults or name in ("tok", "pos") or name.endswith("_w")


def step(p, m, v, g, t, s, faults):
    b1, b2 = (s["beta2"], s["beta1"]) if "b1-b2" in faults else (s["beta1"], s["beta2"])
    rate = s["lr"] / 2 if "lr-half" in faults else s["lr"]
    out = {}
    for (name, value), grad in zip(p.items(), g, strict=True):
        decay = s["weight_decay"] if decays(name, faults) else 0.0
        if "l2" in faults:
            grad, decay = grad + decay * value, 0.0
        if "plain-sgd" in faults:
            out[name] = value - rate * grad - rate * decay * value
            continue
        if "fresh-moments" in faults:
            m[name], v[name], t = 0.0 * value, 0.0 * value, 1
        m[name] = b1 * m[name] + (1 - b1) * grad
        v[name] = b2 * v[name] + (1 - b2) * grad.square()
        at = t + 1 if "count-from-two" in faults else t
        c1, c2 = (1.0, 1.0) if "raw-moments" in faults else (1 - b1**at, 1 - b2**at)
        root = (v[name] / c2 + 1e-8).sqrt() if "root-of-sum" in faults else (v[name] / c2).sqrt() + 1e-8
        out[name] = value - rate * (m[name] / c1 / root + decay * value)
    return out


def dump(weights, heads, batches, faults, s):
    p = tree(weights)
    m, v = ({name: torch.zeros_like(t) for name, t in p.items()} for _ in range(2))
    kept, old = {f"init/{name}": t for name, t in p.items()}, None
    for t, (ids, y) in enumerate(batches, 1):
        live = {name: value.clone().requires_grad_() for name, value in p.items()}
        loss = loss_of(live, torch.as_tensor(ids), torch.as_tensor(y), heads, faults)
        g = list(torch.autograd.grad(loss, list(live.values())))
        if "grads-kept" in faults and old is not None:
            g = [a + b for a, b in zip(g, old, strict=True)]
        old = g
        kept |= {f"{t}/grad/{name}": grad for name, grad in zip(p, g, strict=True)}
        p = step(p, m, v, clip(g, s["clip"], faults), t, s, faults)
        kept |= {f"{t}/{name}": value for name, value in p.items()}
        kept |= {f"{t}/mu/{name}": value for name, value in m.items()} | {f"{t}/nu/{name}": value for name, value in v.items()}
        kept[f"{t}/loss"] = loss.detach()
    return {name: value.detach().clone().numpy() for name, value in kept.items()}
