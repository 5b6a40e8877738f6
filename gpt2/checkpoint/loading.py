"""From a model's name to a GPT2 in memory: build without initialising, map, assign, and say all that did not fit at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gpt2.checkpoint.configs import config_of
from gpt2.checkpoint.containers import gguf_file
from gpt2.checkpoint.files import open_weights
from gpt2.checkpoint.hub import resolve
from gpt2.checkpoint.match import Assignment, match
from gpt2.checkpoint.names import DEFAULT, DTYPES, INT8, parse_random, split_dtype
from gpt2.checkpoint.peft_files import base_of, is_adapter, read_adapter
from gpt2.config import GPT2Config, official_size, quoted
from gpt2.errors import CheckpointError, InputError
from gpt2.int8 import Int8GPT2
from gpt2.model import GPT2

if TYPE_CHECKING:
    from gpt2.data import Tokenizer


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
        name: ``shakespeare-mini`` (embedded), ``gpt2`` and its official siblings, ``org/name[@revision]``, a directory or
            file in any container that :mod:`gpt2.checkpoint.files` opens, or ``random:SIZE[:SEED]``; each with an optional
            ``:dtype`` suffix.
        dtype: "float32", "bf16", ..., or "int8", which is for inference alone (:mod:`gpt2.int8`); default: as stored, and where
            that differs between tensors the narrowest that holds all.
        device: where the weights go: "cpu", "cuda", "cuda:1", "mps".
        revision: branch, tag or commit of a Hub repository.
        offline: make no request; use what the cache holds.

    On the CPU in the stored dtype, weights are views of the mapped file: nothing is copied, pages are read when used, and
    what is written to them stays in this process. (A file whose data is not aligned, as the official gpt2's, is read once
    instead.) A conversion holds a few megabytes of the source at a time beside the result. Matrices stored [out, in] become
    transposed views, so they cost no copy either. A file that is cut short while it is mapped ends the process
    (:mod:`gpt2.checkpoint.containers.mapped_file` says what can be told before that).

    Raises:
        InputError: no such model, dtype or device. CheckpointError: it cannot be read, or its tensors do not fit its config.
    """
    base, suffix = split_dtype(name, runs=True)
    target, device = _dtype(dtype, suffix, name), _device(device)
    random = parse_random(base)
    if random is not None:
        model = random_model(*random).to(device)
        return Int8GPT2.of(model) if target == torch.int8 else model.to(target or torch.float32).eval()
    source = resolve(base, revision=revision, offline=offline)
    return load_path(source.path, dtype=target, device=device, offline=offline)


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """A model is thousands of objects and no garbage, and a collection that they set off walks all that torch imported: 0.1 s."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def load_path(path: Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", offline: bool = False) -> GPT2:
    """:func:`load` for a directory or file that is already on this machine. (The base of an adapter may not be.)"""
    config, assignment = open_checkpoint(path, offline=offline)
    dtype = dtype or assignment.dtype
    if dtype == torch.int8:
        small = Int8GPT2(config)
        for name in assignment.names:  # one at a time: all of them in float32 would be four times what is kept
            small.put(name, assignment.read(name, torch.float32), device)
        return small
    with _collecting_no_garbage():
        model = GPT2(config, initialise=False)
        for name in assignment.names:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, torch.nn.Parameter(assignment.read(name, dtype).to(device)))
    return model.eval()


def open_checkpoint(path: Path, *, offline: bool = False) -> tuple[GPT2Config, Assignment]:
    """A checkpoint's config, and which of its tensors is which parameter; nothing is read yet but headers.

    A directory that holds a LoRA adapter of PEFT's is the model it names as its base, with the adapter merged in.

    Raises:
        CheckpointError: it cannot be read, its tensors do not fit its config, or the base of an adapter cannot be had.
    """
    if is_adapter(path):
        adapter = read_adapter(path)
        try:
            config, base = _open(base_of(adapter, offline=offline))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: a LoRA adapter; its base model cannot be opened: {error}") from None
        return config, adapter.on(base)
    return _open(path)


def _open(path: Path) -> tuple[GPT2Config, Assignment]:
    files = open_weights(path)
    config = config_of(path, files)
    return config, match(files, config, path)


def load_tokenizer(name: str = DEFAULT, *, revision: str | None = None, offline: bool = False) -> Tokenizer:
    """The tokenizer of a model, from the checkpoint's own files; names as in :func:`load`.

    Raises:
        InputError: no such model, no tokenizer files there, or damaged ones.
    """
    base, _ = split_dtype(name, runs=True)
    if parse_random(base) is not None:
        raise InputError(f"{name}: random weights come without a tokenizer; name a trained model")
    return tokenizer_of(resolve(base, revision=revision, offline=offline).path, offline=offline)


def tokenizer_of(path: Path, *, offline: bool = False) -> Tokenizer:
    """:func:`load_tokenizer` for a directory or file on this machine: the files beside the weights, or what a GGUF file holds.

    An adapter has its base's, unless some lie beside it.
    """
    from gpt2.data import from_directory, holds_tokenizer

    if is_adapter(path) and not holds_tokenizer(path):
        path = base_of(read_adapter(path), offline=offline)
    if path.is_file() or any(path.glob("*.gguf")):
        file = next(iter(open_weights(path).values()), None)
        if isinstance(file, gguf_file.GGUFFile):
            return gguf_file.tokenizer_of(file)
    return from_directory(path if path.is_dir() else path.parent)


def own_tokenizer(path: Path) -> Tokenizer | None:
    """:func:`tokenizer_of` with no request; None where the checkpoint comes without one.

    Raises:
        InputError: one is there, and damaged.
    """
    from gpt2.data import holds_tokenizer

    try:
        return tokenizer_of(path, offline=True)
    except InputError:
        if holds_tokenizer(path if path.is_dir() else path.parent):
            raise
        return None


def require_vocabulary(tokenizer: Tokenizer, config: GPT2Config, name: str) -> None:
    """Refuse a tokenizer that makes ids the model has no embedding for. (Fewer entries are well: some models are padded.)

    Raises:
        InputError: ``name`` has the tokenizer of another model.
    """
    if tokenizer.n_vocab > config.vocab_size:
        entries = f"the tokenizer has {tokenizer.n_vocab:,} entries, the model {config.vocab_size:,}"
        raise InputError(f"{name}: wrong vocabulary, {entries}; put the model's own vocab.json and merges.txt there")


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


def _dtype(asked: str | torch.dtype | None, suffix: str | None, name: str) -> torch.dtype | None:
    known = (*DTYPES, INT8)
    if isinstance(asked, str) and asked not in known:
        raise InputError(f"unknown dtype {quoted(asked)}; known: {', '.join(known)}")
    wanted: torch.dtype | None = getattr(torch, DTYPES.get(asked, INT8)) if isinstance(asked, str) else asked
    if wanted is not None and wanted not in [getattr(torch, each) for each in (*DTYPES.values(), INT8)]:
        raise InputError(f"dtype {quoted(wanted)} cannot hold a GPT-2; known: {', '.join(known)}")
    if suffix is None:
        return wanted
    named: torch.dtype = getattr(torch, suffix)
    if wanted not in (None, named):
        raise InputError(f"{name}: asks for {suffix}, and dtype= for {str(wanted).removeprefix('torch.')}; give one of them")
    return named


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
