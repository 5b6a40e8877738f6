"""Concise GPT-2 in wrapper style: PreNorm(fn), x = layer(x) + x, rearranges instead of views."""

import torch
from torch import einsum, nn

from support.ports import put


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, hidden_dim),
            nn.GELU(approximate="tanh"),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        b, n, _ = x.shape
        # 'b n (d h qkv) -> qkv b h n d'
        q, k, v = self.to_qkv(x).reshape(b, n, -1, self.heads, 3).permute(4, 0, 3, 1, 2)
        sim = einsum("b h i d, b h j d -> b h i j", q * self.scale, k)
        i, j = sim.shape[-2:]
        causal_mask = torch.ones((i, j), dtype=torch.bool, device=x.device).triu(j - i + 1)
        sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
        out = einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        # 'b h n d -> b n (d h)'
        return self.to_out(out.permute(0, 2, 3, 1).reshape(b, n, -1))


class GPT(nn.Module):
    def __init__(self, *, num_tokens, max_seq_len, dim, depth, heads, ff_dim):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.pos_emb = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([PreNorm(dim, Attention(dim, heads)), PreNorm(dim, FeedForward(dim, ff_dim))]))
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens, bias=False))

    def forward(self, x):
        x = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.to_logits(x)


def build(config):
    return GPT(
        num_tokens=config.vocab_size,
        max_seq_len=config.n_positions,
        dim=config.n_embd,
        depth=config.n_layer,
        heads=config.n_head,
        ff_dim=config.inner,
    )


def fill(module, state):
    put(module, state, {"token_emb": "wte", "pos_emb": "wpe", "to_logits.0": "ln_f", "to_logits.1": "head"})
    for i, (attn, ff) in enumerate(module.layers):
        put(attn, state, {"norm": "ln_1"}, f"h.{i}.")
        put(ff, state, {"norm": "ln_2", "fn.net.0": "mlp.c_fc.T", "fn.net.3": "mlp.c_proj.T"}, f"h.{i}.")
        for leaf in ("weight", "bias"):
            rows = state[f"h.{i}.attn.c_attn.{leaf}"].t().unflatten(0, (3, attn.fn.heads, -1))
            getattr(attn.fn.to_qkv, leaf).copy_(rows.transpose(0, 2).flatten(0, 2))
        out, rows = attn.fn.to_out[0], state[f"h.{i}.attn.c_proj.weight"].unflatten(0, (attn.fn.heads, -1))
        out.weight.copy_(rows.transpose(0, 1).flatten(0, 1).T)
        out.bias.copy_(state[f"h.{i}.attn.c_proj.bias"])
