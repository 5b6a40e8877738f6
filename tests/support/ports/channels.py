"""GPT-2 for people who come from speech: signals are (B, C, T), every projection is a 1x1 nn.Conv1d, each kind has a list."""

import torch
from torch import nn
from torch.nn import functional as F

from support.ports.parts import future, put


class ChannelNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(1, channels, 1)), nn.Parameter(torch.zeros(1, channels, 1))

    def forward(self, x):
        x = x - x.mean(1, keepdim=True)
        return x * torch.rsqrt((x**2).mean(1, keepdim=True) + 1e-5) * self.gamma + self.beta


class MultiHeadAttention(nn.Module):
    def __init__(self, channels, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.conv_q, self.conv_k, self.conv_v, self.conv_o = (nn.Conv1d(channels, channels, 1) for _ in range(4))

    def forward(self, x):
        b, d, t = x.shape
        q, k, v = (conv(x).view(b, self.n_heads, -1, t) for conv in (self.conv_q, self.conv_k, self.conv_v))
        scores = torch.matmul(q.transpose(-2, -1), k) / q.size(2) ** 0.5
        p_attn = F.softmax(scores.masked_fill(future(scores), -1e9), dim=-1)
        return self.conv_o(torch.matmul(v, p_attn.transpose(-2, -1)).reshape(b, d, t))


class FFN(nn.Sequential):
    def __init__(self, channels, hidden):
        super().__init__(nn.Conv1d(channels, hidden, 1), nn.GELU(approximate="tanh"), nn.Conv1d(hidden, channels, 1))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, layers = config.n_embd, range(config.n_layer)
        self.emb, self.pos = nn.Embedding(config.vocab_size, d), nn.Parameter(torch.randn(1, d, config.n_positions) * 0.02)
        self.attn_layers = nn.ModuleList(MultiHeadAttention(d, config.n_head) for _ in layers)
        self.norm_layers_1, self.norm_layers_2 = (nn.ModuleList(ChannelNorm(d) for _ in layers) for _ in range(2))
        self.ffn_layers = nn.ModuleList(FFN(d, config.inner) for _ in layers)
        self.last_norm, self.proj = ChannelNorm(d), nn.Conv1d(d, config.vocab_size, 1)

    def forward(self, x):
        x = self.emb(x).transpose(1, 2) + self.pos[:, :, : x.size(1)]
        for i, attn in enumerate(self.attn_layers):
            x = x + attn(self.norm_layers_1[i](x))
            x = x + self.ffn_layers[i](self.norm_layers_2[i](x))
        return self.proj(self.last_norm(x)).transpose(1, 2)


build = Decoder


def fill(module, state):
    put(module, state, {"emb": "wte", "pos": "wpe.weight.T", "last_norm": "ln_f", "proj": "head"})
    for i, attn in enumerate(module.attn_layers):
        put(module, state, {f"norm_layers_1.{i}": "ln_1", f"norm_layers_2.{i}": "ln_2"}, f"h.{i}.")
        put(attn, state, {f"conv_{x}": f"{x}.T" for x in "qkv"} | {"conv_o": "attn.c_proj.T"}, f"h.{i}.")
        put(module.ffn_layers[i], state, {"0": "c_fc.T", "2": "c_proj.T"}, f"h.{i}.mlp.")
