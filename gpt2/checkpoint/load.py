"""From a model's name to a GPT2 in memory: build without initialising, map, assign, and say all that did not fit at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import GPT2Config, official_size
from ..errors import CheckpointError, InputError
from ..model import GPT2
from .files import SafetensorsFile, open_weights, read_json
from .hub import DEFAULT, DTYPES, parse_random, resolve, split_dtype
from .keys import CAUSAL_MASK, MASKED_SCORE, TIED_HEAD, expected, from_file

if TYPE_CHECKING:
    from ..data import Tokenizer


@dataclass(frozen=True)
class Assignment:
    """Which tensor of the file fills which parameter, and which were seen and dropped."""

    sources: Mapping[str, str]  # parameter -> key in the file
    dropped: tuple[str, ...]  # keys of the file


def load(
    name: str = DEFAULT,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    offline: bool = False,
) -> GPT2:
    """Load GPT-2 weights into our model, in eval mode.

    Args:
        name: ``shakespeare-mini`` (embedded), ``gpt2`` and its official siblings, ``org/name[@revision]``, a directory, a
            ``.safetensors`` file with its ``config.json`` beside it, or ``random:SIZE[:SEED]``; each with an optional
            ``:dtype`` suffix.
        dtype: "float32", "bf16", ...; default: as stored.
        device: where the weights go.
        revision: branch, tag or commit of a Hub repository.
        offline: make no request; use what the cache holds.

    On the CPU in the stored dtype, weights are views of the mapped file: nothing is copied, pages are read when used. A
    conversion holds one source tensor at a time beside the result.

    Raises:
        InputError: no such model. CheckpointError: it cannot be read, or its tensors do not fit its config.
    """
    base, suffix = split_dtype(name)
    target = _dtype(dtype, suffix, name)
    random = parse_random(base)
    if random is not None:
        return random_model(*random).to(device=device, dtype=target or torch.float32).eval()
    source = resolve(base, revision=revision, offline=offline)
    return load_path(source.path, dtype=target, device=device)


def load_path(path: Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> GPT2:
    """:func:`load` for a directory or file that is already on this machine."""
    config = read_config(path)
    files = open_weights(path)
    mapping = match(files, config, path)
    model = GPT2(config, initialise=False)
    for name, key in mapping.sources.items():
        stored = files[key].entries[key].dtype
        tensor = files[key].read(key, mapped=dtype in (None, stored))
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(tensor.to(device=device, dtype=dtype or stored)))
    return model.eval()


def load_tokenizer(name: str = DEFAULT, *, revision: str | None = None, offline: bool = False) -> Tokenizer:
    """The tokenizer of a model, from the checkpoint's own files; names as in :func:`load`.

    Raises:
        InputError: no such model, no tokenizer files there, or damaged ones.
    """
    from ..data import from_directory

    base, _ = split_dtype(name)
    if parse_random(base) is not None:
        raise InputError(f"{name}: random weights come without a tokenizer; name a trained model")
    path = resolve(base, revision=revision, offline=offline).path
    return from_directory(path if path.is_dir() else path.parent)


def read_config(path: Path) -> GPT2Config:
    """The config of a checkpoint directory, or of the directory around a file."""
    where = (path if path.is_dir() else path.parent) / "config.json"
    if not where.is_file():
        raise CheckpointError(f"{path}: no config.json there; a checkpoint needs one, is this the right folder?")
    return GPT2Config.from_hf(read_json(where), str(where))


def random_model(size: str, seed: int = 0) -> GPT2:
    """A model of official shape whose every parameter is drawn, biases and norms too, so no fault hides behind a zero.

    float32 on the CPU; matrices and embeddings as GPT-2 initialises them, biases N(0, 0.02), norm weights 1 + N(0, 0.02).
    """
    model = GPT2(official_size(size), initialise=False)
    generator = torch.Generator().manual_seed(seed)
    model.initialise(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=model.config.initializer_range)
    return model


def match(files: Mapping[str, SafetensorsFile], config: GPT2Config, where: Path) -> Assignment:
    """Assign every tensor of a checkpoint, exactly once, to a parameter or to a stated reason for dropping it.

    Raises:
        CheckpointError: one line with everything that is missing, unexpected, misshapen, or not what it claims to be.
    """
    wanted = expected(config)
    sources: dict[str, str] = {}
    extras: dict[str, str] = {}
    problems: list[str] = []
    for key in files:
        name = from_file(key)
        taken = sources if name in wanted else extras
        if name in taken:
            problems.append(f"{key} and {taken[name]} are the same tensor")
        taken[name] = key
    shape = {name: files[key].entries[key].shape for name, key in (sources | extras).items()}
    problems = _contradictions(config, shape) + problems
    unexpected, dropped = [], []
    for name, key in extras.items():
        if CAUSAL_MASK.fullmatch(name):
            fault = None if _is_causal_mask(files[key].read(key)) else "is not the causal mask"
        elif MASKED_SCORE.fullmatch(name):
            fault = None if shape[name] in ((), (1,)) else f"has shape {shape[name]}, not a scalar's"
        elif name == TIED_HEAD:
            fault = _untied(files, key, sources.get("wte.weight"))
        else:
            unexpected.append(key)
            continue
        problems += [f"{key} {fault}"] if fault else []
        dropped.append(key)
    missing = [name for name in wanted if name not in sources]
    misshapen = [f"{sources[n]} is {shape[n]}, expected {s}" for n, s in wanted.items() if n in sources and shape[n] != s]
    integral = [key for key in sources.values() if not files[key].entries[key].dtype.is_floating_point]
    for title, found in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("misshapen", misshapen),
        ("not floating point", integral),
    ):
        if found:
            problems.append(f"{title}: {', '.join(found[:4])}{f' and {len(found) - 4} more' if len(found) > 4 else ''}")
    if problems:
        raise CheckpointError(f"{where}: the tensors do not fit config.json: {'; '.join(problems)}; mend the config or the file")
    return Assignment(sources, tuple(dropped))


def _contradictions(config: GPT2Config, shape: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Where tensors agree among themselves on another size than the config's, which explains many misfits in a few words."""
    layers = [int(found[1]) for name in shape if (found := re.match(r"h\.(\d+)\.", name))]
    told = {
        "vocab_size": shape.get("wte.weight", (None,))[0],
        "n_embd": shape.get("wte.weight", (None,))[-1],
        "n_positions": shape.get("wpe.weight", (None,))[0],
        "n_layer": max(layers) + 1 if layers else None,
        "n_inner": shape.get("h.0.mlp.c_fc.weight", (None,))[-1],
    }
    says = {**{key: getattr(config, key) for key in told}, "n_inner": config.inner}
    return [f"config says {key} {says[key]}, the tensors {told[key]}" for key in told if told[key] not in (None, says[key])]


def _is_causal_mask(tensor: Tensor) -> bool:
    square = tensor.ndim == 4 and tensor.shape[:2] == (1, 1) and tensor.size(2) == tensor.size(3)
    return square and torch.equal(tensor[0, 0], torch.ones_like(tensor[0, 0]).tril())


def _untied(files: Mapping[str, SafetensorsFile], key: str, embedding: str | None) -> str | None:
    if embedding is None:
        return "has no token embedding to be tied to"
    if torch.equal(files[key].read(key), files[embedding].read(embedding)):
        return None
    return f"differs from {embedding}: an untied head, which GPT-2 does not have"


def _dtype(asked: str | torch.dtype | None, suffix: str | None, name: str) -> torch.dtype | None:
    if isinstance(asked, str):
        if asked not in DTYPES:
            raise InputError(f"unknown dtype {asked!r}; known: {', '.join(DTYPES)}")
        asked = getattr(torch, DTYPES[asked])
    if suffix is None:
        return asked
    if asked not in (None, getattr(torch, suffix)):
        raise InputError(f"{name}: asks for {suffix}, and dtype= for {str(asked).removeprefix('torch.')}; give one of them")
    return getattr(torch, suffix)
