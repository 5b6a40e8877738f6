"""From a model's name to a GPT2 in memory: build without initialising, map, assign, and say all that did not fit at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..config import GPT2Config, official_size, quoted
from ..errors import CheckpointError, InputError
from ..model import GPT2
from .containers import Container, Entry, listed, read_json
from .files import open_weights, what_is_there
from .hub import resolve
from .keys import CAUSAL_MASK, MASKED_SCORE, TIED_HEAD, expected, from_file, layer
from .names import DEFAULT, DTYPES, parse_random, split_dtype

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
        dtype: "float32", "bf16", ...; default: as stored, and where that differs between tensors the narrowest that holds all.
        device: where the weights go: "cpu", "cuda", "cuda:1", "mps".
        revision: branch, tag or commit of a Hub repository.
        offline: make no request; use what the cache holds.

    On the CPU in the stored dtype, weights are views of the mapped file: nothing is copied, pages are read when used, and
    what is written to them stays in this process. (A file whose data is not aligned, as the official gpt2's, is read once
    instead.) A conversion holds a few megabytes of the source at a time beside the result.

    Raises:
        InputError: no such model, dtype or device. CheckpointError: it cannot be read, or its tensors do not fit its config.
    """
    base, suffix = split_dtype(name)
    target, device = _dtype(dtype, suffix, name), _device(device)
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
    if dtype is None:
        dtype = reduce(torch.promote_types, (files[key].entries[key].dtype for key in mapping.sources.values()))
    model = GPT2(config, initialise=False)
    for name, key in mapping.sources.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(files[key].read(key, dtype).to(device)))
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


def require_vocabulary(tokenizer: Tokenizer, config: GPT2Config, name: str) -> None:
    """Refuse a tokenizer that makes ids the model has no embedding for. (Fewer entries are well: some models are padded.)

    Raises:
        InputError: ``name`` has the tokenizer of another model.
    """
    if tokenizer.n_vocab > config.vocab_size:
        entries = f"the tokenizer has {tokenizer.n_vocab:,} entries, the model {config.vocab_size:,}"
        raise InputError(f"{name}: wrong vocabulary, {entries}; put the model's own vocab.json and merges.txt there")


def read_config(path: Path) -> GPT2Config:
    """The config of a checkpoint directory, or of the directory around a file."""
    where = (path if path.is_dir() else path.parent) / "config.json"
    if not where.is_file():
        raise CheckpointError(f"{path}: no config.json there; {what_is_there(where.parent)}")
    return GPT2Config.from_hf(read_json(where), str(where))


def random_model(size: str, seed: int = 0) -> GPT2:
    """A model of official shape whose every parameter is drawn, biases and norms too, so no fault hides behind a zero.

    float32 on the CPU; matrices and embeddings as GPT-2 initialises them, biases N(0, 0.02), norm weights 1 + N(0, 0.02).
    """
    config = official_size(size)
    if not 0 <= seed < 2**63:
        raise InputError(f"random:{size}: the seed must be within 0 .. 2**63 - 1; choose a smaller one")
    model = GPT2(config, initialise=False)
    generator = torch.Generator().manual_seed(seed)
    model.initialise(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=model.config.initializer_range)
    return model


def match(files: Mapping[str, Container], config: GPT2Config, where: Path) -> Assignment:
    """Assign every tensor of a checkpoint, exactly once, to a parameter or to a stated reason for dropping it.

    Raises:
        CheckpointError: one line with everything that is missing, unexpected, misshapen, or not what it claims to be.
    """
    wanted = expected(config)
    sources: dict[str, str] = {}
    extras: dict[str, str] = {}
    twice: list[str] = []
    for key in files:
        name = from_file(key)
        taken = sources if name in wanted else extras
        twice += [key] if name in taken else []
        taken[name] = key
    found = {name: files[key].entries[key] for name, key in (sources | extras).items()}
    dropped, faults = _drop(files, extras, sources.get("wte.weight"))
    misshapen = {name: shape for name, shape in wanted.items() if name in sources and found[name].shape != shape}
    # Only the blocks' matrices differ between Conv1D and nn.Linear; an embedding on its side is another mistake.
    turned = bool(misshapen) and all(
        name.startswith("h.") and len(shape) == 2 and found[name].shape == shape[::-1] for name, shape in misshapen.items()
    )
    faults |= {
        "missing": [name for name in wanted if name not in sources],
        "there with and without prefix": twice,
        "not floating point": [key for name, key in sources.items() if not found[name].dtype.is_floating_point],
    }
    problems = _contradictions(config, found)
    problems += [f"{title}: {listed(keys)}" for title, keys in faults.items() if keys]
    if misshapen:
        of = [f"{sources[name]} is {list(found[name].shape)}, expected {list(shape)}" for name, shape in misshapen.items()]
        more = f" and {len(of) - 4:,} more" if len(of) > 4 else ""
        why = (
            " (the matrices lie [out, in], as nn.Linear keeps them: transpose all, the square attn.c_proj too)" if turned else ""
        )
        problems.append(f"misshapen: {', '.join(of[:4])}{more}{why}")
    if problems:
        raise CheckpointError(f"{where}: the tensors do not fit config.json: {'; '.join(problems)}; mend the config or the file")
    return Assignment(sources, tuple(dropped))


def _drop(
    files: Mapping[str, Container], extras: Mapping[str, str], embedding: str | None
) -> tuple[list[str], dict[str, list[str]]]:
    """Which keys beside the parameters are what their names say and carry nothing, and what is wrong with the others."""
    dropped: list[str] = []
    faults: dict[str, list[str]] = {}
    for name, key in extras.items():
        if CAUSAL_MASK.fullmatch(name):
            fault = None if _is_causal_mask(files[key], key) else "not the causal mask"
        elif MASKED_SCORE.fullmatch(name):
            fault = None if files[key].entries[key].shape in ((), (1,)) else "not a scalar"
        elif name == TIED_HEAD:
            fault = None if embedding and _same(files, key, embedding) else "an untied head, which GPT-2 does not have"
        else:
            fault = "unexpected"
        if fault is None:
            dropped.append(key)
        else:
            faults.setdefault(fault, []).append(key)
    return dropped, faults


def _contradictions(config: GPT2Config, found: Mapping[str, Entry]) -> list[str]:
    """Where tensors agree among themselves on another size than the config's, which explains many misfits in a few words."""

    def size(name: str, ndim: int, axis: int) -> int | None:
        entry = found.get(name)
        return entry.shape[axis] if entry and len(entry.shape) == ndim else None

    layers = [number for name in found if (number := layer(name)) is not None]
    told = {
        "vocab_size": size("wte.weight", 2, 0),
        "n_embd": size("wte.weight", 2, 1),
        "n_positions": size("wpe.weight", 2, 0),
        "n_layer": max(layers) + 1 if layers else None,
        "n_inner": size("h.0.mlp.c_fc.bias", 1, 0),
    }
    says = {**{key: getattr(config, key) for key in told}, "n_inner": config.inner}
    return [f"config says {key} {says[key]}, the tensors {told[key]}" for key in told if told[key] not in (None, says[key])]


def _is_causal_mask(file: Container, key: str) -> bool:
    """Ones on and below the diagonal, zeros above; of any dtype, and of any size, since what it says is the same."""
    shape = file.entries[key].shape
    if len(shape) != 4 or shape[:2] != (1, 1) or shape[2] != shape[3] or shape[3] == 0:
        return False
    mask = file.read(key)[0, 0]
    return torch.equal(mask, torch.ones_like(mask).tril())


def _same(files: Mapping[str, Container], one: str, other: str) -> bool:
    """Whether two tensors are the same bits."""
    a, b = files[one].entries[one], files[other].entries[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    bits = [files[key].read(key).view(-1).view(torch.uint8) for key in (one, other)]
    return torch.equal(*bits)


def _dtype(asked: str | torch.dtype | None, suffix: str | None, name: str) -> torch.dtype | None:
    if isinstance(asked, str):
        if asked not in DTYPES:
            raise InputError(f"unknown dtype {quoted(asked)}; known: {', '.join(DTYPES)}")
        asked = getattr(torch, DTYPES[asked])
    if asked is not None and asked not in [getattr(torch, known) for known in DTYPES.values()]:
        raise InputError(f"dtype {quoted(asked)} cannot hold a GPT-2; known: {', '.join(DTYPES)}")
    if suffix is None:
        return asked
    if asked not in (None, getattr(torch, suffix)):
        raise InputError(f"{name}: asks for {suffix}, and dtype= for {str(asked).removeprefix('torch.')}; give one of them")
    return getattr(torch, suffix)


def _device(asked: str | torch.device) -> torch.device:
    """A device that this machine has, before gigabytes are fetched for it."""
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        here = "this machine has no accelerator, use cpu"
        if torch.accelerator.is_available():
            here = f"this machine has cpu and {torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}"
        raise InputError(f"no device {quoted(str(asked))} here; {here}") from None
    return device
