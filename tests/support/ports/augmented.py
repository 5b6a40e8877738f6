"""GPT-2 in homogeneous coordinates: a constant 1 is appended to every input, and the bias is the last row of the matrix."""

import torch
from torch import nn

from support.ports.parts import GPT, LINEAR, Block, put


class Affine(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(n_in + 1, n_out) * 0.02)

    def forward(self, x):
        return torch.cat((x, torch.ones_like(x[..., :1])), dim=-1) @ self.matrix


class Layer(Block):
    LINEAR = Affine


class GPT2(GPT):
    BLOCK = Layer
    NAMES = "last norm"


build = GPT2


def fill(module, state):
    put(module, state, {"words": "wte", "places": "wpe", "norm": "ln_f"})
    for i, block in enumerate(module.blocks):
        put(block, state, {"norm_1": "ln_1", "norm_2": "ln_2"}, f"h.{i}.")
        for role in ("qkv", "out", "up", "down"):
            weight, bias = (state[f"h.{i}.{LINEAR[role]}.{leaf}"] for leaf in ("weight", "bias"))
            block[role].matrix.copy_(torch.vstack((weight, bias)))
