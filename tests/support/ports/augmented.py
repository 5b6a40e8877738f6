"""GPT-2 in homogeneous coordinates: a constant 1 is appended to every input, and the bias is the last row of the matrix."""

import torch
from torch import nn

from support.ports import put


def one(x):
    return torch.cat((x, torch.ones_like(x[..., :1])), dim=-1)


class Affine(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(n_in + 1, n_out) * 0.02)

    def forward(self, x):
        return one(x) @ self.matrix


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm_a = nn.LayerNorm(dim)
        self.qkv = Affine(dim, 3 * dim)
        self.out = Affine(dim, dim)
        self.norm_b = nn.LayerNorm(dim)
        self.up = Affine(dim, hidden)
        self.down = Affine(hidden, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norm_a(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_b(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocab, context, dim, depth, heads, hidden):
        super().__init__()
        self.words = nn.Embedding(vocab, dim)
        self.places = nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.norm(self.blocks(x)) @ self.words.weight.T


def build(config):
    return GPT2(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"words": "wte", "places": "wpe", "norm": "ln_f"})
    for i, block in enumerate(module.blocks):
        put(block, state, {"norm_a": "ln_1", "norm_b": "ln_2"}, f"h.{i}.")
        parts = {"attn.c_attn": block.qkv, "attn.c_proj": block.out, "mlp.c_fc": block.up, "mlp.c_proj": block.down}
        for name, part in parts.items():
            part.matrix.copy_(torch.vstack((state[f"h.{i}.{name}.weight"], state[f"h.{i}.{name}.bias"])))
