"""Unusual attention: one head for all, no split into heads, queries with queries; separate q, k, v."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from support.faulty.fused import turned
from support.ports import parts


class Block(parts.Block):
    def __init__(self, config, wrong=frozenset()):
        self.wrong = wrong
        self.ORDER = "norm_1 norm_2 up down" if "attention-identity" in wrong else "norm_1 q k v out norm_2 up down"
        super().__init__(config)
        if "heads-grouped" in wrong:
            self.k, self.v = (nn.Linear(config.n_embd, 2 * config.head_dim) for _ in range(2))
        if "scores-relative" in wrong:
            self.distances = nn.Embedding(config.n_positions, config.n_head)

    def cut(self, x):
        (b, t, d), wrong = x.shape, self.wrong
        if "heads-unsplit" in wrong:
            return x
        if "heads-grouped" in wrong:  # keys and values of two heads, each for half of the queries' heads
            size = self.q.out_features // self.n_head
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
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.q.in_features)
        if "scores-relative" in wrong:
            apart = (torch.arange(t)[:, None] - torch.arange(t)).clamp(min=0)
            scores = scores + self.distances(apart).permute(2, 0, 1)
        return scores

    def attend(self, x):
        wrong = self.wrong
        if "attention-identity" in wrong:
            return x
        q, k, v = (self.cut(project(x)) for project in (self.q, self.k, self.v))
        if "heads-share-keys" in wrong:
            k = k[:, :1]
        if "heads-share-values" in wrong:
            v = v[:, :1]
        if "rotary" in wrong:
            q, k = (turned(part, halves=False) for part in (q, k))
        past, itself = torch.ones(x.size(1), x.size(1)).tril().bool(), torch.eye(x.size(1), dtype=torch.bool)
        if "mask-inverted" in wrong:
            past = past.mT & ~itself
        if "mask-strict-but-first" in wrong:
            past = past & ~itself | (torch.arange(x.size(1)) == 0)
        weights = F.softmax(self.scores(q, k).masked_fill(~past, -1e9), dim=-1)
        if "weights-of-one-head" in wrong:
            weights = weights[:, 1].unsqueeze(1)
        if "weights-averaged" in wrong:
            weights = weights.mean(1, keepdim=True)
        if "weights-scaled" in wrong:  # dropout's factor, and no dropout
            weights = weights / 0.9
        y = weights @ v
        return self.out(y if y.ndim == 3 else y.transpose(1, 2).flatten(2))

    def feed(self, x):
        y = self.down(self.activation(self.up(x)))
        return F.gelu(y, approximate="tanh") if "fed-activated" in self.wrong else y

    def activation(self, x):
        wrong, root = self.wrong, math.sqrt(2 / math.pi)
        if "gelu-misplaced" in wrong:
            return 0.5 * x * (1 + torch.tanh(root * (x + (0.044715 * x) ** 3)))
        if "gelu-constants" in wrong:
            return 0.5 * x * (1 + torch.tanh(0.79 * (x + 0.05 * x**3)))
        if "gelu-erf-rounded" in wrong:
            return 0.5 * x * (1 + torch.erf(x / torch.sqrt(torch.tensor(2.0))))
        return F.gelu(x, approximate="tanh")


class Model(parts.GPT):
    BLOCK = Block

    def __init__(self, config, faults):
        super().__init__(config)
        self.faults = faults
        self.kinds = nn.Embedding(2, config.n_embd) if "kind-embedded" in faults else None
        each = (faults.at(layer) for layer in range(config.n_layer))
        self.blocks = nn.ModuleList(nn.Identity() if "blocks-identity" in wrong else Block(config, wrong) for wrong in each)

    def embed(self, ids):
        x = super().embed(ids)
        return x if self.kinds is None else x + self.kinds(torch.zeros_like(ids))

    def logits(self, x):
        logits = super().logits(x)
        return logits.softmax(-1).round(decimals=4) if "logits-rounded" in self.faults else logits


build = Model


def fill(model, state):
    parts.put(model, state, {"words": "wte", "places": "wpe", "last": "ln_f"})
    for layer, block in enumerate(model.blocks):
        if isinstance(block, nn.Identity):
            continue
        if "heads-grouped" in block.wrong:  # the first ones
            names = [f"h.{layer}.{letter}.{leaf}" for letter in "kv" for leaf in ("weight", "bias")]
            state = {**state, **{name: state[name][..., : block.k.out_features] for name in names}}
        parts.fill_block(block, state, layer)
