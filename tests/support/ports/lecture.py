"""As many tutorials build it: a class for one head, whose three projections have no biases; the rest as in GPT-2."""

import math

import torch
from torch import nn


class AttentionHead(nn.Module):
    def __init__(self, d, k, longest):
        super().__init__()
        self.to_key, self.to_query, self.to_value = (nn.Linear(d, k, bias=False) for _ in range(3))
        self.register_buffer("allowed", torch.tril(torch.ones(longest, longest, dtype=torch.bool)))

    def forward(self, x):
        n = x.shape[-2]
        match = torch.einsum("bqk,bsk->bqs", self.to_query(x), self.to_key(x)) / math.sqrt(self.to_key.out_features)
        match = torch.where(self.allowed[:n, :n], match, float("-inf"))
        return torch.softmax(match, dim=-1) @ self.to_value(x)


class Decoder(nn.Module):
    def __init__(self, d, heads, hidden, longest):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(d), nn.LayerNorm(d)
        self.heads = nn.ModuleList([AttentionHead(d, d // heads, longest) for _ in range(heads)])
        self.join = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, hidden), nn.GELU("tanh"), nn.Linear(hidden, d))

    def forward(self, x):
        y = self.norm_attention(x)
        x = x + self.join(torch.cat([head(y) for head in self.heads], dim=-1))
        return x + self.mlp(self.norm_mlp(x))


class TinyGPT(nn.Module):
    def __init__(self, words, longest, d, heads, depth, hidden):
        super().__init__()
        self.embed_words, self.embed_places = nn.Embedding(words, d), nn.Embedding(longest, d)
        self.stack = nn.Sequential(*[Decoder(d, heads, hidden, longest) for _ in range(depth)])
        self.norm = nn.LayerNorm(d)
        self.unembed = nn.Linear(d, words)

    def forward(self, ids):
        places = torch.arange(ids.shape[-1], device=ids.device)
        return self.unembed(self.norm(self.stack(self.embed_words(ids) + self.embed_places(places))))


def build(config):
    return TinyGPT(config.vocab_size, config.n_positions, config.n_embd, config.n_head, config.n_layer, config.inner)


@torch.no_grad()
def fill(module, state):
    module.embed_words.weight.copy_(state["wte.weight"])
    module.embed_places.weight.copy_(state["wpe.weight"])
    module.unembed.weight.copy_(state["wte.weight"])
    module.unembed.bias.zero_()
    module.norm.load_state_dict({"weight": state["ln_f.weight"], "bias": state["ln_f.bias"]})
    for i, layer in enumerate(module.stack):
        p = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        for part, columns in zip(("to_query", "to_key", "to_value"), p["attn.c_attn.weight"].chunk(3, dim=1), strict=True):
            for head, weight in zip(layer.heads, columns.T.chunk(len(layer.heads)), strict=True):
                getattr(head, part).weight.copy_(weight)
        layer.join.load_state_dict({"weight": p["attn.c_proj.weight"].T, "bias": p["attn.c_proj.bias"]})
        layer.mlp[0].load_state_dict({"weight": p["mlp.c_fc.weight"].T, "bias": p["mlp.c_fc.bias"]})
        layer.mlp[2].load_state_dict({"weight": p["mlp.c_proj.weight"].T, "bias": p["mlp.c_proj.bias"]})
        layer.norm_attention.load_state_dict({"weight": p["ln_1.weight"], "bias": p["ln_1.bias"]})
        layer.norm_mlp.load_state_dict({"weight": p["ln_2.weight"], "bias": p["ln_2.bias"]})
