"""A GPT in one short file: fused projections, PyTorch's attention kernel, one matrix for both ends."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from support.ports import put


@dataclass
class Sizes:
    vocab: int
    context: int
    layers: int
    heads: int
    width: int
    hidden: int
    dropout: float = 0.1
    bias: bool = True


class Norm(nn.Module):
    """LayerNorm whose shift can be left out."""

    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if bias else None)

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps=1e-5)


class SelfAttention(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads, self.dropout = s.heads, s.dropout
        self.c_attn = nn.Linear(s.width, s.width * 3, bias=s.bias)
        self.c_proj = nn.Linear(s.width, s.width, bias=s.bias)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout * self.training)
        return self.c_proj(mixed.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.c_fc = nn.Linear(s.width, s.hidden, bias=s.bias)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(s.hidden, s.width, bias=s.bias)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.ln_1, self.attn = Norm(s.width, s.bias), SelfAttention(s)
        self.ln_2, self.mlp = Norm(s.width, s.bias), FeedForward(s)
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self, s):
        super().__init__()
        parts = {
            "wte": nn.Embedding(s.vocab, s.width),
            "wpe": nn.Embedding(s.context, s.width),
            "drop": nn.Dropout(s.dropout),
            "h": nn.ModuleList(Layer(s) for _ in range(s.layers)),
            "ln_f": Norm(s.width, s.bias),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(s.width, s.vocab, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets=None):
        t = self.transformer
        x = t["drop"](t["wte"](ids) + t["wpe"].weight[: ids.shape[1]])
        for layer in t["h"]:
            x = layer(x)
        logits = self.lm_head(t["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(config, bias=True):
    return GPT(
        Sizes(config.vocab_size, config.n_positions, config.n_layer, config.n_head, config.n_embd, config.inner, bias=bias)
    )


def fill(module, state):
    put(module.transformer, state, {name: name for name in ("wte", "wpe", "ln_f")})
    for i, layer in enumerate(module.transformer["h"]):
        put(layer, state, {"ln_1": "ln_1", "attn.c_attn": "attn.c_attn.T", "attn.c_proj": "attn.c_proj.T"}, f"h.{i}.")
        put(layer, state, {"ln_2": "ln_2", "mlp.c_fc": "mlp.c_fc.T", "mlp.c_proj": "mlp.c_proj.T"}, f"h.{i}.")
