"""Tiny checkpoints in all layouts, whose bytes safetensors and transformers write; each writer returns our parameters."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from gpt2.checkpoint.keys import expected
from gpt2.config import GPT2Config

TINY = GPT2Config(vocab_size=61, n_positions=16, n_embd=12, n_layer=2, n_head=3, bos_token_id=60, eos_token_id=60)


def weights(config: GPT2Config = TINY, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random parameters, by the model's own names; all entries differ, no norm is one, no bias zero."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in expected(config).items()}


def masks(config: GPT2Config = TINY, prefix: str = "") -> dict[str, Tensor]:
    """The mask buffers of the official files: `h.N.attn.bias`, float32 [1, 1, P, P], ones on and below the diagonal."""
    mask = torch.ones(config.n_positions, config.n_positions).tril()[None, None]
    return {f"{prefix}h.{layer}.attn.bias": mask.clone() for layer in range(config.n_layer)}


def write_config(directory: Path, config: GPT2Config = TINY, **changes: Any) -> Path:
    """Write `config.json` like old transformers; a change to `...` removes the key."""
    raw = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "activation_function", "layer_norm_epsilon"):
        raw[name] = getattr(config, name)
    raw |= {"n_ctx": config.n_positions, "bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    raw |= {} if config.n_inner is None else {"n_inner": config.n_inner}
    raw = {key: value for key, value in (raw | changes).items() if value is not ...}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def write_weights(path: Path, tensors: Mapping[str, Tensor], *, start: int | None = None) -> Path:
    """A safetensors file; `start` is the data's first byte modulo 8 (3 in the official gpt2: no float is aligned)."""
    content = save(dict(tensors), metadata={"format": "pt"})
    if start is not None:
        length = int.from_bytes(content[:8], "little")
        spaces = (start - length) % 8
        content = (length + spaces).to_bytes(8, "little") + content[8 : 8 + length] + b" " * spaces + content[8 + length :]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def official(directory: Path, config: GPT2Config = TINY) -> dict[str, Tensor]:
    """Like `openai-community/gpt2`: no prefix, mask buffers, no head, data at an odd byte."""
    truth = weights(config)
    write_weights(write_config(directory, config) / "model.safetensors", truth | masks(config), start=3)
    return truth


def prefixed(directory: Path, config: GPT2Config = TINY) -> dict[str, Tensor]:
    """Like DialoGPT and mGPT: `transformer.` before every name, masks, `masked_bias` scalars, and the tied head stored again."""
    truth = weights(config)
    tensors = {f"transformer.{name}": tensor for name, tensor in truth.items()} | masks(config, "transformer.")
    tensors |= {f"transformer.h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(config.n_layer)}
    tensors |= {"lm_head.weight": truth["wte.weight"].clone()}
    write_weights(write_config(directory, config) / "model.safetensors", tensors)
    return truth


def sharded(
    directory: Path,
    config: GPT2Config = TINY,
    *,
    seed: int = 0,
    prefix: str = "transformer.",
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    write: Callable[[Path, Mapping[str, Tensor]], object] = write_weights,
    name: str = "model.safetensors",
) -> dict[str, Tensor]:
    """Three files and an index, with a layer's tensors in different files; ``change`` is applied before writing."""
    truth = weights(config, seed)
    stored = {f"{prefix}{key}": tensor for key, tensor in change(truth).items()}
    write_config(directory, config)
    stem, _, suffix = name.partition(".")
    weight_map = {}
    for number in range(3):
        file = f"{stem}-{number + 1:05}-of-00003.{suffix}"
        part = {key: stored[key] for key in list(stored)[number::3]}
        write(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in truth.values())}, "weight_map": weight_map}
    (directory / f"{name}.index.json").write_text(json.dumps(index))
    return truth


def turned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The blocks' matrices transposed, to nn.Linear's orientation or back; by the model's own names."""
    return {name: t.T.contiguous() if name.startswith("h.") and t.ndim == 2 else t for name, t in tensors.items()}


def transformers_saved(directory: Path, config: GPT2Config = TINY, *, shard_size: str = "5GB") -> dict[str, Tensor]:
    """The files that transformers' `save_pretrained` writes."""
    from transformers import GPT2Config as TheirConfig, GPT2LMHeadModel

    fields = {
        name: value for name, value in config.to_hf().items() if name not in ("architectures", "model_type", "n_ctx", "dtype")
    }
    model, truth = GPT2LMHeadModel(TheirConfig(**fields)), weights(config)
    loaded = model.transformer.load_state_dict(truth, strict=False)
    assert not loaded.unexpected_keys
    assert all(".attn.bias" in key or ".masked_bias" in key for key in loaded.missing_keys)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return truth
