"""Tensor parallelism over two pretended ranks: columns, rows, heads and vocabulary are cut, partial sums are added up."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, put

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
            total = total + shard[torch.where(mine, ids - start, 0)].masked_fill(~mine.unsqueeze(-1), 0)
            start += len(shard)
        return total


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


class Layer(Block):
    ORDER, NAMES = "norm_1 norm_2", "norm_1 ln1 norm_2 ln2"

    def __init__(self, config):
        super().__init__(config)
        self.heads, d, inner = cuts(config.n_head), config.n_embd, cuts(config.inner)
        widths = [n * config.head_dim for n in self.heads]
        self.qkv, self.out = ColumnParallel(d, [3 * n for n in widths]), RowParallel(widths, d)
        self.up, self.down = ColumnParallel(d, inner), RowParallel(inner, d)

    def attend(self, x):
        parts = (y.unflatten(-1, (3, n, -1)).permute(2, 0, 3, 1, 4) for n, y in zip(self.heads, self.qkv(x), strict=True))
        return self.out([self.mix(*part).transpose(1, 2).flatten(2) for part in parts])

    def feed(self, x):
        return self.down([nn.functional.gelu(y, approximate="tanh") for y in self.up(x)])


class ParallelGPT(GPT):
    BLOCK, NAMES = Layer, "last norm"

    def __init__(self, config):
        super().__init__(config)
        self.words = VocabParallelEmbedding(config.vocab_size, config.n_embd)

    def logits(self, x):
        return torch.cat([x @ shard.T for shard in self.words.shards], dim=-1)


build = ParallelGPT


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
