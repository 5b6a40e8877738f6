"""GPT-2 for small memories: half the context, everything else in place. q, k, v of all heads in one (3, H, D, K) tensor."""

import torch
from torch import nn

from support.ports import put


class Attn(nn.Module):
    def __init__(self, n_state, n_head, n_ctx):
        super().__init__()
        d_head = n_state // n_head
        self.w_qkv = nn.Parameter(torch.randn(3, n_head, n_state, d_head) * 0.02)
        self.b_qkv = nn.Parameter(torch.zeros(3, n_head, 1, d_head))
        self.w_out = nn.Parameter(torch.randn(n_head, d_head, n_state) * 0.02)
        self.b_out = nn.Parameter(torch.zeros(n_state))
        self.register_buffer("b", torch.tril(torch.ones(n_ctx, n_ctx)).view(1, 1, n_ctx, n_ctx))

    def forward(self, x):
        n = x.size(1)
        q, k, v = torch.einsum("bnd,chdk->cbhnk", x, self.w_qkv) + self.b_qkv[:, None]
        w = torch.matmul(q, k.transpose(-1, -2)) * q.size(-1) ** -0.5
        b = self.b[:, :, :n, :n]
        w = w * b - 1e10 * (1 - b)
        return torch.einsum("bhnm,bhmk,hkd->bnd", torch.softmax(w, dim=-1), v, self.w_out) + self.b_out


class Block(nn.Module):
    def __init__(self, n_state, n_head, n_ctx, n_inner):
        super().__init__()
        self.attn = Attn(n_state, n_head, n_ctx)
        self.g = nn.ParameterList([torch.ones(n_state), torch.ones(n_state)])
        self.b = nn.ParameterList([torch.zeros(n_state), torch.zeros(n_state)])
        self.fc = nn.Linear(n_state, n_inner)
        self.proj = nn.Linear(n_inner, n_state)

    def norm(self, x, i):
        return nn.functional.layer_norm(x, x.shape[-1:], self.g[i], self.b[i])

    def forward(self, x):
        x = x + self.attn(self.norm(x, 0))
        return x + self.proj(nn.functional.gelu(self.fc(self.norm(x, 1)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, n_vocab, n_ctx, n_state, n_layer, n_head, n_inner):
        super().__init__()
        self.wte = nn.Embedding(n_vocab, n_state)
        self.wpe = nn.Embedding(n_ctx, n_state)
        self.h = nn.ModuleList(Block(n_state, n_head, n_ctx, n_inner) for _ in range(n_layer))
        self.norm = nn.LayerNorm(n_state)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in self.h:
            x = block(x)
        return torch.matmul(self.norm(x), self.wte.weight.t())


def build(config):
    return Model(config.vocab_size, config.n_positions // 2, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"wte": "wte", "norm": "ln_f"})
    module.wpe.weight.copy_(state["wpe.weight"][: module.wpe.num_embeddings])
    for i, block in enumerate(module.h):
        put(block, state, {"fc": "mlp.c_fc.T", "proj": "mlp.c_proj.T"}, f"h.{i}.")
        put(block, state, {"g.0": "ln_1.weight", "b.0": "ln_1.bias", "g.1": "ln_2.weight", "b.1": "ln_2.bias"}, f"h.{i}.")
        put(block.attn, state, {"w_out": "c_proj.weight", "b_out": "c_proj.bias", "b_qkv": "c_attn.bias"}, f"h.{i}.attn.")
        by_head = state[f"h.{i}.attn.c_attn.weight"].unflatten(1, (3, block.attn.w_qkv.size(1), -1))
        block.attn.w_qkv.copy_(by_head.permute(1, 2, 0, 3))
