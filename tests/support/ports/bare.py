"""No biases anywhere, as newer models have it; norms scale and do not shift."""

import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.layer_norm(x, self.g.shape, self.g, None, 1e-5)


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in self.wqkv(x).chunk(3, dim=-1))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, dim, n_heads, hidden):
        super().__init__()
        self.attention_norm, self.attention = Norm(dim), Attention(dim, n_heads)
        self.ffn_norm, self.feed_forward = Norm(dim), FeedForward(dim, hidden)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, vocab_size, max_seq_len, dim, n_layers, n_heads, hidden):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.pos_embeddings = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, hidden) for _ in range(n_layers))
        self.norm = Norm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) + self.pos_embeddings.weight[: tokens.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def build(config):
    return Transformer(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@torch.no_grad()
def fill(module, state):
    module.tok_embeddings.weight.copy_(state["wte.weight"])
    module.pos_embeddings.weight.copy_(state["wpe.weight"])
    module.norm.g.copy_(state["ln_f.weight"])
    for i, layer in enumerate(module.layers):
        layer.attention_norm.g.copy_(state[f"h.{i}.ln_1.weight"])
        layer.attention.wqkv.weight.copy_(state[f"h.{i}.attn.c_attn.weight"].T)
        layer.attention.wo.weight.copy_(state[f"h.{i}.attn.c_proj.weight"].T)
        layer.ffn_norm.g.copy_(state[f"h.{i}.ln_2.weight"])
        layer.feed_forward.w1.weight.copy_(state[f"h.{i}.mlp.c_fc.weight"].T)
        layer.feed_forward.w2.weight.copy_(state[f"h.{i}.mlp.c_proj.weight"].T)
