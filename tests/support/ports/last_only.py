"""For inference: without targets, only the last position's logits are computed. Blocks are called by name, first to last."""

import torch
from torch import nn
from torch.nn import functional as F


def _attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class CausalAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.proj = nn.ModuleDict({name: nn.Linear(d, d) for name in ("v", "q", "k", "o")})

    def forward(self, x):
        q, k, v = (self.proj[name](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv")
        return self.proj["o"](_attend(q, k, v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.pre = nn.ModuleDict({"attention": nn.LayerNorm(d), "mlp": nn.LayerNorm(d)})
        self.attention = CausalAttention(d, heads)
        self.mlp = nn.Sequential(nn.Linear(d, f), nn.GELU(approximate="tanh"), nn.Linear(f, d))

    def forward(self, x):
        for branch in ("attention", "mlp"):
            x = x + getattr(self, branch)(self.pre[branch](x))
        return x


class Decoder(nn.Module):
    def __init__(self, vocab, context, d, depth, heads, f):
        super().__init__()
        self.embed = nn.ModuleDict({"tokens": nn.Embedding(vocab, d), "positions": nn.Embedding(context, d)})
        self.layers = nn.ModuleDict({f"layer_{i + 1:02}": Layer(d, heads, f) for i in range(depth)})
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.embed["tokens"].weight = self.head.weight

    def forward(self, ids, targets=None):
        x = self.embed["tokens"](ids) + self.embed["positions"].weight[: ids.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(config):
    return Decoder(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@torch.no_grad()
def fill(module, state):
    def put(target, weight, bias):
        target.load_state_dict({"weight": weight, "bias": bias})

    module.head.weight.copy_(state["wte.weight"])
    module.embed["positions"].weight.copy_(state["wpe.weight"])
    put(module.norm, state["ln_f.weight"], state["ln_f.bias"])
    for i, layer in enumerate(module.layers.values()):
        p = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        put(layer.pre["attention"], p["ln_1.weight"], p["ln_1.bias"])
        put(layer.pre["mlp"], p["ln_2.weight"], p["ln_2.bias"])
        for name, w, b in zip("qkv", p["attn.c_attn.weight"].chunk(3, 1), p["attn.c_attn.bias"].chunk(3), strict=True):
            put(layer.attention.proj[name], w.T, b)
        put(layer.attention.proj["o"], p["attn.c_proj.weight"].T, p["attn.c_proj.bias"])
        put(layer.mlp[0], p["mlp.c_fc.weight"].T, p["mlp.c_fc.bias"])
        put(layer.mlp[2], p["mlp.c_proj.weight"].T, p["mlp.c_proj.bias"])
