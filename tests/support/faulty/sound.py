"""A correct GPT-2 in one file: the control of all others here. `build(checkpoint_dir)` loads it, under its own names."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F


@dataclass
class Sizes:  # with annotations as strings, dataclasses look up the module in sys.modules
    words: int
    places: int
    width: int
    depth: int
    heads: int
    hidden: int


class Layer(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.heads = s.heads
        self.n1, self.n2 = nn.LayerNorm(s.width), nn.LayerNorm(s.width)
        self.look, self.say = nn.Linear(s.width, 3 * s.width), nn.Linear(s.width, s.width)
        self.up, self.down = nn.Linear(s.width, s.hidden), nn.Linear(s.hidden, s.width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.look(self.n1(x)).chunk(3, -1))
        x = x + self.say(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class Sound(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.sizes = s
        self.words, self.places = nn.Embedding(s.words, s.width), nn.Embedding(s.places, s.width)
        self.layers, self.end = nn.ModuleList(Layer(s) for _ in range(s.depth)), nn.LayerNorm(s.width)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.end(x) @ self.words.weight.t()


def sizes(checkpoint_dir: str) -> Sizes:
    raw = json.loads((Path(checkpoint_dir) / "config.json").read_text())
    names = "vocab_size", "n_positions", "n_embd", "n_layer", "n_head"
    return Sizes(*(raw[name] for name in names), raw.get("n_inner") or 4 * raw["n_embd"])


def build(checkpoint_dir: str) -> nn.Module:
    return load(Sound, checkpoint_dir)


def load(kind: type[Sound], checkpoint_dir: str) -> nn.Module:
    model = kind(sizes(checkpoint_dir))
    state = {name.removeprefix("transformer."): w for name, w in load_file(Path(checkpoint_dir) / "model.safetensors").items()}
    parts = {"wte": model.words, "wpe": model.places, "ln_f": model.end}
    for n, layer in enumerate(model.layers):
        parts |= {f"h.{n}.ln_1": layer.n1, f"h.{n}.attn.c_attn": layer.look, f"h.{n}.attn.c_proj": layer.say}
        parts |= {f"h.{n}.ln_2": layer.n2, f"h.{n}.mlp.c_fc": layer.up, f"h.{n}.mlp.c_proj": layer.down}
    with torch.no_grad():
        for name, part in parts.items():
            turned = isinstance(part, nn.Linear)
            part.weight.copy_(state[name + ".weight"].t() if turned else state[name + ".weight"])
            if hasattr(part, "bias"):
                part.bias.copy_(state[name + ".bias"])
    return model
