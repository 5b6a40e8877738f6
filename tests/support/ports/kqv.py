"""Time-major GPT-2 (T, B, D), rebuilt from an old sequence toolkit: self.gpt.transformer.decoder, fused k, q, v."""

import torch
from torch import nn

from support.ports import put


class KQVAttention(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.kqv = nn.Linear(width, width * 3)
        self.unify = nn.Linear(width, width)

    def forward(self, x):  # (time, batch, width)
        time, batch, width = x.shape
        keys, queries, values = self.kqv(x).split(width, dim=-1)
        head = width // self.n_heads
        keys, queries, values = (y.reshape(time, batch * self.n_heads, head).transpose(0, 1) for y in (keys, queries, values))
        scores = torch.bmm(queries, keys.transpose(1, 2)) * head**-0.5
        mask = torch.full((time, time), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        context = torch.bmm((scores + mask).softmax(dim=2), values)
        return self.unify(context.transpose(0, 1).reshape(time, batch, width))


class DecoderBlock(nn.Module):
    def __init__(self, width, n_heads, hidden):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.final_layer_norm = nn.LayerNorm(width)
        self.self_attn = KQVAttention(width, n_heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        hidden = nn.functional.gelu(self.fc1(self.final_layer_norm(x)), approximate="tanh")
        return x + self.fc2(hidden)


class Decoder(nn.Module):
    def __init__(self, width, n_heads, hidden, depth):
        super().__init__()
        self.layer_norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(DecoderBlock(width, n_heads, hidden) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class Transformer(nn.Module):
    def __init__(self, vocab, positions, width, n_heads, hidden, depth):
        super().__init__()
        self.embed_positions = nn.Embedding(positions, width)
        self.embed_tokens = nn.Embedding(vocab, width)
        self.decoder = Decoder(width, n_heads, hidden, depth)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[0], device=tokens.device)
        return self.decoder(self.embed_tokens(tokens) + self.embed_positions(positions)[:, None])


class GPT(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.transformer = Transformer(*sizes)

    def forward(self, tokens):
        return self.transformer(tokens) @ self.transformer.embed_tokens.weight.t()


class LanguageModel(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.gpt = GPT(*sizes)

    def forward(self, tokens):
        return self.gpt(tokens.t()).transpose(0, 1)


def build(config):
    return LanguageModel(config.vocab_size, config.n_positions, config.n_embd, config.n_head, config.inner, config.n_layer)


def fill(module, state):
    transformer = module.gpt.transformer
    put(transformer, state, {"embed_tokens": "wte", "embed_positions": "wpe", "decoder.layer_norm": "ln_f"})
    for i, layer in enumerate(transformer.decoder.layers):
        put(layer, state, {"self_attn_layer_norm": "ln_1", "self_attn.unify": "attn.c_proj.T"}, f"h.{i}.")
        put(layer, state, {"final_layer_norm": "ln_2", "fc1": "mlp.c_fc.T", "fc2": "mlp.c_proj.T"}, f"h.{i}.")
        for leaf in ("weight", "bias"):
            rows = torch.cat([state[f"h.{i}.{x}.{leaf}"].t() for x in "kqv"])
            getattr(layer.self_attn.kqv, leaf).copy_(rows)
