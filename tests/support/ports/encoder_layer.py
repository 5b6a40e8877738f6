"""GPT-2 out of PyTorch's own parts: with a causal mask and the norm in front, an encoder is a decoder-only model."""

from functools import partial

import torch
from torch import nn


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
    renamed = {
        "self_attn.in_proj_": "attn.c_attn.",
        "self_attn.out_proj.": "attn.c_proj.",
        "linear1.": "mlp.c_fc.",
        "linear2.": "mlp.c_proj.",
        "norm1.": "ln_1.",
        "norm2.": "ln_2.",
    }
    new = {"token.weight": state["wte.weight"], "position.weight": state["wpe.weight"]}
    for kind in ("weight", "bias"):
        new[f"encoder.norm.{kind}"] = state[f"ln_f.{kind}"]
        for i in range(len(module.encoder.layers)):
            for theirs, gpt2 in renamed.items():
                new[f"encoder.layers.{i}.{theirs}{kind}"] = state[f"h.{i}.{gpt2}{kind}"].t().contiguous()
    module.load_state_dict(new)
