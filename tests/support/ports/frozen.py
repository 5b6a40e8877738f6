"""Inference only: the weights are buffers, there is not one parameter, and q, k, v are fused anew on every call."""

import torch
from torch import nn
from torch.nn import functional as F

from support.ports.parts import Block, put


class Frozen(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_buffer(name, torch.randn(shape) * 0.02)


class Norm(Frozen):
    def __init__(self, d):
        super().__init__(g=(d,), b=(d,))

    def forward(self, x):
        return F.layer_norm(x, self.g.shape, self.g, self.b)


class Attention(Frozen):
    def __init__(self, d, heads):
        super().__init__(wq=(d, d), wk=(d, d), wv=(d, d), wo=(d, d), bq=(d,), bk=(d,), bv=(d,), bo=(d,))
        self.heads = heads

    def forward(self, x):
        fused = torch.cat((self.wq, self.wk, self.wv), dim=1)
        qkv = torch.addmm(torch.cat((self.bq, self.bk, self.bv)), x.flatten(0, 1), fused).unflatten(0, x.shape[:2])
        y = Block.mix(self, *qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4))
        return y.transpose(1, 2).flatten(2) @ self.wo + self.bo


class MLP(Frozen):
    def __init__(self, d, f):
        super().__init__(w1=(d, f), b1=(f,), w2=(f, d), b2=(d,))

    def forward(self, x):
        return F.gelu(x @ self.w1 + self.b1, approximate="tanh") @ self.w2 + self.b2


class GPT2(Frozen):
    def __init__(self, config):
        d = config.n_embd
        super().__init__(wte=(config.vocab_size, d), wpe=(config.n_positions, d))
        self.steps = nn.ModuleList()
        for _ in range(config.n_layer):
            self.steps.extend((Norm(d), Attention(d, config.n_head), Norm(d), MLP(d, config.inner)))
        self.last = Norm(d)

    def forward(self, ids):
        x = self.wte[ids] + self.wpe[: ids.shape[1]]
        for norm, step in zip(self.steps[::2], self.steps[1::2], strict=True):
            x = x + step(norm(x))
        return self.last(x) @ self.wte.T


build = GPT2


def fill(module, state):
    put(module, state, {"wte": "wte.weight", "wpe": "wpe.weight", "last.g": "ln_f.weight", "last.b": "ln_f.bias"})
    for i in range(len(module.steps) // 4):
        norm_1, attention, norm_2, mlp = module.steps[4 * i : 4 * i + 4]
        put(norm_1, state, {"g": "ln_1.weight", "b": "ln_1.bias"}, f"h.{i}.")
        put(norm_2, state, {"g": "ln_2.weight", "b": "ln_2.bias"}, f"h.{i}.")
        for leaf in ("weight", "bias"):
            put(attention, state, {leaf[0] + x: f"{x}.{leaf}" for x in "qkv"} | {leaf[0] + "o": f"attn.c_proj.{leaf}"}, f"h.{i}.")
            put(mlp, state, {leaf[0] + "1": f"mlp.c_fc.{leaf}", leaf[0] + "2": f"mlp.c_proj.{leaf}"}, f"h.{i}.")
