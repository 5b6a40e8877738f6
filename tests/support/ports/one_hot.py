"""GPT-2 as a chain of matrix products: even the embeddings are Linear layers, over one-hot vectors."""

import torch
from torch import nn
from torch.nn.functional import one_hot

from support.ports.parts import Block, future, put


class HeadWithOutput(nn.Module):
    """One head, from the stream back to the stream: its share of the output projection is its own."""

    def __init__(self, d, k):
        super().__init__()
        self.wq, self.wk, self.wv = nn.Linear(d, k), nn.Linear(d, k), nn.Linear(d, k)
        self.wo = nn.Linear(k, d, bias=False)

    def forward(self, x):
        a = self.wq(x) @ self.wk(x).transpose(1, 2) / self.wk.out_features**0.5
        mask = torch.zeros_like(a[0]).masked_fill(future(a), float("-inf"))
        return self.wo(torch.softmax(a + mask, dim=-1) @ self.wv(x))


class Layer(Block):
    ORDER, NAMES = "norm_1 norm_2 up down", "norm_1 n1 norm_2 n2 up w1 down w2"

    def __init__(self, config):
        super().__init__(config)
        self.heads = nn.ModuleList(HeadWithOutput(config.n_embd, config.head_dim) for _ in range(config.n_head))
        self.bo = nn.Parameter(torch.zeros(config.n_embd))

    def attend(self, x):
        return sum(head(x) for head in self.heads) + self.bo


class OneHotGPT2(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.v, self.p, d = config.vocab_size, config.n_positions, config.n_embd
        self.we, self.wp, self.wu = (
            nn.Linear(self.v, d, bias=False),
            nn.Linear(self.p, d, bias=False),
            nn.Linear(d, self.v, bias=False),
        )
        self.layers, self.n = nn.Sequential(*(Layer(config) for _ in range(config.n_layer))), nn.LayerNorm(d)

    def forward(self, ids):
        places, dtype = torch.arange(ids.shape[1], device=ids.device), self.we.weight.dtype
        x = self.we(one_hot(ids, self.v).to(dtype)) + self.wp(one_hot(places, self.p).to(dtype))
        return self.wu(self.n(self.layers(x)))


build = OneHotGPT2


def fill(module, state):
    put(module, state, {"we": "wte.T", "wp": "wpe.T", "wu": "head", "n": "ln_f"})
    for i, layer in enumerate(module.layers):
        put(layer, state, {"n1": "ln_1", "n2": "ln_2", "w1": "mlp.c_fc.T", "w2": "mlp.c_proj.T"}, f"h.{i}.")
        put(layer, state, {"bo": "attn.c_proj.bias"}, f"h.{i}.")
        for j, head in enumerate(layer.heads):
            head.wo.weight.copy_(state[f"h.{i}.attn.c_proj.weight"].chunk(len(layer.heads))[j].T)
            for own, x in ((head.wq, "q"), (head.wk, "k"), (head.wv, "v")):
                own.weight.copy_(state[f"h.{i}.{x}.weight"].chunk(len(layer.heads), 1)[j].T)
                own.bias.copy_(state[f"h.{i}.{x}.bias"].chunk(len(layer.heads))[j])
