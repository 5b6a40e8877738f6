"""Weights have a scale that suits the optimizer: norms store their distance from one, the rest is scaled when it is used."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, fill as fill_parts, future, put


class OffsetNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.gamma, self.beta = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return self.norm(x) * (self.gamma + 1.0) + self.beta


class Equalised(nn.Module):
    """A Linear of weights at unit scale, as for equalised learning rates."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight, self.bias, self.gain = nn.Parameter(torch.randn(n_out, n_in)), nn.Parameter(torch.zeros(n_out)), n_in**-0.5

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.gain, self.bias)


class Layer(Block):
    LINEAR, NORM, ORDER = Equalised, OffsetNorm, "norm_1 q k v out norm_2 up down"
    NAMES = "q to_q k to_k v to_v out to_out"

    def mix(self, q, k, v):
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        sim = sim.masked_fill(future(sim), -torch.finfo(sim.dtype).max)
        return torch.einsum("bhij,bhjd->bhid", sim.softmax(-1), v)


class Wrapper(GPT):
    BLOCK, NORM, HEAD = Layer, OffsetNorm, nn.Linear
    NAMES = "words token_emb places pos_emb blocks layers last final_norm head to_logits"

    def embed(self, ids):
        return self.token_emb(ids) + self.pos_emb.weight[: ids.shape[1]] * self.pos_emb.embedding_dim**-0.5


build = Wrapper


def fill(module, state):
    fill_parts(module, state)
    module.pos_emb.weight.div_(module.pos_emb.embedding_dim**-0.5)
    for part in module.modules():
        if isinstance(part, Equalised):
            part.weight.div_(part.gain)
    norms = {"ln_f": module.final_norm} | {
        f"h.{i}.ln_{n}": layer[f"norm_{n}"] for i, layer in enumerate(module.layers) for n in "12"
    }
    for name, norm in norms.items():
        put(norm, state, {"gamma": f"{name}.weight", "beta": f"{name}.bias"})
        norm.gamma.sub_(1)
