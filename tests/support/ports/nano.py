"""A GPT in one short file: fused projections, PyTorch's attention kernel, one matrix for both ends."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from support.ports import put


class Norm(nn.Module):
    """LayerNorm whose shift can be left out."""

    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if bias else None)

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps=1e-5)


class SelfAttention(nn.Module):
    def __init__(self, config, bias):
        super().__init__()
        self.heads, self.dropout = config.n_head, 0.1
        self.c_attn = nn.Linear(config.n_embd, config.n_embd * 3, bias=bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=bias)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout * self.training)
        return self.c_proj(mixed.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, config, bias):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(config.n_embd, config.inner, bias), nn.Linear(config.inner, config.n_embd, bias)
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Layer(nn.Module):
    def __init__(self, config, bias):
        super().__init__()
        self.ln_1, self.attn = Norm(config.n_embd, bias), SelfAttention(config, bias)
        self.ln_2, self.mlp = Norm(config.n_embd, bias), FeedForward(config, bias)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self, config, bias=True):
        super().__init__()
        parts = {
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.n_positions, config.n_embd),
            "drop": nn.Dropout(0.1),
            "h": nn.ModuleList(Layer(config, bias) for _ in range(config.n_layer)),
            "ln_f": Norm(config.n_embd, bias),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
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


build = GPT


def fill(module, state):
    put(module.transformer, state, {name: name for name in ("wte", "wpe", "ln_f")})
    for i, layer in enumerate(module.transformer["h"]):
        put(layer, state, {"ln_1": "ln_1", "attn.c_attn": "attn.c_attn.T", "attn.c_proj": "attn.c_proj.T"}, f"h.{i}.")
        put(layer, state, {"ln_2": "ln_2", "mlp.c_fc": "mlp.c_fc.T", "mlp.c_proj": "mlp.c_proj.T"}, f"h.{i}.")
