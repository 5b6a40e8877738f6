"""Load a model or its tokenizer by name: the functions behind ``gpt2.load`` and ``gpt2.load_tokenizer``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gpt2.checkpoint.checkpoint import open_checkpoint, open_path, tokenizer_of
from gpt2.checkpoint.hub import locate
from gpt2.checkpoint.names import DEFAULT, RUNS, ModelName
from gpt2.config import GPT2Config, quoted
from gpt2.errors import InputError
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
        offline: make no request; use the cache alone.

    On the CPU in the stored dtype, weights are views of the mapped file: pages are read when they are used, and changes stay in
    this process. (The data of the official gpt2's file is not aligned, so it is read once instead.) Matrices stored [out, in]
    become transposed views. A conversion holds a few megabytes of the source at a time beside the result. If a mapped file is
    cut short, the process ends (:mod:`gpt2.checkpoint.containers.mapped_file` says how much of that is noticed before).

    Raises:
        InputError: no such model, dtype or device. CheckpointError: it cannot be read, or its tensors do not fit its config.
    """
    asked = None if dtype is None else str(dtype).removeprefix("torch.")
    parsed, device = ModelName.parse(name, RUNS, dtype=asked, revision=revision), require_device(device)
    return open_checkpoint(parsed, offline=offline).load(device=device)


def load_path(path: Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", offline: bool = False) -> GPT2:
    """:func:`load` for a local directory or file. (The base of an adapter may lie elsewhere.)"""
    return open_path(path, offline=offline).load(dtype, device)


def load_tokenizer(name: str = DEFAULT, *, revision: str | None = None, offline: bool = False) -> Tokenizer:
    """The tokenizer of a model; names as in :func:`load`. Raises InputError: no such model, or no intact tokenizer files."""
    parsed = ModelName.parse(name, RUNS, revision=revision)
    if parsed.random is not None:
        return open_checkpoint(parsed).tokenizer()  # says that there is none
    return tokenizer_of(locate(parsed, offline=offline).path, offline=offline)


def require_vocabulary(tokenizer: Tokenizer, config: GPT2Config, name: str) -> None:
    """Raise InputError for a tokenizer with ids that the model has no embedding for. (Fewer are fine: some models are padded.)"""
    if tokenizer.n_vocab > config.vocab_size:
        entries = f"the tokenizer has {tokenizer.n_vocab:,} entries, the model {config.vocab_size:,}"
        raise InputError(f"{name}: wrong vocabulary, {entries}; put the model's own vocab.json and merges.txt there")


def require_device(asked: str | torch.device) -> torch.device:
    """The device, checked before gigabytes are fetched for it. Raises InputError: this machine has no such device."""
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        here = "this machine has no accelerator, use cpu"
        if torch.accelerator.is_available():
            here = f"this machine has cpu and {torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}"
        raise InputError(f"no device {quoted(str(asked))} here; {here}") from None
    return device
