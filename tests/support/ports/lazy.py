"""Sizes inferred on the first call: nn.LazyLinear everywhere."""

import torch
from torch import nn

from support.ports import put


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.LazyLinear(d) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.attn = nn.Sequential(nn.LayerNorm(d), Attention(d, heads))
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.LazyLinear(f), nn.GELU("tanh"), nn.LazyLinear(d))

    def forward(self, x):
        x = self.attn(x) + x
        return self.mlp(x) + x


class LazyGPT(nn.Module):
    def __init__(self, vocab, context, d, depth, heads, f):
        super().__init__()
        self.tokens = nn.Embedding(vocab, d)
        self.positions = nn.Parameter(torch.randn(context, d) * 0.02)
        self.blocks = nn.Sequential(*(Block(d, heads, f) for _ in range(depth)))
        self.last = nn.Sequential(nn.LayerNorm(d), nn.LazyLinear(vocab, bias=False))

    def forward(self, ids):
        return self.last(self.blocks(self.tokens(ids) + self.positions[: ids.shape[1]]))


def build(config):
    return LazyGPT(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    module(torch.zeros(1, 1, dtype=torch.long))
    put(module, state, {"tokens": "wte", "positions": "wpe.weight", "last.0": "ln_f", "last.1": "head"})
    for i, block in enumerate(module.blocks):
        put(block.attn, state, {"0": "ln_1", "1.to_out": "attn.c_proj.T"}, f"h.{i}.")
        put(block.attn[1], state, {"to_q": "q.T", "to_k": "k.T", "to_v": "v.T"}, f"h.{i}.")
        put(block.mlp, state, {"0": "ln_2", "1": "mlp.c_fc.T", "3": "mlp.c_proj.T"}, f"h.{i}.")
