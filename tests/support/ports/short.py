"""GPT-2 for small memories: half the context, everything else in place. q, k, v of all heads in one (3, H, D, K) tensor."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, put


class Layer(Block):
    ORDER, NAMES = "up down", "up fc down proj"

    def __init__(self, config):
        super().__init__(config)
        d, h, k = config.n_embd, config.n_head, config.head_dim
        self.g, self.b = (nn.ParameterList([one(d), one(d)]) for one in (torch.ones, torch.zeros))
        self.w_qkv, self.b_qkv = nn.Parameter(torch.randn(3, h, d, k) * 0.02), nn.Parameter(torch.zeros(3, h, 1, k))
        self.w_out, self.b_out = nn.Parameter(torch.randn(h, k, d) * 0.02), nn.Parameter(torch.zeros(d))
        self.register_buffer("past", torch.tril(torch.ones(config.n_positions, config.n_positions)))

    def norm(self, x, i):
        return nn.functional.layer_norm(x, x.shape[-1:], self.g[i], self.b[i])

    def forward(self, x):
        q, k, v = torch.einsum("bnd,chdk->cbhnk", self.norm(x, 0), self.w_qkv) + self.b_qkv[:, None]
        w, past = torch.matmul(q, k.transpose(-1, -2)) * q.size(-1) ** -0.5, self.past[: x.size(1), : x.size(1)]
        w = torch.softmax(w * past - 1e10 * (1 - past), dim=-1)
        x = x + torch.einsum("bhnm,bhmk,hkd->bnd", w, v, self.w_out) + self.b_out
        return x + self.feed(self.norm(x, 1))


class Model(GPT):
    BLOCK, NAMES = Layer, "words wte places wpe blocks h last norm"

    def __init__(self, config):
        super().__init__(config)
        self.wpe = nn.Embedding(config.n_positions // 2, config.n_embd)


build = Model


def fill(module, state):
    put(module, state, {"wte": "wte", "norm": "ln_f"})
    module.wpe.weight.copy_(state["wpe.weight"][: module.wpe.num_embeddings])
    for i, block in enumerate(module.h):
        put(block, state, {"fc": "mlp.c_fc.T", "proj": "mlp.c_proj.T"}, f"h.{i}.")
        put(block, state, {"g.0": "ln_1.weight", "b.0": "ln_1.bias", "g.1": "ln_2.weight", "b.1": "ln_2.bias"}, f"h.{i}.")
        put(block, state, {"w_out": "c_proj.weight", "b_out": "c_proj.bias", "b_qkv": "c_attn.bias"}, f"h.{i}.attn.")
        by_head = state[f"h.{i}.attn.c_attn.weight"].unflatten(1, (3, block.n_head, -1))
        block.w_qkv.copy_(by_head.permute(1, 2, 0, 3))
