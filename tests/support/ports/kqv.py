"""Rebuilt from an old sequence toolkit: self.gpt.transformer, fused k, q, v, three levels deep."""

import torch
from torch import nn

from support.ports.parts import GPT, Block
from support.ports.parts import fill as fill_parts


class DecoderBlock(Block):
    ORDER = "up down norm_2 qkv out norm_1"
    NAMES = "up fc1 down fc2 norm_2 final_layer_norm qkv kqv out unify norm_1 self_attn_layer_norm"

    def split(self, x):
        k, q, v = super().split(x)
        return q, k, v


class Transformer(GPT):
    BLOCK, NAMES = DecoderBlock, "words embed_tokens places embed_positions blocks layers last layer_norm"


class LanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gpt = nn.ModuleDict({"transformer": Transformer(config)})

    def forward(self, tokens):
        return self.gpt["transformer"](tokens)


build = LanguageModel


def fill(module, state):
    fill_parts(module.gpt["transformer"], state)
    for i, layer in enumerate(module.gpt["transformer"].layers):
        for leaf in ("weight", "bias"):
            getattr(layer.kqv, leaf).copy_(torch.cat([state[f"h.{i}.{x}.{leaf}"].t() for x in "kqv"]))
