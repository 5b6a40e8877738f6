"""A small GPT whose block keeps its feed-forward as a lambda over its own layers."""

import math

import torch
import torch.nn as nn

from support.ports import put


class Bend(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, block_size):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.heads = heads
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        mask = self.mask[:, :, :t, :t]
        weights = (q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))).exp() * mask  # fine for small scores
        weights = weights / weights.sum(-1, keepdim=True)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, block_size):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, heads, block_size)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(dim, hidden), "bend": Bend(), "c_proj": nn.Linear(hidden, dim)})
        up, bend, down = self.mlp.values()
        self.feed = lambda y: down(bend(up(y)))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.feed(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, dim, layers, heads, hidden):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, dim),
                "wpe": nn.Embedding(block_size, dim),
                "h": nn.ModuleList([Block(dim, heads, hidden, block_size) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        body = self.transformer
        self.embed = lambda idx: body.wte(idx) + body.wpe(torch.arange(idx.shape[1], device=idx.device))

    def forward(self, idx, targets=None):
        x = self.embed(idx)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def build(config):
    return GPT(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"lm_head": "head"})
    put(module.transformer, state, {name: name for name in ("wte", "wpe", "ln_f")})
    for i, block in enumerate(module.transformer.h):
        put(block, state, {"ln_1": "ln_1", "attn.qkv": "attn.c_attn.T", "attn.proj": "attn.c_proj.T"}, f"h.{i}.")
        put(block, state, {"ln_2": "ln_2", "mlp.c_fc": "mlp.c_fc.T", "mlp.c_proj": "mlp.c_proj.T"}, f"h.{i}.")
