"""GPT-2 for people who come from speech: signals are (B, C, T), every projection is a 1x1 nn.Conv1d."""

import torch
from torch import nn
from torch.nn import functional as F

from support.ports import put


class ChannelNorm(nn.Module):
    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, channels, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1))
        self.eps = eps

    def forward(self, x):
        x = x - x.mean(1, keepdim=True)
        return x * torch.rsqrt((x**2).mean(1, keepdim=True) + self.eps) * self.gamma + self.beta


class MultiHeadAttention(nn.Module):
    def __init__(self, channels, n_heads, p_dropout=0.0):
        super().__init__()
        self.n_heads = n_heads
        self.conv_q = nn.Conv1d(channels, channels, 1)
        self.conv_k = nn.Conv1d(channels, channels, 1)
        self.conv_v = nn.Conv1d(channels, channels, 1)
        self.conv_o = nn.Conv1d(channels, channels, 1)
        self.drop = nn.Dropout(p_dropout)

    def forward(self, x):
        b, d, t = x.shape
        q, k, v = (conv(x).view(b, self.n_heads, -1, t) for conv in (self.conv_q, self.conv_k, self.conv_v))
        scores = torch.matmul(q.transpose(-2, -1), k) / q.size(2) ** 0.5
        scores = scores.masked_fill(torch.ones(t, t, device=x.device).tril() == 0, -1e9)
        p_attn = self.drop(F.softmax(scores, dim=-1))
        return self.conv_o(torch.matmul(v, p_attn.transpose(-2, -1)).reshape(b, d, t))


class FFN(nn.Module):
    def __init__(self, channels, filter_channels):
        super().__init__()
        self.conv_1 = nn.Conv1d(channels, filter_channels, 1)
        self.conv_2 = nn.Conv1d(filter_channels, channels, 1)

    def forward(self, x):
        return self.conv_2(F.gelu(self.conv_1(x), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, n_vocab, n_positions, channels, filter_channels, n_heads, n_layers):
        super().__init__()
        self.n_layers = n_layers
        self.emb = nn.Embedding(n_vocab, channels)
        self.pos = nn.Parameter(torch.randn(1, channels, n_positions) * 0.02)
        self.attn_layers = nn.ModuleList()
        self.norm_layers_1 = nn.ModuleList()
        self.ffn_layers = nn.ModuleList()
        self.norm_layers_2 = nn.ModuleList()
        for _ in range(n_layers):
            self.attn_layers.append(MultiHeadAttention(channels, n_heads))
            self.norm_layers_1.append(ChannelNorm(channels))
            self.ffn_layers.append(FFN(channels, filter_channels))
            self.norm_layers_2.append(ChannelNorm(channels))
        self.last_norm = ChannelNorm(channels)
        self.proj = nn.Conv1d(channels, n_vocab, 1)

    def forward(self, x):
        x = self.emb(x).transpose(1, 2)
        x = x + self.pos[:, :, : x.size(2)]
        for i in range(self.n_layers):
            x = x + self.attn_layers[i](self.norm_layers_1[i](x))
            x = x + self.ffn_layers[i](self.norm_layers_2[i](x))
        return self.proj(self.last_norm(x)).transpose(1, 2)


def build(config):
    return Decoder(config.vocab_size, config.n_positions, config.n_embd, config.inner, config.n_head, config.n_layer)


def fill(module, state):
    put(module, state, {"emb": "wte", "pos": "wpe.weight.T", "last_norm": "ln_f", "proj": "head"})
    for i in range(module.n_layers):
        put(module, state, {f"norm_layers_1.{i}": "ln_1", f"norm_layers_2.{i}": "ln_2"}, f"h.{i}.")
        put(module.attn_layers[i], state, {f"conv_{x}": f"{x}.T" for x in "qkv"} | {"conv_o": "attn.c_proj.T"}, f"h.{i}.")
        put(module.ffn_layers[i], state, {"conv_1": "c_fc.T", "conv_2": "c_proj.T"}, f"h.{i}.mlp.")
