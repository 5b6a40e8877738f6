"""Tiny files of llm.c, written and read in the layout of its train_gpt2.py and train_gpt2.c, without our code."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2.config import GPT2Config
from support.hf_layouts import TINY, weights

# llm.c's order of the parameters, by our names; all layers of one kind are adjacent.
MODULES = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
BLOCK = [f"h.{{}}.{module}.{leaf}" for module in MODULES for leaf in ("weight", "bias")]
ORDER = ("wte.weight", "wpe.weight", *BLOCK, "ln_f.weight", "ln_f.bias")
TURNED = tuple(f"{module}.weight" for module in MODULES if not module.startswith("ln"))


def write(path: Path, config: GPT2Config = TINY, *, version: int = 3) -> dict[str, Tensor]:
    """Write a checkpoint of a version; the padding rows hold 7, so that a reader that uses them is noticed."""
    dtype = torch.bfloat16 if version == 5 else torch.float32
    truth = weights(config, dtype=dtype)
    rows = config.vocab_size if version == 1 else (config.vocab_size + 127) // 128 * 128
    numbers = [20240326, version, config.n_positions, config.vocab_size, config.n_layer, config.n_head, config.n_embd]
    numbers += [] if version == 1 else [rows]
    content = np.array(numbers + [0] * (256 - len(numbers)), dtype="<i4").tobytes()
    for name in ORDER:
        for layer in range(config.n_layer if "{}" in name else 1):
            tensor = truth[name.format(layer)]
            tensor = tensor.t() if name.endswith(TURNED) else tensor
            content += tensor.contiguous().view(torch.int16 if version == 5 else torch.int32).numpy().tobytes()
        if name == "wte.weight":
            content += torch.full((rows - config.vocab_size, config.n_embd), 7, dtype=dtype).view(torch.uint8).numpy().tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return truth


def parameters(flat: np.ndarray, config: GPT2Config) -> dict[str, np.ndarray]:
    """Split the numbers of a file into our parameters' names and shapes; none may be left."""
    width = config.n_embd
    rows = (config.vocab_size + 127) // 128 * 128
    shapes = {"wte.weight": (rows, width), "wpe.weight": (config.n_positions, width)}
    for module, length in (("attn.c_attn", 3 * width), ("attn.c_proj", width), ("mlp.c_fc", 4 * width)):
        shapes |= {f"h.{{}}.{module}.weight": (length, width), f"h.{{}}.{module}.bias": (length,)}
    shapes |= {"h.{}.mlp.c_proj.weight": (width, 4 * width)}
    found = {}
    for name in ORDER:
        for layer in range(config.n_layer if "{}" in name else 1):
            shape = shapes.get(name, (width,))
            count = int(np.prod(shape))
            part, flat = flat[:count].reshape(shape), flat[count:]
            found[name.format(layer)] = part.T if name.endswith(TURNED) else part
    assert not flat.size
    assert not found["wte.weight"][config.vocab_size :].any(), "padding is zeros"
    found["wte.weight"] = found["wte.weight"][: config.vocab_size]
    return found


def read_model(path: Path, config: GPT2Config) -> dict[str, np.ndarray]:
    """The parameters of a float32 checkpoint, or the raw 16 bits of a bfloat16 one."""
    content = path.read_bytes()
    first = np.frombuffer(content[:1024], "<i4")
    rows = (config.vocab_size + 127) // 128 * 128
    sizes = [config.n_positions, config.vocab_size, config.n_layer, config.n_head, config.n_embd, rows]
    assert first[0] == 20240326
    assert first[2:8].tolist() == sizes
    assert not first[8:].any()
    return parameters(np.frombuffer(content[1024:], {3: "<f4", 5: "<i2"}[int(first[1])]), config)


def read_state(path: Path, config: GPT2Config) -> dict[str, Any]:
    """A debug state: ids, targets, logits, loss, and a dictionary of gradients."""
    content = path.read_bytes()
    magic, version, rows, tokens, *rest = np.frombuffer(content[:1024], "<i4").tolist()
    assert (magic, version, any(rest)) == (20240327, 2, False)
    count, logits = rows * tokens, rows * tokens * config.vocab_size
    integers = np.frombuffer(content, "<i4", 2 * count, 1024).reshape(2, rows, tokens)
    floats = np.frombuffer(content, "<f4", offset=1024 + 8 * count)
    return {
        "ids": integers[0],
        "targets": integers[1],
        "logits": floats[:logits].reshape(rows, tokens, -1),
        "loss": floats[logits],
        "gradients": parameters(floats[logits + 1 :], config),
    }


def read_tokenizer(path: Path) -> tuple[list[bytes], int]:
    """The tokens of a tokenizer file, and its end-of-text id."""
    content = path.read_bytes()
    magic, version, count, end, *rest = np.frombuffer(content[:1024], "<u4").tolist()
    assert (magic, version, any(rest)) == (20240328, 2, False)
    tokens, at = [], 1024
    for _ in range(count):
        length = content[at]
        tokens.append(content[at + 1 : at + 1 + length])
        assert 0 < length == len(tokens[-1])
        at += 1 + length
    assert at == len(content)
    return tokens, end
