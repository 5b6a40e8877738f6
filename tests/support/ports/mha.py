"""GPT-2 with nn.MultiheadAttention. Layers are attributes: layer1, layer2, ..."""

import torch
import torch.nn as nn

from support.ports import put


class DecoderLayer(nn.Module):
    def __init__(self, emb_dim, num_heads, ff_dim, dropout):
        super().__init__()
        self.attn_norm = nn.LayerNorm(emb_dim)
        self.attn = nn.MultiheadAttention(emb_dim, num_heads, dropout=dropout, batch_first=True)
        self.ff_norm = nn.LayerNorm(emb_dim)
        self.ff = nn.Sequential(
            nn.Linear(emb_dim, ff_dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(ff_dim, emb_dim),
            nn.Dropout(dropout),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x, attn_mask):
        h = self.attn_norm(x)
        a, _ = self.attn(h, h, h, attn_mask=attn_mask, need_weights=False)
        x = x + self.drop(a)
        return x + self.ff(self.ff_norm(x))


class GPT2(nn.Module):
    def __init__(self, vocab_size, max_seq_len, emb_dim, num_heads, num_layers, ff_dim, dropout=0.1):
        super().__init__()
        self.num_layers = num_layers
        self.tok_emb = nn.Embedding(vocab_size, emb_dim)
        self.pos_emb = nn.Parameter(torch.zeros(1, max_seq_len, emb_dim))
        self.drop = nn.Dropout(dropout)
        for i in range(1, num_layers + 1):
            self.add_module(f"layer{i}", DecoderLayer(emb_dim, num_heads, ff_dim, dropout))
        self.norm = nn.LayerNorm(emb_dim)
        self.out = nn.Linear(emb_dim, vocab_size, bias=False)
        self.out.weight = self.tok_emb.weight

    def forward(self, x):
        t = x.size(1)
        mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
        x = self.drop(self.tok_emb(x) + self.pos_emb[:, :t])
        for i in range(1, self.num_layers + 1):
            x = getattr(self, f"layer{i}")(x, mask)
        return self.out(self.norm(x))


def build(config):
    return GPT2(config.vocab_size, config.n_positions, config.n_embd, config.n_head, config.n_layer, config.inner)


def fill(module, state):
    put(module, state, {"tok_emb": "wte", "pos_emb": "wpe.weight", "norm": "ln_f"})
    for i in range(module.num_layers):
        layer = getattr(module, f"layer{i + 1}")
        put(layer, state, {"attn_norm": "ln_1", "attn": "attn.c_attn.T", "attn.out_proj": "attn.c_proj.T"}, f"h.{i}.")
        put(layer, state, {"ff_norm": "ln_2", "ff.0": "mlp.c_fc.T", "ff.2": "mlp.c_proj.T"}, f"h.{i}.")
