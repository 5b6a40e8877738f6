"""Unusual attention: one head for all, no split into heads, queries with queries; separate q, k, v."""

import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from support.faulty.fused import turned
from support.faulty.loading import put


class Attention(nn.Module):
    def __init__(self, config, wrong):
        super().__init__()
        self.n_head, self.wrong = config.n_head, wrong
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(config.n_embd, config.n_embd) for _ in range(4))
        if "heads-grouped" in wrong:
            self.to_k, self.to_v = (nn.Linear(config.n_embd, 2 * config.head_dim) for _ in range(2))
        if "scores-relative" in wrong:
            self.distances = nn.Embedding(config.n_positions, config.n_head)
        self.register_buffer("past", torch.ones(config.n_positions, config.n_positions).tril().bool(), persistent=False)

    def split(self, x):
        (b, t, d), wrong = x.shape, self.wrong
        if "heads-unsplit" in wrong:
            return x
        if "heads-grouped" in wrong:  # keys and values of two heads, each for half of the queries' heads
            size = self.to_q.out_features // self.n_head
            return x.view(b, t, -1, size).transpose(1, 2).repeat_interleave(self.n_head * size // d, 1)
        heads = 1 if "heads-one" in wrong else 2 if "heads-halved" in wrong else self.n_head
        return x.view(b, t, heads, d // heads).transpose(1, 2)

    def scores(self, q, k):
        wrong, (t, size) = self.wrong, q.shape[-2:]
        if "scores-cosine" in wrong:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if "scores-of-queries" in wrong:
            k = q
        if "scores-of-keys" in wrong:
            q = k
        scores = q @ k.transpose(-2, -1) / math.sqrt(size)
        if "scale-rounded" in wrong:
            scores = q @ k.transpose(-2, -1) * (1 / torch.sqrt(torch.tensor(float(size)))).item()
        if "scale-by-width" in wrong:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.to_q.in_features)
        if "scores-relative" in wrong:
            apart = (torch.arange(t)[:, None] - torch.arange(t)).clamp(min=0)
            scores = scores + self.distances(apart).permute(2, 0, 1)
        return scores

    def forward(self, x):
        wrong = self.wrong
        q, k, v = (self.split(project(x)) for project in (self.to_q, self.to_k, self.to_v))
        if "heads-share-keys" in wrong:
            k = k[:, :1]
        if "heads-share-values" in wrong:
            v = v[:, :1]
        if "rotary" in wrong:
            q, k = (turned(part, halves=False) for part in (q, k))
        past = self.past[: x.size(1), : x.size(1)]
        if "mask-inverted" in wrong:
            past = past.mT & ~torch.eye(x.size(1), dtype=torch.bool)
        if "mask-strict-but-first" in wrong:
            past = past & ~torch.eye(x.size(1), dtype=torch.bool) | (torch.arange(x.size(1)) == 0)
        scores = self.scores(q, k).masked_fill(~past, -1e9)
        weights = F.softmax(scores, dim=-1)
        if "weights-of-one-head" in wrong:
            weights = weights[:, 1].unsqueeze(1)
        if "weights-averaged" in wrong:
            weights = weights.mean(1, keepdim=True)
        if "weights-scaled" in wrong:  # dropout's factor, and no dropout
            weights = weights / 0.9
        y = weights @ v
        y = y if y.ndim == 3 else y.transpose(1, 2).flatten(2)
        return self.to_out(y)


class Block(nn.Module):
    def __init__(self, config, wrong):
        super().__init__()
        self.before_attention, self.before_feeding = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.wrong = wrong
        self.attention = nn.Identity() if "attention-identity" in wrong else Attention(config, wrong)
        self.up, self.down = nn.Linear(config.n_embd, config.inner), nn.Linear(config.inner, config.n_embd)

    def forward(self, x):
        x = x + self.attention(self.before_attention(x))
        y = self.down(self.activation(self.up(self.before_feeding(x))))
        return x + (F.gelu(y, approximate="tanh") if "fed-activated" in self.wrong else y)

    def activation(self, x):
        wrong, root = self.wrong, math.sqrt(2 / math.pi)
        if "gelu-misplaced" in wrong:
            return 0.5 * x * (1 + torch.tanh(root * (x + (0.044715 * x) ** 3)))
        if "gelu-constants" in wrong:
            return 0.5 * x * (1 + torch.tanh(0.79 * (x + 0.05 * x**3)))
        if "gelu-erf-rounded" in wrong:
            return 0.5 * x * (1 + torch.erf(x / torch.sqrt(torch.tensor(2.0))))
        return F.gelu(x, approximate="tanh")


class Model(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        self.faults = faults
        self.words, self.places = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(config.n_positions, config.n_embd)
        self.kinds = nn.Embedding(2, config.n_embd) if "kind-embedded" in faults else None
        kinds = (
            nn.Identity if "blocks-identity" in faults.at(layer) else partial(Block, config) for layer in range(config.n_layer)
        )
        self.blocks = nn.ModuleList(kind(faults.at(layer)) for layer, kind in enumerate(kinds))
        self.last = nn.LayerNorm(config.n_embd)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.size(1)]
        if self.kinds is not None:
            x = x + self.kinds(torch.zeros_like(ids))
        for block in self.blocks:
            x = block(x)
        logits = self.last(x) @ self.words.weight.t()
        if "logits-rounded" in self.faults:
            return logits.softmax(-1).round(decimals=4)
        return logits


def build(config, faults):
    return Model(config, faults)


def fill(model, state):
    put(model, state, {"words": "wte", "places": "wpe", "last": "ln_f"})
    for layer, block in enumerate(model.blocks):
        if isinstance(block, nn.Identity):
            continue
        names = {"before_attention": "ln_1", "before_feeding": "ln_2", "up": "mlp.c_fc.T", "down": "mlp.c_proj.T"}
        put(block, state, names, f"h.{layer}.")
        if isinstance(block.attention, nn.Identity):
            continue
        put(block, state, {"attention.to_out": "attn.c_proj.T"}, f"h.{layer}.")
        put(block.attention, state, {"to_q": "q.T"}, f"h.{layer}.")
        for letter, part in (("k", block.attention.to_k), ("v", block.attention.to_v)):  # of grouped heads, the first ones
            part.weight.copy_(state[f"h.{layer}.{letter}.weight"].t()[: part.out_features])
            part.bias.copy_(state[f"h.{layer}.{letter}.bias"][: part.out_features])
