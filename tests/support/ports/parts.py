"""GPT-2 of parts, under any names: many ports are this but for what they replace."""

import torch
from torch import nn
from torch.nn import functional as F

from support.ports import put

LINEAR = {"qkv": "attn.c_attn", "q": "q", "k": "k", "v": "v", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}


class Named(nn.Module):
    """A module whose parts have a role, `self["words"]`, and an author's name: ``NAMES`` has "role name" pairs."""

    NAMES = ""

    def name(self, role):
        words = self.NAMES.split()
        return dict(zip(words[::2], words[1::2], strict=True)).get(role, role)

    def __getitem__(self, role):
        return getattr(self, self.name(role))

    def __setitem__(self, role, part):
        setattr(self, self.name(role), part)


class Block(Named):
    LINEAR, NORM = nn.Linear, nn.LayerNorm
    ORDER = "norm_1 qkv out norm_2 up down"  # in which the parts are declared; "q k v" for a matrix each

    def __init__(self, config):
        super().__init__()
        d, f, self.n_head = config.n_embd, config.inner, config.n_head
        sizes = {"qkv": (d, 3 * d), "up": (d, f), "down": (f, d)}
        for role in self.ORDER.split():
            self[role] = self.NORM(d) if role.startswith("norm") else self.LINEAR(*sizes.get(role, (d, d)))

    def split(self, x):
        """q, k and v, (B, H, T, K) each."""
        parts = self["qkv"](x).chunk(3, -1) if "qkv" in self.ORDER else [self[role](x) for role in "qkv"]
        return [y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in parts]

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attend(self, x):
        return self["out"](self.mix(*self.split(x)).transpose(1, 2).flatten(2))

    def feed(self, x):
        return self["down"](F.gelu(self["up"](x), approximate="tanh"))

    def forward(self, x):
        x = x + self.attend(self["norm_1"](x))
        return x + self.feed(self["norm_2"](x))


class GPT(Named):
    BLOCK, NORM = Block, nn.LayerNorm
    HEAD = None  # a layer of its own for the logits, if they are not computed with the words

    def __init__(self, config):
        super().__init__()
        self["words"], self["places"] = (nn.Embedding(n, config.n_embd) for n in (config.vocab_size, config.n_positions))
        self["blocks"] = nn.ModuleList(self.BLOCK(config) for _ in range(config.n_layer))
        self["last"] = self.NORM(config.n_embd)
        if self.HEAD:
            self["head"] = self.HEAD(config.n_embd, config.vocab_size, bias=False)

    def embed(self, ids):
        return self["words"](ids) + self["places"](torch.arange(ids.shape[1], device=ids.device))

    def run(self, x):
        for block in self["blocks"]:
            x = block(x)
        return self["last"](x)

    def logits(self, x):
        return self["head"](x) if self.HEAD else x @ self["words"].weight.T

    def forward(self, ids):
        return self.logits(self.run(self.embed(ids)))


def fill(module, state):
    """Fill every part that is a layer of torch's, or has such a layer's weight and bias."""
    roles = {"words": "wte", "places": "wpe", "last": "ln_f", **({"head": "wte"} if module.HEAD else {})}
    put(module, state, {module.name(role): source for role, source in roles.items()})
    for i, block in enumerate(module["blocks"]):
        fill_block(block, state, i)


def fill_block(block, state, i):
    for role in block.ORDER.split():
        source = LINEAR[role] + ".T" if role in LINEAR else role.replace("norm", "ln")
        put(block, state, {block.name(role): source}, f"h.{i}.")


def future(x):
    """True where a query (T, 1) does not see a key (T), for scores (..., T, T)."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
