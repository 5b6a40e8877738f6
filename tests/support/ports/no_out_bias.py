"""W_q, W_k, W_v with biases, W_o without: a common slip."""

import torch
from torch import nn


class MultiHead(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.W_q, self.W_k, self.W_v = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)
        self.W_o = nn.Linear(size, size, bias=False)

    def forward(self, x, mask):
        shape = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = self.W_q(x).reshape(shape), self.W_k(x).reshape(shape), self.W_v(x).reshape(shape)
        scores = torch.einsum("nqhd,nkhd->nhqk", [q, k]) / shape[-1] ** 0.5
        weights = scores.masked_fill(mask == 0, -1e20).softmax(dim=3)
        return self.W_o(torch.einsum("nhqk,nkhd->nqhd", [weights, v]).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, size, heads, hidden):
        super().__init__()
        self.attention = MultiHead(size, heads)
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.feed_forward = nn.Sequential(nn.Linear(size, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, size))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, mask):
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class Decoder(nn.Module):
    def __init__(self, vocabulary, longest, size, depth, heads, hidden):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, size), nn.Embedding(longest, size)
        self.layers = nn.ModuleList([Block(size, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(size)
        self.out = nn.Linear(size, vocabulary)
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids):
        n, t = ids.shape
        mask = torch.ones(n, 1, t, t, device=ids.device).tril()
        x = self.dropout(self.words(ids) + self.places(torch.arange(t, device=ids.device).repeat(n, 1)))
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(self.norm(x))


def build(config):
    return Decoder(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@torch.no_grad()
def fill(module, state):
    module.words.weight.copy_(state["wte.weight"])
    module.places.weight.copy_(state["wpe.weight"])
    module.out.weight.copy_(state["wte.weight"])
    module.out.bias.zero_()
    module.norm.load_state_dict({"weight": state["ln_f.weight"], "bias": state["ln_f.bias"]})
    for i, layer in enumerate(module.layers):
        p = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        attention = layer.attention
        weights, biases = p["attn.c_attn.weight"].T.chunk(3), p["attn.c_attn.bias"].chunk(3)
        for target, weight, bias in zip((attention.W_q, attention.W_k, attention.W_v), weights, biases, strict=True):
            target.load_state_dict({"weight": weight, "bias": bias})
        attention.W_o.weight.copy_(p["attn.c_proj.weight"].T)
        layer.norm1.load_state_dict({"weight": p["ln_1.weight"], "bias": p["ln_1.bias"]})
        layer.norm2.load_state_dict({"weight": p["ln_2.weight"], "bias": p["ln_2.bias"]})
        layer.feed_forward[0].load_state_dict({"weight": p["mlp.c_fc.weight"].T, "bias": p["mlp.c_fc.bias"]})
        layer.feed_forward[2].load_state_dict({"weight": p["mlp.c_proj.weight"].T, "bias": p["mlp.c_proj.bias"]})
