"""GPT-2 with nn.MultiheadAttention. Layers are attributes: layer1, layer2, ..."""

import torch
from torch import nn

from support.ports import put


class DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.attn_norm, self.ff_norm, self.drop = nn.LayerNorm(d), nn.LayerNorm(d), nn.Dropout(0.1)
        self.attn = nn.MultiheadAttention(d, config.n_head, dropout=0.1, batch_first=True)
        layers = nn.Linear(d, config.inner), nn.GELU(approximate="tanh"), nn.Linear(config.inner, d), nn.Dropout(0.1)
        self.ff = nn.Sequential(*layers)

    def forward(self, x, attn_mask):
        h = self.attn_norm(x)
        x = x + self.drop(self.attn(h, h, h, attn_mask=attn_mask, need_weights=False)[0])
        return x + self.ff(self.ff_norm(x))


class GPT2(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_layers = config.n_layer
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.n_positions, config.n_embd))
        self.drop = nn.Dropout(0.1)
        for i in range(1, config.n_layer + 1):
            self.add_module(f"layer{i}", DecoderLayer(config))
        self.norm = nn.LayerNorm(config.n_embd)
        self.out = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.out.weight = self.tok_emb.weight

    def forward(self, x):
        t = x.size(1)
        mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
        x = self.drop(self.tok_emb(x) + self.pos_emb[:, :t])
        for i in range(1, self.num_layers + 1):
            x = getattr(self, f"layer{i}")(x, mask)
        return self.out(self.norm(x))


build = GPT2


def fill(module, state):
    put(module, state, {"tok_emb": "wte", "pos_emb": "wpe.weight", "norm": "ln_f"})
    for i in range(module.num_layers):
        layer = getattr(module, f"layer{i + 1}")
        put(layer, state, {"attn_norm": "ln_1", "attn": "attn.c_attn.T", "attn.out_proj": "attn.c_proj.T"}, f"h.{i}.")
        put(layer, state, {"ff_norm": "ln_2", "ff.0": "mlp.c_fc.T", "ff.2": "mlp.c_proj.T"}, f"h.{i}.")
