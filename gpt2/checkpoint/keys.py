"""The key table: every tensor of a GPT-2 checkpoint, by the checkpoint's own names, and what others call it.

Our modules bear Hugging Face's names, so such a key maps to itself; what varies is a prefix, and what else lies in the file.
OpenAI's and llama.cpp's names are a table each, whose inverse is computed. Reading and writing both go through these tables,
and so does everything that asks whether a checkpoint is complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpt2.config import GPT2Config

PREFIX = "transformer."  # written by transformers, absent from the official files
# What torch.compile, DistributedDataParallel and Lightning put in front of every key, in any order.
WRAPPERS = ("_orig_mod.", "module.", "model.", PREFIX)

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

# OpenAI's own files (openai/gpt-2, src/model.py); `w` has a leading axis of one, where the convolution's width was.
OPENAI = {
    "wte.weight": "model/wte",
    "wpe.weight": "model/wpe",
    "h.{}.ln_1.weight": "model/h{}/ln_1/g",
    "h.{}.ln_1.bias": "model/h{}/ln_1/b",
    "h.{}.attn.c_attn.weight": "model/h{}/attn/c_attn/w",
    "h.{}.attn.c_attn.bias": "model/h{}/attn/c_attn/b",
    "h.{}.attn.c_proj.weight": "model/h{}/attn/c_proj/w",
    "h.{}.attn.c_proj.bias": "model/h{}/attn/c_proj/b",
    "h.{}.ln_2.weight": "model/h{}/ln_2/g",
    "h.{}.ln_2.bias": "model/h{}/ln_2/b",
    "h.{}.mlp.c_fc.weight": "model/h{}/mlp/c_fc/w",
    "h.{}.mlp.c_fc.bias": "model/h{}/mlp/c_fc/b",
    "h.{}.mlp.c_proj.weight": "model/h{}/mlp/c_proj/w",
    "h.{}.mlp.c_proj.bias": "model/h{}/mlp/c_proj/b",
    "ln_f.weight": "model/ln_f/g",
    "ln_f.bias": "model/ln_f/b",
}
# GGUF (ggml-org/llama.cpp, gguf-py/gguf/constants.py); matrices are [out, in].
GGUF = {
    "wte.weight": "token_embd.weight",
    "wpe.weight": "position_embd.weight",
    "h.{}.ln_1.weight": "blk.{}.attn_norm.weight",
    "h.{}.ln_1.bias": "blk.{}.attn_norm.bias",
    "h.{}.attn.c_attn.weight": "blk.{}.attn_qkv.weight",
    "h.{}.attn.c_attn.bias": "blk.{}.attn_qkv.bias",
    "h.{}.attn.c_proj.weight": "blk.{}.attn_output.weight",
    "h.{}.attn.c_proj.bias": "blk.{}.attn_output.bias",
    "h.{}.ln_2.weight": "blk.{}.ffn_norm.weight",
    "h.{}.ln_2.bias": "blk.{}.ffn_norm.bias",
    "h.{}.mlp.c_fc.weight": "blk.{}.ffn_up.weight",
    "h.{}.mlp.c_fc.bias": "blk.{}.ffn_up.bias",
    "h.{}.mlp.c_proj.weight": "blk.{}.ffn_down.weight",
    "h.{}.mlp.c_proj.bias": "blk.{}.ffn_down.bias",
    "ln_f.weight": "output_norm.weight",
    "ln_f.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
}
_FAMILY = {theirs: family for table in (OPENAI, GGUF) for family, theirs in table.items()}

# Tensors that carry no information of their own. Each is dropped only after its content is seen to be what it claims.
CAUSAL_MASK = re.compile(r"h\.\d{1,5}\.attn\.bias", re.ASCII)  # (1, 1, P, P), ones on and below the diagonal
MASKED_SCORE = re.compile(r"h\.\d{1,5}\.attn\.masked_bias", re.ASCII)  # scalar, what older code wrote over masked scores
TIED_HEADS = ("lm_head.weight", "lm_head.decoder.weight")  # the token embedding once more
# What TensorFlow's Saver writes beside a model that was trained: a counter, AdamW's moments.
TRAINING_STATE = re.compile(r"global_step|beta[12]_power|model/[\w/]{1,40}/Adam(_1)?", re.ASCII)


def expected(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model and its shape, in the order of the forward pass."""
    sizes = {"V": config.vocab_size, "P": config.n_positions, "D": config.n_embd, "3D": 3 * config.n_embd, "F": config.inner}
    shapes = {family: tuple(sizes[symbol] for symbol in symbols) for family, symbols in TABLE.items()}
    per_layer = {family: shape for family, shape in shapes.items() if "{}" in family}
    before = {name: shapes[name] for name in ("wte.weight", "wpe.weight")}
    layers = {family.format(layer): shape for layer in range(config.n_layer) for family, shape in per_layer.items()}
    after = {name: shapes[name] for name in ("ln_f.weight", "ln_f.bias")}
    return before | layers | after


def sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """What tensors tell about the model's sizes, whatever way the matrices lie: the inverse of :func:`expected`.

    A size is left out where its tensor is missing or of an odd number of axes. The number of heads shows in no shape.
    """
    told: dict[str, int] = {}
    for field, name, axis in (("vocab_size", "wte.weight", 0), ("n_embd", "wte.weight", 1), ("n_positions", "wpe.weight", 0)):
        if len(shape := shapes.get(name, ())) == 2:
            told[field] = shape[axis]
    if layers := [number for name in shapes if (number := layer(name)) is not None]:
        told["n_layer"] = max(layers) + 1
    widths = list(without_leading_one(shapes.get("h.0.mlp.c_fc.weight", ())))
    if len(widths) == 2 and told.get("n_embd") in widths:
        widths.remove(told["n_embd"])
        told["n_inner"] = widths[0]
    return told


def without_leading_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A matrix's shape without the axis that OpenAI's files put first."""
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def layer(name: str) -> int | None:
    """The layer that a per-layer tensor of the table belongs to, counted from zero; None for all other names."""
    found = re.match(r"h\.(\d{1,5})\.", name, re.ASCII)
    return int(found[1]) if found and f"h.{{}}.{name[found.end() :]}" in TABLE else None


def from_file(key: str) -> str:
    """A key as found in a file, whoever wrote it, to the model's own name; a key that nobody writes comes back as it is."""
    number = re.match(r"(?:blk\.|model/h)(\d{1,5})(?=[./])", key, re.ASCII)
    template = key if number is None else key[: number.start(1)] + "{}" + key[number.end(1) :]
    if template in _FAMILY:
        return _FAMILY[template].format(number and number[1])
    while wrapper := next((wrapper for wrapper in WRAPPERS if key.startswith(wrapper)), None):
        key = key.removeprefix(wrapper)
    return key


def to_file(name: str) -> str:
    """The model's own name to the key that transformers writes: the inverse of :func:`from_file`."""
    return PREFIX + name
