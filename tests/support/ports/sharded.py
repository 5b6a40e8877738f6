"""Tensor parallelism over two pretended ranks: columns, rows, heads and vocabulary are cut, partial sums are added up."""

import torch
from torch import nn

from support.ports import put

RANKS = 2


def cuts(size):
    """Sizes of the shards, the first the larger."""
    return [-(-size // RANKS), size // RANKS]


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab, d):
        super().__init__()
        self.shards = nn.ParameterList([torch.randn(n, d) * 0.02 for n in cuts(vocab)])

    def forward(self, ids):
        total, start = 0, 0
        for shard in self.shards:
            mine = (ids >= start) & (ids < start + len(shard))
            rows = shard[torch.where(mine, ids - start, 0)]
            total = total + rows.masked_fill(~mine.unsqueeze(-1), 0)
            start += len(shard)
        return total

    def logits(self, x):
        return torch.cat([x @ shard.T for shard in self.shards], dim=-1)


class ColumnParallel(nn.Module):
    def __init__(self, d, sizes):
        super().__init__()
        self.ranks = nn.ModuleList(nn.Linear(d, n) for n in sizes)

    def forward(self, x):
        return [rank(x) for rank in self.ranks]


class RowParallel(nn.Module):
    def __init__(self, sizes, d):
        super().__init__()
        self.ranks = nn.ModuleList(nn.Linear(n, d, bias=False) for n in sizes)
        self.bias = nn.Parameter(torch.zeros(d))

    def forward(self, shards):
        return sum(rank(shard) for rank, shard in zip(self.ranks, shards, strict=True)) + self.bias


class Block(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.heads = cuts(heads)
        widths = [n * (d // heads) for n in self.heads]
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = ColumnParallel(d, [3 * n for n in widths])
        self.out = RowParallel(widths, d)
        self.up = ColumnParallel(d, cuts(f))
        self.down = RowParallel(cuts(f), d)

    def forward(self, x):
        attended = []
        for heads, qkv in zip(self.heads, self.qkv(self.ln1(x)), strict=True):
            q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in qkv.chunk(3, dim=-1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            attended.append(y.transpose(1, 2).flatten(2))
        x = x + self.out(attended)
        return x + self.down([nn.functional.gelu(y, approximate="tanh") for y in self.up(self.ln2(x))])


class ParallelGPT(nn.Module):
    def __init__(self, vocab, context, d, depth, heads, f):
        super().__init__()
        self.words = VocabParallelEmbedding(vocab, d)
        self.places = nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, heads, f) for _ in range(depth))
        self.norm = nn.LayerNorm(d)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.words.logits(self.norm(x))


def build(config):
    return ParallelGPT(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    for shard, rows in zip(module.words.shards, state["wte.weight"].split(cuts(len(state["wte.weight"]))), strict=True):
        shard.copy_(rows)
    put(module, state, {"places": "wpe", "norm": "ln_f"})
    for i, block in enumerate(module.blocks):
        put(block, state, {"ln1": "ln_1", "ln2": "ln_2"}, f"h.{i}.")
        put(block, state, {"out.bias": "attn.c_proj.bias", "down.bias": "mlp.c_proj.bias"}, f"h.{i}.")
        widths, inner = ([rank.in_features for rank in part.ranks] for part in (block.out, block.down))
        for r in range(RANKS):
            for leaf in ("weight", "bias"):
                shares = [state[f"h.{i}.{x}.{leaf}"].split(widths, -1)[r] for x in "qkv"]
                getattr(block.qkv.ranks[r], leaf).copy_(torch.cat(shares, -1).t())
                getattr(block.up.ranks[r], leaf).copy_(state[f"h.{i}.mlp.c_fc.{leaf}"].split(inner, -1)[r].t())
            block.out.ranks[r].weight.copy_(state[f"h.{i}.attn.c_proj.weight"].split(widths)[r].t())
            block.down.ranks[r].weight.copy_(state[f"h.{i}.mlp.c_proj.weight"].split(inner)[r].t())
