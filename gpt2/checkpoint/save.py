"""Write a directory that transformers, vLLM, llama.cpp and CTranslate2 open unedited."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save as serialize

from ..errors import InputError
from .keys import to_file

if TYPE_CHECKING:
    from ..data import Tokenizer
    from ..model import GPT2

DTYPE_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def save(model: GPT2, tokenizer: Tokenizer | None, directory: str | Path) -> Path:
    """Write ``model`` and ``tokenizer`` to ``directory`` in Hugging Face's layout; return the directory.

    Weights keep their dtype and Conv1D orientation, under transformers' names, without the tied head. Each file is written
    aside, synced and renamed, so a reader sees the old file or the new one and never half of one.

    Raises:
        InputError: the directory cannot be written.
    """
    directory = Path(directory)
    dtype = DTYPE_NAMES[model.wte.weight.dtype]
    config = model.config.to_hf(dtype)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
    tensors = {to_file(name): tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "config.json", config)
        write_json(directory / "generation_config.json", generation)
        write_file(directory / "model.safetensors", serialize(tensors, metadata={"format": "pt"}))
        if tokenizer is not None:
            tokenizer.save(directory, n_positions=model.config.n_positions)
    except OSError as error:
        raise InputError(
            f"{directory}: cannot write the checkpoint ({error.strerror or error}); choose another folder"
        ) from error
    return directory


def write_json(path: Path, value: Any) -> None:
    write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def write_file(path: Path, content: bytes) -> None:
    """Write aside, sync, rename."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
