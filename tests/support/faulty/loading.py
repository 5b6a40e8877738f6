"""Write a checkpoint of trained size for the faulty ports, read it with an author's mistakes, and fill modules from it."""

import math
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gpt2.checkpoint.keys import expected
from gpt2.config import GPT2Config
from support import hf_layouts
from support.faulty.faults import Faults


def weights(config: GPT2Config, seed: int = 0) -> dict[str, Tensor]:
    """Random parameters by the checkpoint's names, float32."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in expected(config).items():
        drawn = torch.randn(shape, generator=generator)
        if ".ln_" in name or name.startswith("ln_f"):
            state[name] = drawn * 0.2 + (1 if name.endswith("weight") else 0)
        elif len(shape) == 1:
            state[name] = drawn * 0.2
        else:
            state[name] = drawn * (0.5 if name.startswith("w") else 1.2 / math.sqrt(shape[0]))
    return state


def write(directory: Path, config: GPT2Config) -> Path:
    """Write the checkpoint in the official repositories' layout: `config.json` and `model.safetensors`."""
    state = weights(config) | hf_layouts.masks(config)
    hf_layouts.write_weights(hf_layouts.write_config(directory, config) / "model.safetensors", state, start=3)
    return directory


def read(directory: str | Path, config: GPT2Config, faults: Faults) -> dict[str, Tensor]:
    """The tensors that an author with these faults reads from the checkpoint, by `named_parts`."""
    state = {
        name: tensor for name, tensor in load_file(Path(directory) / "model.safetensors").items() if name in expected(config)
    }
    right = dict(state)

    for word in faults.sites:
        for layer in faults.layers(word, config.n_layer):
            at = f"h.{layer}."
            c_attn, c_proj, c_fc = (at + part for part in ("attn.c_attn.", "attn.c_proj.", "mlp.c_fc."))
            match word:
                case "transposed-proj":
                    state[c_proj + "weight"] = right[c_proj + "weight"].t()
                case "qkv-kqv":
                    for leaf in ("weight", "bias"):
                        parts = dict(zip("qkv", right[c_attn + leaf].chunk(3, dim=-1), strict=True))
                        state[c_attn + leaf] = torch.cat([parts[letter] for letter in "kqv"], dim=-1)
                case "head-interleaved":  # read as (H, 3, K), returned in our order (3, H, K)
                    for leaf in ("weight", "bias"):
                        columns = right[c_attn + leaf].unflatten(-1, (config.n_head, 3, config.head_dim))
                        state[c_attn + leaf] = columns.transpose(-3, -2).flatten(-3)
                case "not-loaded-biases":
                    state[c_attn + "bias"] = torch.zeros_like(right[c_attn + "bias"])
                case "wrong-bias":
                    state[c_proj + "bias"] = right[at + "mlp.c_proj.bias"]
                case "norm-weights-swapped":
                    state |= {at + f"ln_1.{leaf}": right[at + f"ln_2.{leaf}"] for leaf in ("weight", "bias")}
                    state |= {at + f"ln_2.{leaf}": right[at + f"ln_1.{leaf}"] for leaf in ("weight", "bias")}
                case "weights-reversed":
                    other = f"h.{config.n_layer - 1 - layer}."
                    state |= {name: right[other + name.removeprefix(at)] for name in right if name.startswith(at)}
                case "bf16-fc":
                    state[c_fc + "weight"] = right[c_fc + "weight"].bfloat16().float()
    if "wpe-rolled" in faults:
        state["wpe.weight"] = right["wpe.weight"].roll(1, 0)
    if "bf16-on-the-way" in faults:
        state = {name: tensor.bfloat16().float() for name, tensor in state.items()}
    if "untied-head" in faults:
        state["lm_head.weight"] = torch.randn(right["wte.weight"].shape, generator=torch.Generator().manual_seed(7)) * 0.02
    return named_parts(state)


def named_parts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors, the separate q, k and v of each block (`h.0.q.weight`), and the `head`, whose bias is zero."""
    parts = dict(state)
    for name, tensor in state.items():
        if ".attn.c_attn." in name:
            parts |= {name.replace("attn.c_attn", x): part for x, part in zip("qkv", tensor.chunk(3, -1), strict=True)}
    words = state.get("lm_head.weight", state["wte.weight"])
    return parts | {"head.weight": words, "head.bias": torch.zeros(len(words))}


def put(module: nn.Module, state: Mapping[str, Tensor], names: Mapping[str, str], prefix: str = "") -> None:
    """Copy the checkpoint's tensors into parts of a module, reshaped: {path in the module: name in the checkpoint}.

    A path leads to a tensor, or to a module whose first parameter is the weight and the second, if any, the bias. A name that
    ends in `.T` is a tensor to transpose.
    """
    for path, source in names.items():
        part, name = attrgetter(path)(module), prefix + source.removesuffix(".T")
        own = [part] if isinstance(part, Tensor) else [*part.parameters(recurse=False)] or [*part.buffers(recurse=False)]
        keys = [name] if isinstance(part, Tensor) else [f"{name}.weight", f"{name}.bias"]
        for key, target in zip(keys, own, strict=False):
            if key in state:
                tensor = state[key].t() if source.endswith(".T") else state[key]
                target.copy_(tensor.reshape(target.shape))
