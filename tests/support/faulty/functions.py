"""No submodules: parameters with flat names on one module; the model is a chain of pure functions over them.

Matrices have the checkpoint's orientation; query, key and value are separate.
"""

import torch
from torch import nn

from support.faulty.loading import put
from support.faulty.shared import activation, divisor, ending, entering, normalise, order, sines, wired


def weigh(scores, wrong, real):
    """(B, H, T, S) scores to weights; ``real`` is (B, S), one for a token and zero for padding, or None."""
    t, s = scores.shape[-2:]
    first = 0 if "cache-mask" in wrong else s - t
    later = torch.arange(s, device=scores.device)[None, :] - torch.arange(first, first + t, device=scores.device)[:, None]
    if real is not None:
        if "padding-inverted" in wrong:
            real = 1 - real.long()
        scores = scores + torch.where(real[:, None, None, :] > 0, 0.0, -1e15).to(scores)
    if "mask-multiplied" in wrong:
        scores = scores * (later <= 0)
    elif "mask-missing" not in wrong:
        ahead = 0 if "mask-strict" not in wrong else -1
        ahead = 1 if "mask-off-by-one" in wrong else ahead
        scores = scores + ((later > ahead) * -1e30).to(scores)
    axis = -2 if "softmax-queries" in wrong else 1 if "softmax-heads" in wrong else -1
    raised = torch.exp(scores - scores.amax(dim=axis, keepdim=True))
    return raised / raised.sum(dim=axis, keepdim=True)


def attend(x, p, heads, layer, wrong, memory):
    b, t, d = x.shape
    size = d // heads

    def cut(y):
        return y.reshape(b, t, heads, size).permute(0, 2, 1, 3)

    q, k = x @ p["wq"] + p["bq"], x @ p["wk"]
    if "key-bias-missing" not in wrong:
        k = k + p["bk"]
    v = k if "value-from-key" in wrong else x @ p["wv"] + p["bv"]
    q, k, v = cut(q), cut(k), cut(v)
    if layer in memory.past and "cache-forgets" not in wrong:
        before = memory.past[layer]
        k, v = torch.cat((before[0], k), dim=2), torch.cat((before[1], v), dim=2)
    memory.now[layer] = (k, v)
    scores = torch.matmul(q / divisor(wrong, d, heads, layer), k.permute(0, 1, 3, 2))
    y = torch.matmul(weigh(scores, wrong, memory.real), v).permute(0, 2, 1, 3).reshape(b, t, d)
    if "output-projection-missing" in wrong:
        return y
    return y @ p["wo"] + p["bo"] if "no-out-bias" not in wrong else y @ p["wo"]


def feed_forward(x, p, wrong):
    y = activation(torch.matmul(x, p["w1"]) + p["b1"], wrong)
    if "ffn-dropout" in wrong:
        y = torch.dropout(y, 0.2, True)
    return torch.matmul(y, p["w2"]) + p["b2"]


class Memory:
    """State from call to call: keys and values by layer, and which tokens are real."""

    def __init__(self, past, real):
        self.past, self.now, self.real = past or {}, {}, real


class Functional(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        self.faults, self.heads, self.layers = faults, config.n_head, config.n_layer
        d, f = config.n_embd, config.inner
        shapes = {
            "words": (config.vocab_size + (7 if "padded-vocab" in faults else 0), d),
            "places": (config.n_positions + 1, d),
            "g_end": (d,),
            "b_end": (d,),
        }
        names = {"wq": (d, d), "bq": (d,), "wk": (d, d), "bk": (d,), "wv": (d, d), "bv": (d,), "wo": (d, d), "bo": (d,)}
        names |= {"w1": (d, f), "b1": (f,), "w2": (f, d), "b2": (d,), "ga": (d,), "ba": (d,), "gb": (d,), "bb": (d,)}
        shapes |= {f"{name}_{layer}": shape for layer in range(config.n_layer) for name, shape in names.items()}
        self.kinds = list(names)
        if "untied-head" in faults:
            shapes["unembed"] = (config.vocab_size, d)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.02))

    def block(self, x, layer, memory):
        p = {kind: getattr(self, f"{kind}_{layer}") for kind in self.kinds}
        wrong = self.faults.at(layer)

        norms = [(p[f"g{x}"], p[f"b{x}"], self.faults.at(f"{layer}.ln_{n}")) for n, x in ((1, "a"), (2, "b"))]
        ln_1, ln_2 = (lambda y, norm=norm: normalise(y, *norm) for norm in norms)
        return wired(
            x,
            ln_1,
            lambda y: attend(y, p, self.heads, layer, wrong, memory),
            ln_2,
            lambda y: feed_forward(y, p, wrong),
            wrong,
        )

    def forward(self, ids, past=None, use_cache=False, attention_mask=None):
        faults, t = self.faults, ids.shape[1]
        memory = Memory(past, None if "padding-ignored" in faults else attention_mask)
        before = 0 if not past or "cache-positions" in faults else past[0][0].shape[2]
        x = self.words[ids]
        if "embedding-scaled" in faults:
            x = x * x.shape[-1] ** 0.5
        if "position-sinusoidal" in faults:
            x = x + sines(t, x.shape[-1]).to(x)
        elif "position-missing" not in faults:
            start = before + (1 if "position-offset" in faults else 0)
            x = x + self.places[start : start + t]
        x = entering(x, faults)
        for layer in order(self.layers, faults):
            x = self.block(x, layer, memory)
        if "final-norm-missing" not in faults:
            x = normalise(x, self.g_end, self.b_end, faults.at("f"))
        logits = torch.einsum("btd,vd->btv", x, self.unembed if "untied-head" in faults else self.words)
        logits = ending(logits, faults)
        return (logits, memory.now) if use_cache else logits


def build(config, faults):
    return Functional(config, faults)


def fill(model, state):
    model.words[: len(state["wte.weight"])] = state["wte.weight"]
    model.places[: len(state["wpe.weight"])] = state["wpe.weight"]
    put(model, state, {"g_end": "ln_f.weight", "b_end": "ln_f.bias"})
    if hasattr(model, "unembed"):
        put(model, state, {"unembed": "head.weight"})
    letters = {"q": "q", "k": "k", "v": "v", "o": "attn.c_proj", "1": "mlp.c_fc", "2": "mlp.c_proj"}
    norms = {"ga": "ln_1.weight", "ba": "ln_1.bias", "gb": "ln_2.weight", "bb": "ln_2.bias"}
    for layer in range(model.layers):
        put(model, state, {f"w{letter}_{layer}": f"{name}.weight" for letter, name in letters.items()}, f"h.{layer}.")
        put(model, state, {f"b{letter}_{layer}": f"{name}.bias" for letter, name in letters.items()}, f"h.{layer}.")
        put(model, state, {f"{own}_{layer}": name for own, name in norms.items()}, f"h.{layer}.")
