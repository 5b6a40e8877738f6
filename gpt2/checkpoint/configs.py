"""Find a checkpoint's config: in config.json, in the container itself, or from the tensors' shapes.

Some containers state their sizes: nanoGPT's `model_args`, OpenAI's `hparams.json`, GGUF's metadata, llm.c's header. If
config.json is there too, both must agree, because no tensor's shape shows the number of heads: a wrong number would load
without an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2.checkpoint.containers import Container, gguf_file, listed, read_json
from gpt2.checkpoint.containers.llmc_file import LlmcFile
from gpt2.checkpoint.containers.tensorflow_file import TensorBundle, read_hparams
from gpt2.checkpoint.containers.torch_file import TorchFile
from gpt2.checkpoint.files import folder_of, what_is_there
from gpt2.checkpoint.keys import from_file, sizes
from gpt2.config import OFFICIAL_SIZES, GPT2Config
from gpt2.errors import CheckpointError, InputError

# (layers, width) -> heads of published shapes: OpenAI's and minGPT's (karpathy/minGPT, mingpt/model.py), whose state dicts do
# not contain the number of heads.
HEADS = {(size.n_layer, size.n_embd): size.n_head for size in OFFICIAL_SIZES.values()}
HEADS |= {(8, 512): 16, (6, 192): 6, (4, 128): 4, (3, 48): 3}
SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
# Different names for the same sizes: OpenAI's hparams.json (openai/gpt-2, src/model.py: default_hparams); nanoGPT's model_args.
OPENAI = {"vocab_size": "n_vocab", "n_positions": "n_ctx"}
NANOGPT = {"n_positions": "block_size"}
HOW = "say another with --set activation_function=NAME"


def read_config(path: Path) -> GPT2Config:
    where = folder_of(path) / "config.json"
    if not where.is_file():
        raise CheckpointError(f"{path}: no config.json there; {what_is_there(where.parent)}")
    return GPT2Config.from_hf(read_json(where), str(where))


def config_of(path: Path, files: Mapping[str, Container], activation: str | None = None) -> tuple[GPT2Config, str]:
    """Return the config of an opened checkpoint, and a line on what is assumed of it: the activation, which not all files say.

    ``activation`` is the user's word for it. Raises CheckpointError: no source, sources that disagree, or not a GPT-2.
    """
    config, assumed = _stated(path, files)
    if activation not in (None, config.activation_function) and not assumed:
        what = f"it says activation_function {config.activation_function} itself; leave {activation} out, or correct its config"
        raise CheckpointError(f"{path}: {what}")
    if activation is not None:
        return replace(config, activation_function=activation), ""
    return config, assumed and f"assumed: activation_function {config.activation_function}, {assumed}; {HOW}"


def _stated(path: Path, files: Mapping[str, Container]) -> tuple[GPT2Config, str]:
    """Return the config that the files state or show, and why its activation is assumed; "" if they state that too."""
    file = next(iter(files.values()), None)
    if isinstance(file, gguf_file.GGUFFile):
        return gguf_file.config_of(file), ""
    stated = None
    if isinstance(file, TensorBundle) and (hparams := file.path.parent / "hparams.json").is_file():
        stated = _checked(_sizes(read_hparams(hparams), OPENAI), hparams)
    if isinstance(file, TorchFile) and file.model_args:
        stated = _from_nanogpt(file.model_args, file.path, files)
    if isinstance(file, LlmcFile):
        stated = _checked(file.sizes, file.path)
    written = read_config(path) if os.path.lexists(folder_of(path) / "config.json") else None  # a link to nothing is said
    if written and stated and (odd := [name for name in SIZES if getattr(written, name) != getattr(stated, name)]):
        both = ", ".join(f"{name} {getattr(written, name)} and {getattr(stated, name)}" for name in odd)
        raise CheckpointError(f"{path}: config.json and the checkpoint itself disagree: {both}; remove the wrong config.json")
    if written is not None:
        return written, ""
    if stated is None:
        return _from_shapes(path, files), "since there is no config.json"
    return stated, "since nanoGPT's files do not say it, and it was gelu_new until June 2023" * isinstance(file, TorchFile)


def _sizes(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: raw[names.get(name, name)] for name in SIZES if raw.get(names.get(name, name)) is not None}


def _from_nanogpt(raw: Mapping[str, Any], where: Path, files: Mapping[str, Container]) -> GPT2Config:
    """Convert nanoGPT's model_args (karpathy/nanoGPT, train.py and model.py).

    The MLP has the exact GELU since June 2023. Files without ``bias`` are from before February 2023.
    """
    known = _shown(files) | _sizes(raw, NANOGPT)
    config = _checked({name: known[name] for name in SIZES if name in known}, where)
    dropout = raw.get("dropout", 0.0)
    dropout = dropout if isinstance(dropout, float | int) else 0.0
    activation = "gelu" if "bias" in raw else "gelu_new"
    return replace(config, activation_function=activation, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)


def _from_shapes(path: Path, files: Mapping[str, Container]) -> GPT2Config:
    """Return the config of a bare state dict of a published shape; other shapes do not determine the number of heads."""
    shown = _shown(files)
    heads = HEADS.get((shown.get("n_layer", 0), shown.get("n_embd", 0)))
    if heads is None or not {"vocab_size", "n_positions"} <= shown.keys():
        raise CheckpointError(
            f"{path}: no config.json there, and the tensors do not tell the number of heads; "
            f"put one beside them with {', '.join(SIZES)}"
        )
    inner = shown.pop("n_inner", None)
    known: dict[str, Any] = {"n_head": heads, "n_inner": None if inner == 4 * shown["n_embd"] else inner}
    # minGPT of 2020, whose feed-forward is a Sequential, has the exact GELU.
    known |= {"activation_function": "gelu"} if any(re.search(r"\bblocks\.0\.mlp\.0\.", key) for key in files) else {}
    return _checked(shown | known, path)


def _shown(files: Mapping[str, Container]) -> dict[str, int]:
    return sizes({from_file(key): file.entries[key].shape for key, file in files.items()})


def _checked(fields: Mapping[str, Any], where: Path) -> GPT2Config:
    """Build a config with GPT-2's end-of-text token if the vocabulary contains it; a bad field raises CheckpointError."""
    if missing := [name for name in SIZES if name not in fields]:
        raise CheckpointError(f"{where}: does not say {listed(missing)}; put a config.json beside it")
    end = 50256  # <|endoftext|> of OpenAI's vocabulary
    known = isinstance(fields["vocab_size"], int) and fields["vocab_size"] > end
    try:
        return GPT2Config(**fields, **dict.fromkeys(("bos_token_id", "eos_token_id"), end if known else None))
    except InputError as error:
        raise CheckpointError(f"{where}: {str(error).removeprefix('config: ')}; is it a GPT-2's?") from None
