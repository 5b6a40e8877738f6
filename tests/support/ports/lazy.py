"""Sizes inferred on the first call: nn.LazyLinear everywhere."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.LazyLinear(d) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.attn = nn.Sequential(nn.LayerNorm(d), Attention(d, heads))
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.LazyLinear(f), nn.GELU("tanh"), nn.LazyLinear(d))

    def forward(self, x):
        x = self.attn(x) + x
        return self.mlp(x) + x


class LazyGPT(nn.Module):
    def __init__(self, vocab, context, d, depth, heads, f):
        super().__init__()
        self.tokens = nn.Embedding(vocab, d)
        self.positions = nn.Parameter(torch.randn(context, d) * 0.02)
        self.blocks = nn.Sequential(*(Block(d, heads, f) for _ in range(depth)))
        self.last = nn.Sequential(nn.LayerNorm(d), nn.LazyLinear(vocab, bias=False))

    def forward(self, ids):
        return self.last(self.blocks(self.tokens(ids) + self.positions[: ids.shape[1]]))


def build(config):
    return LazyGPT(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@torch.no_grad()
def fill(module, state):
    module(torch.zeros(1, 1, dtype=torch.long))
    module.tokens.weight.copy_(state["wte.weight"])
    module.positions.copy_(state["wpe.weight"])
    module.last[0].load_state_dict({"weight": state["ln_f.weight"], "bias": state["ln_f.bias"]})
    module.last[1].weight.copy_(state["wte.weight"])
    for i, block in enumerate(module.blocks):
        attention = block.attn[1]
        weights, biases = state[f"h.{i}.attn.c_attn.weight"].chunk(3, 1), state[f"h.{i}.attn.c_attn.bias"].chunk(3)
        for target, weight, bias in zip((attention.to_q, attention.to_k, attention.to_v), weights, biases, strict=True):
            target.weight.copy_(weight.T)
            target.bias.copy_(bias)
        for target, name in (
            (block.attn[0], "ln_1"),
            (attention.to_out, "attn.c_proj"),
            (block.mlp[0], "ln_2"),
            (block.mlp[1], "mlp.c_fc"),
            (block.mlp[3], "mlp.c_proj"),
        ):
            target.weight.copy_(state[f"h.{i}.{name}.weight"].t())
            target.bias.copy_(state[f"h.{i}.{name}.bias"])
