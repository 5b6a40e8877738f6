"""Time-major GPT-2 (T, B, D), rebuilt from an old sequence toolkit: self.gpt.transformer.decoder, fused k, q, v."""

import torch
from torch import nn


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


@torch.no_grad()
def fill(module, state):
    transformer = module.gpt.transformer
    transformer.embed_tokens.weight.copy_(state["wte.weight"])
    transformer.embed_positions.weight.copy_(state["wpe.weight"])
    transformer.decoder.layer_norm.weight.copy_(state["ln_f.weight"])
    transformer.decoder.layer_norm.bias.copy_(state["ln_f.bias"])
    for i, layer in enumerate(transformer.decoder.layers):
        parts = {
            layer.fc1: "mlp.c_fc",
            layer.fc2: "mlp.c_proj",
            layer.final_layer_norm: "ln_2",
            layer.self_attn_layer_norm: "ln_1",
            layer.self_attn.unify: "attn.c_proj",
        }
        for part, name in parts.items():
            part.weight.copy_(state[f"h.{i}.{name}.weight"].t())
            part.bias.copy_(state[f"h.{i}.{name}.bias"])
        q, k, v = state[f"h.{i}.attn.c_attn.weight"].t().chunk(3)
        layer.self_attn.kqv.weight.copy_(torch.cat((k, q, v)))
        q, k, v = state[f"h.{i}.attn.c_attn.bias"].chunk(3)
        layer.self_attn.kqv.bias.copy_(torch.cat((k, q, v)))
