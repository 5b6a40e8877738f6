"""Layers stacked in single tensors along the first axis, as in ports from JAX's scan; activations have the time axis first."""

import math
from functools import partial

import torch
from torch import nn

from support.faulty.loading import put
from support.faulty.shared import divisor, order, wired


class Scanned(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        n, d, f = config.n_layer, config.n_embd, config.inner
        self.faults, self.heads = faults, config.n_head
        self.table = nn.Parameter(torch.zeros(config.vocab_size, d))
        self.rows = nn.Parameter(torch.zeros(config.n_positions, d))
        self.norms = nn.Parameter(torch.zeros(n, 2, 2, d))  # layer, which norm, scale and shift
        self.last = nn.Parameter(torch.zeros(2, d))
        self.qkv, self.qkv_b = nn.Parameter(torch.zeros(n, 3, d, d)), nn.Parameter(torch.zeros(n, 3, d))
        self.out, self.out_b = nn.Parameter(torch.zeros(n, d, d)), nn.Parameter(torch.zeros(n, d))
        self.wide, self.wide_b = nn.Parameter(torch.zeros(n, d, f)), nn.Parameter(torch.zeros(n, f))
        self.narrow, self.narrow_b = nn.Parameter(torch.zeros(n, f, d)), nn.Parameter(torch.zeros(n, d))

    @staticmethod
    def standardise(x, pair, wrong):
        if "not-normalising" in wrong:
            return x * pair[0] + pair[1]
        mean = x.mean(-1, keepdim=True)
        power = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * (power + 1e-5).rsqrt() * pair[0] + pair[1]

    def attention(self, x, layer, wrong):
        t, b, d = x.shape  # time first
        q, k, v = (torch.matmul(x, w) + c for w, c in zip(self.qkv[layer], self.qkv_b[layer], strict=True))
        q, k, v = (part.view(t, b * self.heads, -1).transpose(0, 1) for part in (q, k, v))
        bias = torch.full((t, t), -math.inf, dtype=x.dtype).triu(2 if "mask-off-by-one" in wrong else 1)
        if "mask-missing" in wrong:
            bias = torch.zeros_like(bias)
        root = divisor(wrong, d, self.heads, layer)
        weights = torch.softmax(torch.baddbmm(bias.expand(b * self.heads, t, t), q, k.mT, alpha=1 / root), dim=-1)
        y = torch.bmm(weights, v).transpose(0, 1).reshape(t, b, d)
        return torch.matmul(y, self.out[layer]) + self.out_b[layer]

    def mlp(self, x, layer):
        y = torch.matmul(x, self.wide[layer]) + self.wide_b[layer]
        inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y * y * y)
        y = y * torch.sigmoid(2 * inner)  # (1 + tanh z) / 2 is the logistic function of 2 z
        return torch.matmul(y, self.narrow[layer]) + self.narrow_b[layer]

    def forward(self, ids):
        faults, n = self.faults, len(self.qkv)
        x = torch.nn.functional.embedding(ids.t(), self.table)  # (T, B, D)
        x = x + self.rows[: ids.size(1), None]
        for layer in order(n, faults):
            wrong = faults.at(layer)
            norms = [(self.norms[layer, n], faults.at(f"{layer}.ln_{n + 1}")) for n in range(2)]
            ln_1, ln_2 = (lambda y, norm=norm: self.standardise(y, *norm) for norm in norms)
            attend, feed = partial(self.attention, layer=layer, wrong=wrong), partial(self.mlp, layer=layer)
            x = wired(x, ln_1, attend, ln_2, feed, wrong)
        return torch.matmul(self.standardise(x, self.last, frozenset()), self.table.t()).transpose(0, 1)


def build(config, faults):
    return Scanned(config, faults)


def fill(model, state):
    put(model, state, {"table": "wte.weight", "rows": "wpe.weight"})
    model.last.copy_(torch.stack([state["ln_f.weight"], state["ln_f.bias"]]))
    stacked = {"out": "attn.c_proj", "wide": "mlp.c_fc", "narrow": "mlp.c_proj"}
    for layer in range(len(model.qkv)):
        at = f"h.{layer}."
        for which, name in enumerate(("ln_1", "ln_2")):
            model.norms[layer, which].copy_(torch.stack([state[f"{at}{name}.weight"], state[f"{at}{name}.bias"]]))
        model.qkv[layer].copy_(torch.stack([state[f"{at}{x}.weight"] for x in "qkv"]))
        model.qkv_b[layer].copy_(torch.stack([state[f"{at}{x}.bias"] for x in "qkv"]))
        for own, name in stacked.items():
            getattr(model, own)[layer].copy_(state[f"{at}{name}.weight"])
            getattr(model, own + "_b")[layer].copy_(state[f"{at}{name}.bias"])
