"""Id 0 is padding and positions start at 2, as in some encoder-decoder code bases: every table has rows that are never read."""

import torch
from torch import nn
from torch.nn import functional as F

from support.ports.parts import GPT, Block, fill_block, put


class Places(nn.Embedding):
    """Two rows more than there are positions; padding reads row 1, and row 0 is never read."""

    def forward(self, real):
        return super().forward(torch.where(real > 0, real.cumsum(-1) + 1, 1))


class DecoderLayer(Block):
    ORDER = "k v q out norm_1 up down norm_2"
    NAMES = "q q_proj k k_proj v v_proj out out_proj norm_1 self_attn_layer_norm up fc1 down fc2 norm_2 final_layer_norm"

    def attend(self, x):
        (b, t, d), h = x.shape, self.n_head
        q, k, v = (
            y.view(b, t, h, -1).transpose(1, 2).reshape(b * h, t, -1)
            for y in (self.q_proj(x) * (d // h) ** -0.5, self.k_proj(x), self.v_proj(x))
        )
        mask = torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)
        weights = torch.bmm(q, k.transpose(1, 2)).view(b, h, t, t) + mask
        weights = F.softmax(weights, dim=-1).view(b * h, t, t)
        return self.out_proj(torch.bmm(weights, v).view(b, h, t, -1).transpose(1, 2).reshape(b, t, d))

    def feed(self, x):
        return super().feed(x.reshape(-1, x.size(-1))).view(x.shape)


class Decoder(GPT):
    BLOCK, NAMES = DecoderLayer, "words embed_tokens places embed_positions blocks layers last final_layer_norm"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size + 1, config.n_embd, padding_idx=0)
        self.embed_positions = Places(config.n_positions + 2, config.n_embd)

    def forward(self, input_ids, attention_mask=None):
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.run(self.embed_tokens(input_ids + 1) + self.embed_positions(real))
        return {"logits": self.logits(x)[..., 1:], "hidden": x}


build = Decoder


def fill(module, state):
    module.embed_tokens.weight[1:] = state["wte.weight"]
    module.embed_positions.weight[2:] = state["wpe.weight"]
    put(module, state, {"final_layer_norm": "ln_f"})
    for i, layer in enumerate(module.layers):
        fill_block(layer, state, i)
