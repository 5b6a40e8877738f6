"""Sizes inferred on the first call: nn.LazyLinear everywhere; norms and layers in one nn.Sequential."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, fill as fill_parts, put


class Layer(Block):
    ORDER = "norm_1 q k v out norm_2 up down"
    NAMES = "q to_q k to_k v to_v out to_out"

    @staticmethod
    def LINEAR(n_in, n_out):
        return nn.LazyLinear(n_out)


class LazyGPT(GPT):
    BLOCK, NAMES = Layer, "words tokens places positions"

    @staticmethod
    def HEAD(n_in, n_out, bias):
        return nn.LazyLinear(n_out)


build = LazyGPT


def fill(module, state):
    module(torch.zeros(1, 1, dtype=torch.long))
    fill_parts(module, state)
    put(module, state, {"head": "head"})
