"""Time-major GPT-2 (T, B, D), rebuilt from an old sequence toolkit: self.gpt.transformer, fused k, q, v, three levels deep."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, put


class DecoderBlock(Block):
    ORDER = "up down norm_2 qkv out norm_1"
    NAMES = "up fc1 down fc2 norm_2 final_layer_norm qkv kqv out unify norm_1 self_attn_layer_norm"

    def attend(self, x):  # (time, batch, width)
        time, batch, width = x.shape
        head = width // self.n_head
        keys, queries, values = (
            y.reshape(time, batch * self.n_head, head).transpose(0, 1) for y in self.kqv(x).split(width, dim=-1)
        )
        mask = torch.full((time, time), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        weights = (torch.bmm(queries, keys.transpose(1, 2)) * head**-0.5 + mask).softmax(dim=2)
        return self.unify(torch.bmm(weights, values).transpose(0, 1).reshape(time, batch, width))


class Transformer(GPT):
    BLOCK = DecoderBlock
    NAMES = "words embed_tokens places embed_positions blocks layers last layer_norm"

    def embed(self, tokens):
        positions = torch.arange(tokens.shape[0], device=tokens.device)
        return self.embed_tokens(tokens) + self.embed_positions(positions)[:, None]


class LanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gpt = nn.ModuleDict({"transformer": Transformer(config)})

    def forward(self, tokens):
        return self.gpt["transformer"](tokens.t()).transpose(0, 1)


build = LanguageModel


def fill(module, state):
    transformer = module.gpt["transformer"]
    put(transformer, state, {"embed_tokens": "wte", "embed_positions": "wpe", "layer_norm": "ln_f"})
    for i, layer in enumerate(transformer.layers):
        put(layer, state, {"self_attn_layer_norm": "ln_1", "unify": "attn.c_proj.T"}, f"h.{i}.")
        put(layer, state, {"final_layer_norm": "ln_2", "fc1": "mlp.c_fc.T", "fc2": "mlp.c_proj.T"}, f"h.{i}.")
        for leaf in ("weight", "bias"):
            getattr(layer.kqv, leaf).copy_(torch.cat([state[f"h.{i}.{x}.{leaf}"].t() for x in "kqv"]))
