"""Id 0 is padding and positions start at 2, as in some encoder-decoder code bases: every table has rows that are never read."""

import torch
from torch import nn
from torch.nn import functional as F

from support.ports import put


class Places(nn.Embedding):
    """Two rows more than there are positions; padding reads row 1, and row 0 is never read."""

    def __init__(self, positions, dim):
        super().__init__(positions + 2, dim)

    def forward(self, real):
        return super().forward(torch.where(real > 0, real.cumsum(-1) + 1, 1))


class Attention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.scaling = num_heads, (embed_dim // num_heads) ** -0.5
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = (
            y.view(b, t, self.num_heads, -1).transpose(1, 2).reshape(b * self.num_heads, t, -1)
            for y in (self.q_proj(x) * self.scaling, self.k_proj(x), self.v_proj(x))
        )
        weights = torch.bmm(q, k.transpose(1, 2)).view(b, self.num_heads, t, t) + mask
        weights = F.softmax(weights, dim=-1).view(b * self.num_heads, t, t)
        return self.out_proj(torch.bmm(weights, v).view(b, self.num_heads, t, -1).transpose(1, 2).reshape(b, t, d))


class DecoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, ffn_dim):
        super().__init__()
        self.self_attn = Attention(embed_dim, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, mask):
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask)
        b, t, d = x.shape
        y = self.final_layer_norm(x).reshape(-1, d)
        return x + self.fc2(F.gelu(self.fc1(y), approximate="tanh")).view(b, t, d)


class Decoder(nn.Module):
    def __init__(self, vocab_size, max_positions, embed_dim, layers, heads, ffn_dim):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size + 1, embed_dim, padding_idx=0)
        self.embed_positions = Places(max_positions, embed_dim)
        self.layers = nn.ModuleList([DecoderLayer(embed_dim, heads, ffn_dim) for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        x = self.embed_tokens(input_ids + 1) + self.embed_positions(attention_mask)
        t = input_ids.shape[1]
        mask = torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return {"logits": F.linear(self.final_layer_norm(x), self.embed_tokens.weight)[..., 1:], "hidden": x}


def build(config):
    return Decoder(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    module.embed_tokens.weight[1:] = state["wte.weight"]
    module.embed_positions.weight[2:] = state["wpe.weight"]
    put(module, state, {"final_layer_norm": "ln_f"})
    for i, layer in enumerate(module.layers):
        put(layer.self_attn, state, {f"{x}_proj": f"{x}.T" for x in "qkv"} | {"out_proj": "attn.c_proj.T"}, f"h.{i}.")
        put(layer, state, {"self_attn_layer_norm": "ln_1", "final_layer_norm": "ln_2"}, f"h.{i}.")
        put(layer, state, {"fc1": "mlp.c_fc.T", "fc2": "mlp.c_proj.T"}, f"h.{i}.")
