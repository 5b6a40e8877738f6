"""GPT-2 out of PyTorch's own parts: with a causal mask and the norm in front, an encoder is a decoder-only model."""

from functools import partial

import torch
from torch import nn

from support.ports import put


class GPT(nn.Module):
    def __init__(self, ntoken, max_len, d_model, nhead, nlayers, d_hid, dropout=0.1):
        super().__init__()
        self.token = nn.Embedding(ntoken, d_model)
        self.position = nn.Embedding(max_len, d_model)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            d_model,
            nhead,
            d_hid,
            dropout,
            activation=partial(nn.functional.gelu, approximate="tanh"),
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, nlayers, norm=nn.LayerNorm(d_model), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(max_len), persistent=False)

    def forward(self, src):
        length = src.shape[1]
        x = self.token(src) + self.position(torch.arange(length, device=src.device))
        mask = self.mask[:length, :length].to(x.dtype)
        return self.encoder(self.dropout(x), mask=mask, is_causal=True) @ self.token.weight.T


def build(config):
    return GPT(config.vocab_size, config.n_positions, config.n_embd, config.n_head, config.n_layer, config.inner)


def fill(module, state):
    put(module, state, {"token": "wte", "position": "wpe", "encoder.norm": "ln_f"})
    for i, layer in enumerate(module.encoder.layers):
        put(layer, state, {"norm1": "ln_1", "self_attn": "attn.c_attn.T", "self_attn.out_proj": "attn.c_proj.T"}, f"h.{i}.")
        put(layer, state, {"norm2": "ln_2", "linear1": "mlp.c_fc.T", "linear2": "mlp.c_proj.T"}, f"h.{i}.")
