"""Decoder in the style of the large training frameworks: per-head interleaved query_key_value, vocabulary padded for speed."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, put


class ParallelTransformerLayer(Block):
    NAMES = "norm_1 input_layernorm qkv query_key_value out dense norm_2 post_attention_layernorm"
    NAMES += " up dense_h_to_4h down dense_4h_to_h"

    def __init__(self, config):
        super().__init__(config)
        size = config.n_positions
        self.register_buffer("ltor_mask", -1e9 * torch.triu(torch.ones(size, size), diagonal=1), persistent=False)

    def split(self, x):
        mixed = self.query_key_value(x).unflatten(-1, (self.n_head, -1))
        return mixed.transpose(1, 2).chunk(3, dim=-1)

    def mix(self, q, k, v):
        attention_scores = torch.matmul(q, k.transpose(-1, -2)) / q.size(-1) ** 0.5
        attention_scores = attention_scores + self.ltor_mask[: q.size(-2), : q.size(-2)]
        return torch.matmul(nn.functional.softmax(attention_scores, dim=-1), v)


class GPTModel(GPT):
    BLOCK = ParallelTransformerLayer
    NAMES = "words word_embeddings places position_embeddings blocks layers last final_layernorm"

    def __init__(self, config):
        super().__init__(config)
        self.word_embeddings = nn.Embedding((config.vocab_size + 63) // 64 * 64, config.n_embd)
        self.register_buffer("position_ids", torch.arange(config.n_positions).unsqueeze(0))

    def embed(self, ids):
        return self.word_embeddings(ids) + self.position_embeddings(self.position_ids[:, : ids.size(1)])


build = GPTModel


def fill(module, state):
    module.word_embeddings.weight.zero_()
    module.word_embeddings.weight[: len(state["wte.weight"])] = state["wte.weight"]
    put(module, state, {"position_embeddings": "wpe", "final_layernorm": "ln_f"})
    for i, layer in enumerate(module.layers):
        put(layer, state, {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}, f"h.{i}.")
        put(layer, state, {"dense": "attn.c_proj.T", "dense_h_to_4h": "mlp.c_fc.T", "dense_4h_to_h": "mlp.c_proj.T"}, f"h.{i}.")
        for leaf in ("weight", "bias"):
            rows = state[f"h.{i}.attn.c_attn.{leaf}"].t().unflatten(0, (3, layer.n_head, -1))
            getattr(layer.query_key_value, leaf).copy_(rows.transpose(0, 1).flatten(0, 2))
