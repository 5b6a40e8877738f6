"""One of the two models of a comparison: how it was asked for, and how to get at its parts without holding more than one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gpt2.checkpoint.files import files_of
from gpt2.checkpoint.hub import resolve
from gpt2.checkpoint.loading import load_path, open_checkpoint, own_tokenizer, random_model
from gpt2.checkpoint.names import DTYPES, parse_random, split_dtype
from gpt2.checkpoint.saving import sha256
from gpt2.config import GPT2Config, official_size
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.int8 import Int8GPT2, as_it_runs
from gpt2.parity import reference

OTHER = "hf/"  # in front of a model's name: transformers' implementation of the same checkpoint


@dataclass(frozen=True)
class Side:
    """A model by name, opened as far as its config: nothing of its weights is in memory yet.

    ``dtype`` is what it runs in, ``stored`` what its weights are kept in; ``theirs`` says that transformers runs it.
    """

    name: str  # as asked for: "hf/gpt2:bf16"
    theirs: bool
    path: Path | None  # None for random weights
    random: tuple[str, int] | None
    revision: str | None
    config: GPT2Config
    stored: torch.dtype
    dtype: torch.dtype

    @classmethod
    def open(cls, name: str, *, revision: str | None = None, offline: bool = False, dtype: str | None = None) -> Side:
        """Resolve a name as :func:`gpt2.load` does, with an optional ``hf/`` in front; ``dtype`` where the name gives none.

        Raises:
            InputError: no such model or dtype. CheckpointError: its tensors do not fit its config.
        """
        theirs = name.startswith(OTHER) and name != OTHER
        base, suffix = split_dtype(name.removeprefix(OTHER) if theirs else name, runs=not theirs)
        if dtype is not None and dtype not in DTYPES:
            raise InputError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
        asked = suffix or (DTYPES[dtype] if dtype is not None else None)
        random = parse_random(base)
        if random is not None:
            path, pinned, config, stored = None, None, official_size(random[0]), torch.float32
        else:
            source = resolve(base, revision=revision, offline=offline)
            path, pinned = source.path, source.revision
            config, assignment = open_checkpoint(path, offline=offline)
            stored = assignment.dtype
        return cls(name, theirs, path, random, pinned, config, stored, getattr(torch, asked) if asked else stored)

    def reader(self) -> Callable[[str], Tensor]:
        """Reads one parameter, in the dtype it runs in, into memory of its own; nothing is kept of it here."""
        if self.path is None:
            state = random_model(*self.random).state_dict()
            return lambda name: as_it_runs(name, state[name]) if self.dtype == torch.int8 else state[name].to(self.dtype)
        _, assignment = open_checkpoint(self.path, offline=True)  # what it takes was fetched when this was opened
        if self.dtype == torch.int8:
            return lambda name: as_it_runs(name, assignment.read(name, torch.float32, mapped=False))
        return lambda name: assignment.read(name, self.dtype, mapped=False)

    @contextmanager
    def model(self, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
        """The model in memory, in eval mode, for as long as it is needed; ``dtype`` instead of its own for a ruler."""
        dtype = dtype or self.dtype
        if self.theirs:
            with reference.directory(self.path, self.random) as folder:
                yield reference.load_reference(folder, dtype)
        elif self.path is None:
            model = random_model(*self.random)
            yield Int8GPT2.of(model) if dtype == torch.int8 else model.to(dtype).eval()
        else:
            yield load_path(self.path, dtype=dtype, offline=True)

    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's own tokenizer; None where it comes without one."""
        return None if self.path is None else own_tokenizer(self.path)

    def files(self) -> dict[str, str]:
        """Name -> sha256 of what the weights and the config were read from."""
        return {} if self.path is None else {path.name: sha256(path) for path in files_of(self.path)}


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Ids (B, T) to logits (B, T, V), whichever of the two implementations it is."""

    def logits(ids: Tensor) -> Tensor:
        out = model(ids)
        return out if isinstance(out, Tensor) else out.logits

    return logits
