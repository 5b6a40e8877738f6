"""Concise GPT-2 in wrapper style: PreNorm(fn), x = layer(x) + x, rearranges instead of views; fused (unit, head, q|k|v)."""

import torch
from torch import einsum, nn

from support.ports.parts import future, put


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn, self.norm = fn, nn.LayerNorm(dim)

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.to_qkv(x).reshape(b, n, -1, self.heads, 3).permute(4, 0, 3, 1, 2)  # 'b n (d h qkv) -> qkv b h n d'
        sim = einsum("b h i d, b h j d -> b h i j", q * self.scale, k)
        sim = sim.masked_fill(future(sim), -torch.finfo(sim.dtype).max)
        out = einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(out.permute(0, 2, 3, 1).reshape(b, n, -1))  # 'b h n d -> b n (d h)'


def feed_forward(dim, hidden):
    layers = nn.Linear(dim, hidden), nn.GELU(approximate="tanh"), nn.Dropout(0.0), nn.Linear(hidden, dim), nn.Dropout(0.0)
    return nn.Sequential(*layers)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim = config.n_embd
        self.token_emb, self.pos_emb = nn.Embedding(config.vocab_size, dim), nn.Embedding(config.n_positions, dim)
        self.layers = nn.ModuleList([])
        for _ in range(config.n_layer):
            branches = Attention(dim, config.n_head), feed_forward(dim, config.inner)
            self.layers.append(nn.ModuleList(PreNorm(dim, fn) for fn in branches))
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, config.vocab_size, bias=False))

    def forward(self, x):
        x = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.to_logits(x)


build = GPT


def fill(module, state):
    put(module, state, {"token_emb": "wte", "pos_emb": "wpe", "to_logits.0": "ln_f", "to_logits.1": "head"})
    for i, (attn, ff) in enumerate(module.layers):
        put(attn, state, {"norm": "ln_1"}, f"h.{i}.")
        put(ff, state, {"norm": "ln_2", "fn.0": "mlp.c_fc.T", "fn.3": "mlp.c_proj.T"}, f"h.{i}.")
        for leaf in ("weight", "bias"):
            rows = state[f"h.{i}.attn.c_attn.{leaf}"].t().unflatten(0, (3, attn.fn.heads, -1))
            getattr(attn.fn.to_qkv, leaf).copy_(rows.transpose(0, 2).flatten(0, 2))
        out, rows = attn.fn.to_out[0], state[f"h.{i}.attn.c_proj.weight"].unflatten(0, (attn.fn.heads, -1))
        out.weight.copy_(rows.transpose(0, 1).flatten(0, 1).T)
        out.bias.copy_(state[f"h.{i}.attn.c_proj.bias"])
