"""The key table: each tensor of a GPT-2 checkpoint with its shape and its names in our model, Hugging Face, OpenAI and GGUF.

Our modules have Hugging Face's names, so those keys differ only by a prefix. Reading, writing and checking all use this table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpt2.config import GPT2Config

PREFIX = "transformer."  # written by transformers, absent from the official files
# Prefixes that torch.compile, DistributedDataParallel and Lightning add to every key, in any order.
WRAPPERS = ("_orig_mod.", "module.", "model.", PREFIX)

# One row per parameter: our name ("{}" is the layer); its shape in the symbols V vocabulary, P positions, D width, F
# feed-forward; OpenAI's name (openai/gpt-2, src/model.py), where `w` has a leading axis of one, a convolution's width; GGUF's
# name (ggml-org/llama.cpp, gguf-py/gguf/constants.py), where matrices are [out, in].
_ROWS = (
    ("wte.weight", ("V", "D"), "model/wte", "token_embd.weight"),
    ("wpe.weight", ("P", "D"), "model/wpe", "position_embd.weight"),
    ("h.{}.ln_1.weight", ("D",), "model/h{}/ln_1/g", "blk.{}.attn_norm.weight"),
    ("h.{}.ln_1.bias", ("D",), "model/h{}/ln_1/b", "blk.{}.attn_norm.bias"),
    ("h.{}.attn.c_attn.weight", ("D", "3D"), "model/h{}/attn/c_attn/w", "blk.{}.attn_qkv.weight"),
    ("h.{}.attn.c_attn.bias", ("3D",), "model/h{}/attn/c_attn/b", "blk.{}.attn_qkv.bias"),
    ("h.{}.attn.c_proj.weight", ("D", "D"), "model/h{}/attn/c_proj/w", "blk.{}.attn_output.weight"),
    ("h.{}.attn.c_proj.bias", ("D",), "model/h{}/attn/c_proj/b", "blk.{}.attn_output.bias"),
    ("h.{}.ln_2.weight", ("D",), "model/h{}/ln_2/g", "blk.{}.ffn_norm.weight"),
    ("h.{}.ln_2.bias", ("D",), "model/h{}/ln_2/b", "blk.{}.ffn_norm.bias"),
    ("h.{}.mlp.c_fc.weight", ("D", "F"), "model/h{}/mlp/c_fc/w", "blk.{}.ffn_up.weight"),
    ("h.{}.mlp.c_fc.bias", ("F",), "model/h{}/mlp/c_fc/b", "blk.{}.ffn_up.bias"),
    ("h.{}.mlp.c_proj.weight", ("F", "D"), "model/h{}/mlp/c_proj/w", "blk.{}.ffn_down.weight"),
    ("h.{}.mlp.c_proj.bias", ("D",), "model/h{}/mlp/c_proj/b", "blk.{}.ffn_down.bias"),
    ("ln_f.weight", ("D",), "model/ln_f/g", "output_norm.weight"),
    ("ln_f.bias", ("D",), "model/ln_f/b", "output_norm.bias"),
)
TABLE: dict[str, tuple[str, ...]] = {ours: shape for ours, shape, _, _ in _ROWS}
_GGUF = {ours: gguf for ours, _, _, gguf in _ROWS} | {"lm_head.weight": "output.weight"}
_OURS = {openai: ours for ours, _, openai, _ in _ROWS} | {gguf: ours for ours, gguf in _GGUF.items()}

# Last names of a key in transformers' Keras and Flax files, where they differ from ours.
_LEAVES = dict.fromkeys(("kernel", "gamma", "scale", "embedding", "embeddings"), "weight") | {"beta": "bias"}

# Redundant tensors, dropped only after their content is checked.
CAUSAL_MASK = re.compile(r"h\.\d{1,5}\.attn\.bias", re.ASCII)  # (1, 1, P, P), ones on and below the diagonal
MASKED_SCORE = re.compile(r"h\.\d{1,5}\.attn\.masked_bias", re.ASCII)  # scalar that older code wrote over masked scores
TIED_HEADS = ("lm_head.weight", "lm_head.decoder.weight")  # a copy of the token embedding
# TensorFlow's training state beside a model: a counter, Adam's moments.
TRAINING_STATE = re.compile(r"global_step|beta[12]_power|model/[\w/]{1,40}/Adam(_1)?", re.ASCII)


def expected(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, in the order of the forward pass."""
    sizes = {"V": config.vocab_size, "P": config.n_positions, "D": config.n_embd, "3D": 3 * config.n_embd, "F": config.inner}
    shapes = {name: tuple(sizes[symbol] for symbol in symbols) for name, symbols in TABLE.items()}
    layers = {name.format(layer): shape for layer in range(config.n_layer) for name, shape in shapes.items() if "{}" in name}
    outside = {name: shape for name, shape in shapes.items() if "{}" not in name}
    return {name: outside.pop(name) for name in ("wte.weight", "wpe.weight")} | layers | outside


def sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the config sizes that the tensors' shapes show, in either orientation. No shape shows the number of heads."""
    shown: dict[str, int] = {}
    for field, name, axis in (("vocab_size", "wte.weight", 0), ("n_embd", "wte.weight", 1), ("n_positions", "wpe.weight", 0)):
        if len(shape := shapes.get(name, ())) == 2:
            shown[field] = shape[axis]
    if layers := [number for name in shapes if (number := layer(name)) is not None]:
        shown["n_layer"] = max(layers) + 1
    widths = list(without_leading_one(shapes.get("h.0.mlp.c_fc.weight", ())))
    if len(widths) == 2 and shown.get("n_embd") in widths:
        widths.remove(shown["n_embd"])
        shown["n_inner"] = widths[0]
    return shown


def without_leading_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a matrix's shape without the leading axis of OpenAI's files."""
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def layer(name: str) -> int | None:
    """Return the layer of a per-layer parameter, counted from zero; None for other names."""
    match = re.match(r"h\.(\d{1,5})\.", name, re.ASCII)
    return int(match[1]) if match and f"h.{{}}.{name[match.end() :]}" in TABLE else None


def from_file(key: str) -> str:
    """Return our name for a file's key in any known format; an unknown key is returned unchanged."""
    number = re.match(r"(?:blk\.|model/h)(\d{1,5})(?=[./])", key, re.ASCII)
    template = key if number is None else key[: number.start(1)] + "{}" + key[number.end(1) :]
    if template in _OURS:
        return _OURS[template].format(number and number[1])
    if (nested := _from_path(key)) in TABLE or layer(nested) is not None:
        return nested
    while wrapper := next((wrapper for wrapper in WRAPPERS if key.startswith(wrapper)), None):
        key = key.removeprefix(wrapper)
    return key


def _from_path(key: str) -> str:
    """Return our name for a path in a Keras or Flax file: `MODEL/transformer/h_._0/ln_1/gamma:0`, `h/0/ln_1/scale`."""
    *modules, leaf = key.removesuffix(":0").replace("_._", "/").split("/")
    if PREFIX[:-1] in modules:
        modules = modules[len(modules) - modules[::-1].index(PREFIX[:-1]) :]
    return ".".join((*modules, _LEAVES.get(leaf, leaf)))


def to_file(name: str) -> str:
    return PREFIX + name


def to_gguf(name: str) -> str:
    number = layer(name)
    return _GGUF[name] if number is None else _GGUF[f"h.{{}}.{name.split('.', 2)[2]}"].format(number)
