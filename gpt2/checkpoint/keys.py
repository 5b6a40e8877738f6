"""The key table: every tensor of a GPT-2 checkpoint, by the checkpoint's own names.

Our modules bear the same names, so a key maps to itself; what varies is a prefix, and what else lies in the file. Reading and
writing both go through this table, and so does everything that asks whether a checkpoint is complete.
"""

from __future__ import annotations

import re

from ..config import GPT2Config

PREFIX = "transformer."  # written by transformers, absent from the official files

# Tensor family -> shape, in the symbols V vocabulary, P positions, D width, F feed-forward. "{}" is the layer.
TABLE: dict[str, tuple[str, ...]] = {
    "wte.weight": ("V", "D"),
    "wpe.weight": ("P", "D"),
    "h.{}.ln_1.weight": ("D",),
    "h.{}.ln_1.bias": ("D",),
    "h.{}.attn.c_attn.weight": ("D", "3D"),
    "h.{}.attn.c_attn.bias": ("3D",),
    "h.{}.attn.c_proj.weight": ("D", "D"),
    "h.{}.attn.c_proj.bias": ("D",),
    "h.{}.ln_2.weight": ("D",),
    "h.{}.ln_2.bias": ("D",),
    "h.{}.mlp.c_fc.weight": ("D", "F"),
    "h.{}.mlp.c_fc.bias": ("F",),
    "h.{}.mlp.c_proj.weight": ("F", "D"),
    "h.{}.mlp.c_proj.bias": ("D",),
    "ln_f.weight": ("D",),
    "ln_f.bias": ("D",),
}

# Tensors that carry no information of their own. Each is dropped only after its content is seen to be what it claims.
CAUSAL_MASK = re.compile(r"h\.\d{1,5}\.attn\.bias", re.ASCII)  # (1, 1, P, P), ones on and below the diagonal
MASKED_SCORE = re.compile(r"h\.\d{1,5}\.attn\.masked_bias", re.ASCII)  # scalar, what older code wrote over masked scores
TIED_HEAD = "lm_head.weight"  # the token embedding once more


def expected(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model and its shape, in the order of the forward pass."""
    sizes = {"V": config.vocab_size, "P": config.n_positions, "D": config.n_embd, "3D": 3 * config.n_embd, "F": config.inner}
    shapes = {family: tuple(sizes[symbol] for symbol in symbols) for family, symbols in TABLE.items()}
    per_layer = {family: shape for family, shape in shapes.items() if "{}" in family}
    before = {name: shapes[name] for name in ("wte.weight", "wpe.weight")}
    layers = {family.format(layer): shape for layer in range(config.n_layer) for family, shape in per_layer.items()}
    after = {name: shapes[name] for name in ("ln_f.weight", "ln_f.bias")}
    return before | layers | after


def layer(name: str) -> int | None:
    """The layer that a per-layer tensor of the table belongs to, counted from zero; None for all other names."""
    found = re.match(r"h\.(\d{1,5})\.", name, re.ASCII)
    return int(found[1]) if found and f"h.{{}}.{name[found.end() :]}" in TABLE else None


def from_file(key: str) -> str:
    """A key as found in a file to the model's own name."""
    return key.removeprefix(PREFIX)


def to_file(name: str) -> str:
    """The model's own name to the key that transformers writes: the inverse of :func:`from_file`."""
    return PREFIX + name
