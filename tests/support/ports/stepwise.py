"""GPT-2 read as a recurrent network: one token at a time, keys and values pushed onto lists, heads cut out by slicing."""

import torch
from torch import nn

from support.ports import put


class Cell(nn.Module):
    """One block, one time step."""

    def __init__(self, d, heads, f):
        super().__init__()
        self.heads, self.k = heads, d // heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.inner, self.outer = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, keys, values):  # x is (B, D)
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        keys.append(k)
        values.append(v)
        pieces = []
        for h in range(self.heads):
            cut = slice(h * self.k, (h + 1) * self.k)
            scores = [(q[:, cut] * past[:, cut]).sum(-1) / self.k**0.5 for past in keys]
            weights = torch.softmax(torch.stack(scores, dim=-1), dim=-1)
            pieces.append(sum(weights[:, s, None] * past[:, cut] for s, past in enumerate(values)))
        x = x + self.out(torch.cat(pieces, dim=-1))
        return x + self.outer(nn.functional.gelu(self.inner(self.norm2(x)), approximate="tanh"))


class RecurrentGPT2(nn.Module):
    def __init__(self, vocab, context, d, depth, heads, f):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.cells = nn.ModuleList(Cell(d, heads, f) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        memory = [([], []) for _ in self.cells]
        outputs = []
        for t in range(ids.shape[1]):
            x = self.emb(ids[:, t]) + self.pos.weight[t]
            for cell, (keys, values) in zip(self.cells, memory, strict=True):
                x = cell(x, keys, values)
            outputs.append(self.head(self.norm(x)))
        return torch.stack(outputs, dim=1)


def build(config):
    return RecurrentGPT2(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"emb": "wte", "pos": "wpe", "head": "head", "norm": "ln_f"})
    for i, cell in enumerate(module.cells):
        put(cell, state, {"norm1": "ln_1", "qkv": "attn.c_attn.T", "out": "attn.c_proj.T"}, f"h.{i}.")
        put(cell, state, {"norm2": "ln_2", "inner": "mlp.c_fc.T", "outer": "mlp.c_proj.T"}, f"h.{i}.")
