"""Weights have a scale that suits the optimizer: norms store their distance from one, the rest is scaled when it is used."""

import torch
from torch import nn

from support.ports import put


class OffsetNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.gamma = nn.Parameter(torch.zeros(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return self.norm(x) * (self.gamma + 1.0) + self.beta


class Equalised(nn.Module):
    """A Linear of weights at unit scale, as for equalised learning rates."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in))
        self.bias = nn.Parameter(torch.zeros(n_out))
        self.gain = n_in**-0.5

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.gain, self.bias)


class Positions(nn.Module):
    def __init__(self, length, dim):
        super().__init__()
        self.emb = nn.Embedding(length, dim)
        self.scale = dim**-0.5

    def forward(self, x):
        return self.emb(torch.arange(x.shape[1], device=x.device)) * self.scale


class Attend(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (Equalised(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        i, j = sim.shape[-2:]
        sim = sim.masked_fill(torch.ones(i, j, dtype=torch.bool, device=x.device).triu(j - i + 1), -torch.finfo(sim.dtype).max)
        return self.to_out(torch.einsum("bhij,bhjd->bhid", sim.softmax(-1), v).transpose(1, 2).flatten(2))


class Wrapper(nn.Module):
    def __init__(self, tokens, length, dim, depth, heads, inner):
        super().__init__()
        self.token_emb = nn.Embedding(tokens, dim)
        self.pos_emb = Positions(length, dim)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            feed_forward = nn.Sequential(Equalised(dim, inner), nn.GELU("tanh"), nn.Dropout(0.1), Equalised(inner, dim))
            self.layers.append(nn.ModuleList([OffsetNorm(dim), Attend(dim, heads)]))
            self.layers.append(nn.ModuleList([OffsetNorm(dim), feed_forward]))
        self.final_norm = OffsetNorm(dim)
        self.to_logits = nn.Linear(dim, tokens, bias=False)

    def forward(self, x):
        x = self.token_emb(x) + self.pos_emb(x)
        for norm, function in self.layers:
            x = function(norm(x)) + x
        return self.to_logits(self.final_norm(x))


def build(config):
    return Wrapper(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"token_emb": "wte", "to_logits": "head"})
    module.pos_emb.emb.weight.copy_(state["wpe.weight"] / module.pos_emb.scale)
    norms = {"ln_f": module.final_norm}
    for i in range(len(module.layers) // 2):
        (norm_1, attend), (norm_2, feed_forward) = module.layers[2 * i : 2 * i + 2]
        norms |= {f"h.{i}.ln_1": norm_1, f"h.{i}.ln_2": norm_2}
        put(attend, state, {"to_q": "q.T", "to_k": "k.T", "to_v": "v.T", "to_out": "attn.c_proj.T"}, f"h.{i}.")
        put(feed_forward, state, {"0": "mlp.c_fc.T", "3": "mlp.c_proj.T"}, f"h.{i}.")
    for part in module.modules():
        if isinstance(part, Equalised):
            part.weight.div_(part.gain)
    for name, norm in norms.items():
        put(norm, state, {"gamma": f"{name}.weight", "beta": f"{name}.bias"})
        norm.gamma.sub_(1)
