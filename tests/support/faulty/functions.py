"""No submodules: parameters with flat names on one module; the model is a chain of pure functions over them.

Matrices have the checkpoint's orientation; query, key and value are separate.
"""

import math

import torch
from torch import nn

from support.faulty.loading import put


def mean_of(x):
    return x.sum(dim=-1, keepdim=True) / x.shape[-1]


def normalise(x, scale, shift, wrong):
    if "not-normalising" in wrong:
        return torch.addcmul(shift, x, scale)
    if "rmsnorm" in wrong:
        return x / torch.sqrt(mean_of(x**2) + 1e-5) * scale + shift
    centred = x - mean_of(x)
    squares = (centred**2).sum(dim=-1, keepdim=True)
    variance = squares / (x.shape[-1] - (1 if "unbiased" in wrong else 0))
    eps = {"eps-1e-6": 1e-6, "eps-1e-12": 1e-12, "eps-1e-3": 1e-3, "eps-none": 0.0}
    z = centred / torch.sqrt(variance + next((eps[word] for word in eps if word in wrong), 1e-5))
    return z if "no-affine" in wrong else z * scale + shift


def bend(x, wrong):
    if "gelu-erf" in wrong:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    if "gelu-relu" in wrong:
        return torch.clamp(x, min=0)
    if "gelu-quick" in wrong:
        return x / (1 + torch.exp(-1.702 * x))
    if "gelu-silu" in wrong:
        return x * torch.sigmoid(x)
    if "gelu-none" in wrong:
        return x
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


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
    if "scale-missing" not in wrong:
        q = q / math.sqrt(d if "scale-by-width" in wrong else size)
    if "scale-twice" in wrong:
        k = k / math.sqrt(size)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2))
    if "scale-inverse-layer" in wrong:
        scores = scores / float(layer + 1)
    y = torch.matmul(weigh(scores, wrong, memory.real), v).permute(0, 2, 1, 3).reshape(b, t, d)
    if "output-projection-missing" in wrong:
        return y
    return y @ p["wo"] + p["bo"] if "no-out-bias" not in wrong else y @ p["wo"]


def feed_forward(x, p, wrong):
    y = bend(torch.matmul(x, p["w1"]) + p["b1"], wrong)
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

        def first(y):
            return y if "ln_1-missing" in wrong else normalise(y, p["ga"], p["ba"], self.faults.at(f"{layer}.ln_1"))

        def second(y):
            return y if "ln_2-missing" in wrong else normalise(y, p["gb"], p["bb"], self.faults.at(f"{layer}.ln_2"))

        if "norms-swapped" in wrong:
            first, second = second, first
        if "post-norm" in wrong:
            x = first(x + attend(x, p, self.heads, layer, wrong, memory))
            return second(x + feed_forward(x, p, wrong))
        if "parallel" in wrong:
            return attend(first(x), p, self.heads, layer, wrong, memory) + feed_forward(second(x), p, wrong) + x
        y = first(x)
        kept = y if "residual-from-normed" in wrong else x
        x = attend(y, p, self.heads, layer, wrong, memory)
        if not wrong & {"residual-missing", "residual-missing-attn"}:
            x = kept + x
        y = second(x)
        kept = y if wrong & {"residual-from-normed", "residual-from-normed-mlp"} else x
        x = feed_forward(y, p, wrong)
        return x if wrong & {"residual-missing", "residual-missing-mlp"} else kept + x

    def forward(self, ids, past=None, use_cache=False, attention_mask=None):
        faults, t = self.faults, ids.shape[1]
        memory = Memory(past, None if "padding-ignored" in faults else attention_mask)
        before = 0 if not past or "cache-positions" in faults else past[0][0].shape[2]
        x = self.words[ids]
        if "embedding-scaled" in faults:
            x = x * x.shape[-1] ** 0.5
        if "position-sinusoidal" in faults:
            x = x + waves(t, x.shape[-1]).to(x)
        elif "position-missing" not in faults:
            start = before + (1 if "position-offset" in faults else 0)
            x = x + self.places[start : start + t]
        order = [*range(self.layers)]
        if "layer-reversed" in faults:
            order = order[::-1]
        order = [layer for layer in order if layer not in faults.layers("layer-missing", self.layers)]
        order = sorted([*order, *faults.layers("layer-repeated", self.layers)]) if "layer-repeated" in faults else order
        if "noise" in faults:
            x = x + torch.randn(x.shape, dtype=x.dtype) / 50
        if "batch-centred" in faults:
            x = x - 0.1 * x.mean(dim=0)
        for layer in order:
            x = self.block(x, layer, memory)
            if "extra-norm-end" in faults.at(layer):
                x = (x - mean_of(x)) / torch.sqrt(mean_of((x - mean_of(x)) ** 2) + 1e-5)
        if "final-norm-missing" not in faults:
            x = normalise(x, self.g_end, self.b_end, faults.at("f"))
        logits = torch.einsum("btd,vd->btv", x, self.unembed if "untied-head" in faults else self.words)
        logits = torch.log_softmax(logits, dim=-1) if "logits-log-softmaxed" in faults else logits
        return (logits, memory.now) if use_cache else logits


def waves(t, d):
    """The positions of the first transformer: sines in even columns, cosines in odd ones."""
    table = torch.zeros(t, d, dtype=torch.float64)
    for column in range(d):
        angle = torch.arange(t) / 10000 ** (column // 2 * 2 / d)
        table[:, column] = torch.sin(angle) if column % 2 == 0 else torch.cos(angle)
    return table


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
