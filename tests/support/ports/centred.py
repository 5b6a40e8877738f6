"""Everything is kept near zero for the sake of weight decay: norms store their distance from one, positions are scaled down."""

import torch
from torch import nn


class OffsetNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.gamma = nn.Parameter(torch.zeros(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return self.norm(x) * (self.gamma + 1.0) + self.beta


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
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))

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
            feed_forward = nn.Sequential(nn.Linear(dim, inner), nn.GELU("tanh"), nn.Dropout(0.1), nn.Linear(inner, dim))
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


@torch.no_grad()
def fill(module, state):
    def norm(target, name):
        target.gamma.copy_(state[name + ".weight"] - 1)
        target.beta.copy_(state[name + ".bias"])

    module.token_emb.weight.copy_(state["wte.weight"])
    module.to_logits.weight.copy_(state["wte.weight"])
    module.pos_emb.emb.weight.copy_(state["wpe.weight"] / module.pos_emb.scale)
    norm(module.final_norm, "ln_f")
    for i in range(len(module.layers) // 2):
        p = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        (norm_1, attend), (norm_2, feed_forward) = module.layers[2 * i : 2 * i + 2]
        norm(norm_1, f"h.{i}.ln_1")
        norm(norm_2, f"h.{i}.ln_2")
        weights, biases = p["attn.c_attn.weight"].T.chunk(3), p["attn.c_attn.bias"].chunk(3)
        for target, weight, bias in (
            *zip((attend.to_q, attend.to_k, attend.to_v), weights, biases, strict=True),
            (attend.to_out, p["attn.c_proj.weight"].T, p["attn.c_proj.bias"]),
            (feed_forward[0], p["mlp.c_fc.weight"].T, p["mlp.c_fc.bias"]),
            (feed_forward[3], p["mlp.c_proj.weight"].T, p["mlp.c_proj.bias"]),
        ):
            target.load_state_dict({"weight": weight, "bias": bias})
