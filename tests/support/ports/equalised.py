"""Equalised learning rates: weights are stored at unit scale and multiplied by a constant whenever they are used."""

import torch
from torch import nn


class Equalised(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in))
        self.bias = nn.Parameter(torch.zeros(n_out))
        self.gain = n_in**-0.5

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.gain, self.bias)


class Block(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = Equalised(d, 3 * d), Equalised(d, d)
        self.up, self.down = Equalised(d, f), Equalised(f, d)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocab, context, d, depth, heads, f):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.h = nn.Sequential(*(Block(d, heads, f) for _ in range(depth)))
        self.ln_f = nn.LayerNorm(d)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        return self.ln_f(self.h(x)) @ self.wte.weight.T


def build(config):
    return GPT2(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@torch.no_grad()
def fill(module, state):
    module.wte.weight.copy_(state["wte.weight"])
    module.wpe.weight.copy_(state["wpe.weight"])
    for norm, name in (
        (module.ln_f, "ln_f"),
        *((getattr(b, n), f"h.{i}.{n}") for i, b in enumerate(module.h) for n in ("ln_1", "ln_2")),
    ):
        norm.load_state_dict({"weight": state[f"{name}.weight"], "bias": state[f"{name}.bias"]})
    for i, block in enumerate(module.h):
        for target, name in (
            (block.qkv, "attn.c_attn"),
            (block.out, "attn.c_proj"),
            (block.up, "mlp.c_fc"),
            (block.down, "mlp.c_proj"),
        ):
            target.weight.copy_(state[f"h.{i}.{name}.weight"].T / target.gain)
            target.bias.copy_(state[f"h.{i}.{name}.bias"])
