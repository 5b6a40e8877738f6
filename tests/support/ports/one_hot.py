"""GPT-2 as a chain of matrix products: even the embeddings are Linear layers, over one-hot vectors."""

import torch
from torch import nn
from torch.nn.functional import one_hot

from support.ports import put


class HeadWithOutput(nn.Module):
    """One head, from the stream back to the stream: its share of the output projection is its own."""

    def __init__(self, d, k):
        super().__init__()
        self.wq, self.wk, self.wv = nn.Linear(d, k), nn.Linear(d, k), nn.Linear(d, k)
        self.wo = nn.Linear(k, d, bias=False)

    def forward(self, x, mask):
        a = self.wq(x) @ self.wk(x).transpose(1, 2) / self.wk.out_features**0.5
        return self.wo(torch.softmax(a + mask, dim=-1) @ self.wv(x))


class Layer(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.heads = nn.ModuleList(HeadWithOutput(d, d // heads) for _ in range(heads))
        self.bo = nn.Parameter(torch.zeros(d))
        self.w1, self.w2 = nn.Linear(d, f), nn.Linear(f, d)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x, mask):
        y = self.n1(x)
        x = x + sum(head(y, mask) for head in self.heads) + self.bo
        return x + self.w2(self.act(self.w1(self.n2(x))))


class OneHotGPT2(nn.Module):
    def __init__(self, v, p, d, layers, heads, f):
        super().__init__()
        self.v, self.p = v, p
        self.we = nn.Linear(v, d, bias=False)
        self.wp = nn.Linear(p, d, bias=False)
        self.layers = nn.ModuleList(Layer(d, heads, f) for _ in range(layers))
        self.n = nn.LayerNorm(d)
        self.wu = nn.Linear(d, v, bias=False)

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        dtype = self.we.weight.dtype
        x = self.we(one_hot(ids, self.v).to(dtype)) + self.wp(one_hot(places, self.p).to(dtype))
        mask = torch.zeros(len(places), len(places), dtype=dtype, device=ids.device)
        mask[places[:, None] < places] = float("-inf")
        for layer in self.layers:
            x = layer(x, mask)
        return self.wu(self.n(x))


def build(config):
    return OneHotGPT2(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


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
