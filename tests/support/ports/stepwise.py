"""GPT-2 read as a recurrent network: one token at a time, keys and values pushed onto lists, heads cut out by slicing."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, fill

__all__ = ["build", "fill"]


class Cell(Block):
    """One block, one time step."""

    NAMES = "norm_1 norm1 norm_2 norm2 up inner down outer"

    def attend(self, x, keys, values):  # x is (B, D)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        keys.append(k)
        values.append(v)
        pieces, size = [], x.size(-1) // self.n_head
        for h in range(self.n_head):
            cut = slice(h * size, (h + 1) * size)
            scores = [(q[:, cut] * past[:, cut]).sum(-1) / size**0.5 for past in keys]
            weights = torch.softmax(torch.stack(scores, dim=-1), dim=-1)
            pieces.append(sum(weights[:, s, None] * past[:, cut] for s, past in enumerate(values)))
        return self.out(torch.cat(pieces, dim=-1))

    def forward(self, x, keys, values):
        x = x + self.attend(self.norm1(x), keys, values)
        return x + self.feed(self.norm2(x))


class RecurrentGPT2(GPT):
    BLOCK, HEAD, NAMES = Cell, nn.Linear, "words emb places pos blocks cells last norm"

    def forward(self, ids):
        memory, outputs = [([], []) for _ in self.cells], []
        for t in range(ids.shape[1]):
            x = self.emb(ids[:, t]) + self.pos.weight[t]
            for cell, (keys, values) in zip(self.cells, memory, strict=True):
                x = cell(x, keys, values)
            outputs.append(self.head(self.norm(x)))
        return torch.stack(outputs, dim=1)


build = RecurrentGPT2
