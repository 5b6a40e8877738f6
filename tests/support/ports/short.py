"""GPT-2 for small memories: half the context, everything else in place. q, k, v of all heads in one (3, H, D, K) tensor."""

import torch
from torch import nn


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


@torch.no_grad()
def fill(module, state):
    module.wte.weight.copy_(state["wte.weight"])
    module.wpe.weight.copy_(state["wpe.weight"][: module.wpe.num_embeddings])
    module.norm.weight.copy_(state["ln_f.weight"])
    module.norm.bias.copy_(state["ln_f.bias"])
    for i, block in enumerate(module.h):
        p = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        _, n_head, n_state, d_head = block.attn.w_qkv.shape
        w = p["attn.c_attn.weight"].view(n_state, 3, n_head, d_head)
        block.attn.w_qkv.copy_(w.permute(1, 2, 0, 3))
        block.attn.b_qkv.copy_(p["attn.c_attn.bias"].view(3, n_head, 1, d_head))
        block.attn.w_out.copy_(p["attn.c_proj.weight"].view(n_head, d_head, n_state))
        block.attn.b_out.copy_(p["attn.c_proj.bias"])
        for j in range(2):
            block.g[j].copy_(p[f"ln_{j + 1}.weight"])
            block.b[j].copy_(p[f"ln_{j + 1}.bias"])
        block.fc.weight.copy_(p["mlp.c_fc.weight"].t())
        block.fc.bias.copy_(p["mlp.c_fc.bias"])
        block.proj.weight.copy_(p["mlp.c_proj.weight"].t())
        block.proj.bias.copy_(p["mlp.c_proj.bias"])
