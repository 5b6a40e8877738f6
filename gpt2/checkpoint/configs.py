"""Where a checkpoint says what shape it has: config.json, the container itself, or nothing but the tensors.

A container that states its own sizes (nanoGPT's `model_args`, OpenAI's `hparams.json`, GGUF's metadata) needs no config.json;
where both are there, they must agree, because the number of heads shows in no tensor and a wrong one loads without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2.checkpoint.containers import Container, gguf_file, listed, read_json
from gpt2.checkpoint.containers.tensorflow_file import TensorBundle, read_hparams
from gpt2.checkpoint.containers.torch_file import TorchFile
from gpt2.checkpoint.files import what_is_there
from gpt2.checkpoint.keys import from_file, sizes
from gpt2.config import OFFICIAL_SIZES, GPT2Config
from gpt2.errors import CheckpointError, InputError

# (layers, width) -> heads, of published shapes: OpenAI's, and minGPT's own (karpathy/minGPT, mingpt/model.py), whose state
# dicts come without a word about their heads.
HEADS = {(size.n_layer, size.n_embd): size.n_head for size in OFFICIAL_SIZES.values()}
HEADS |= {(8, 512): 16, (6, 192): 6, (4, 128): 4, (3, 48): 3}
SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")


def read_config(path: Path) -> GPT2Config:
    """The config.json of a checkpoint directory, or of the directory around a file."""
    where = _beside(path)
    if not where.is_file():
        raise CheckpointError(f"{path}: no config.json there; {what_is_there(where.parent)}")
    return GPT2Config.from_hf(read_json(where), str(where))


def config_of(path: Path, files: Mapping[str, Container]) -> GPT2Config:
    """The config of an opened checkpoint, from whoever states it.

    Raises:
        CheckpointError: nobody does, two disagree, or what they say makes no GPT-2.
    """
    stated = _stated(path, files)
    written = read_config(path) if _beside(path).is_file() and not isinstance(_first(files), gguf_file.GGUFFile) else None
    if written is not None and stated is not None:
        odd = [name for name in SIZES if getattr(written, name) != getattr(stated, name)]
        if odd:
            both = ", ".join(f"{name} {getattr(written, name)} and {getattr(stated, name)}" for name in odd)
            raise CheckpointError(f"{path}: config.json and the checkpoint itself disagree: {both}; remove the wrong config.json")
    return written or stated or _read_off(path, files)


def _stated(path: Path, files: Mapping[str, Container]) -> GPT2Config | None:
    """What the container says about itself."""
    file = _first(files)
    if isinstance(file, gguf_file.GGUFFile):
        return gguf_file.config_of(file)
    if isinstance(file, TensorBundle):
        hparams = file.path.parent / "hparams.json"
        return _from_hparams(read_hparams(hparams), hparams) if hparams.is_file() else None
    if isinstance(file, TorchFile) and file.model_args:
        return _from_nanogpt(file.model_args, file.path, files)
    return None


def _from_hparams(raw: Mapping[str, int], where: Path) -> GPT2Config:
    """OpenAI's hparams.json (openai/gpt-2, src/model.py: default_hparams)."""
    names = {name: {"vocab_size": "n_vocab", "n_positions": "n_ctx"}.get(name, name) for name in SIZES}
    return _checked({ours: raw[theirs] for ours, theirs in names.items() if theirs in raw}, where)


def _from_nanogpt(raw: Mapping[str, Any], where: Path, files: Mapping[str, Container]) -> GPT2Config:
    """nanoGPT's model_args (karpathy/nanoGPT, train.py and model.py, whose MLP has the exact GELU)."""
    names = {name: "block_size" if name == "n_positions" else name for name in SIZES}
    taken = _told(files) | {ours: raw[theirs] for ours, theirs in names.items() if raw.get(theirs) is not None}
    dropout = raw.get("dropout", 0.0)
    config = _checked({name: taken[name] for name in SIZES if name in taken}, where)
    dropout = dropout if isinstance(dropout, float | int) else 0.0
    return replace(config, activation_function="gelu", resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)


def _read_off(path: Path, files: Mapping[str, Container]) -> GPT2Config:
    """A bare state dict of a published shape; any other could have any number of heads."""
    told = _told(files)
    heads = HEADS.get((told.get("n_layer", 0), told.get("n_embd", 0)))
    if heads is None or not {"vocab_size", "n_positions"} <= told.keys():
        raise CheckpointError(
            f"{path}: no config.json there, and the tensors do not tell the number of heads; "
            f"put one beside them with {', '.join(SIZES)}"
        )
    inner = told.pop("n_inner", None)
    return _checked(told | {"n_head": heads, "n_inner": None if inner == 4 * told["n_embd"] else inner}, path)


def _told(files: Mapping[str, Container]) -> dict[str, int]:
    return sizes({from_file(key): file.entries[key].shape for key, file in files.items()})


def _checked(taken: Mapping[str, Any], where: Path) -> GPT2Config:
    """A config with the end-of-text token where the vocabulary has one, or one line that says what is wrong."""
    missing = [name for name in SIZES if name not in taken]
    if missing:
        raise CheckpointError(f"{where}: does not say {listed(missing)}; put a config.json beside it")
    end = 50256  # <|endoftext|> of OpenAI's vocabulary
    known = isinstance(taken["vocab_size"], int) and taken["vocab_size"] > end
    try:
        return GPT2Config(**taken, **dict.fromkeys(("bos_token_id", "eos_token_id"), end if known else None))
    except InputError as error:
        raise CheckpointError(f"{where}: {str(error).removeprefix('config: ')}; is it a GPT-2's?") from None


def _first(files: Mapping[str, Container]) -> Container | None:
    return next(iter(files.values()), None)


def _beside(path: Path) -> Path:
    return (path if path.is_dir() else path.parent) / "config.json"
