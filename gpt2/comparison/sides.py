"""One of the two models of a comparison: how it was asked for, and how to get at its parts without holding more than one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import Checkpoint, open_checkpoint
from gpt2.checkpoint.names import RUNS, VERIFIES, ModelName, dtype_name
from gpt2.checkpoint.saving import sha256
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.int8 import rounded_parameter
from gpt2.parity import reference

OTHER = "hf/"  # in front of a model's name: transformers' implementation of the same checkpoint


@dataclass(frozen=True)
class Side:
    """A model by name, opened as far as its config: nothing of its weights is in memory yet.

    ``theirs`` says that transformers runs it.
    """

    name: str  # as asked for: "hf/gpt2:bf16"
    theirs: bool
    checkpoint: Checkpoint

    @classmethod
    def open(cls, name: str, *, revision: str | None = None, offline: bool = False, dtype: str | None = None) -> Side:
        """Open a name as :func:`gpt2.load` does, with an optional ``hf/`` in front; ``dtype`` where the name gives none.

        Raises:
            InputError: no such model or dtype. CheckpointError: its tensors do not fit its config.
        """
        theirs = name.startswith(OTHER) and name != OTHER
        default = None if dtype is None else dtype_name(dtype, VERIFIES)
        parsed = ModelName.parse(name.removeprefix(OTHER) if theirs else name, VERIFIES if theirs else RUNS, revision=revision)
        parsed = replace(parsed, dtype=parsed.dtype or default)
        return cls(name, theirs, open_checkpoint(parsed, offline=offline))

    @property
    def config(self) -> GPT2Config:
        return self.checkpoint.config

    @property
    def dtype(self) -> torch.dtype:
        """What it runs in."""
        return self.checkpoint.dtype

    @property
    def revision(self) -> str | None:
        return self.checkpoint.revision

    def reader(self) -> Callable[[str], Tensor]:
        """Reads one parameter, in the dtype it runs in, into memory of its own."""
        read = self.checkpoint.reader(mapped=False)
        if self.dtype == torch.int8:
            return lambda name: rounded_parameter(name, read(name, torch.float32))
        return lambda name: read(name, self.dtype)

    @contextmanager
    def model(self, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
        """The model in memory, in eval mode, for as long as it is needed; ``dtype`` instead of its own."""
        if self.theirs:
            with reference.directory(self.checkpoint) as folder:
                yield reference.load_reference(folder, dtype or self.dtype)
        else:
            yield self.checkpoint.load(dtype)

    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's own tokenizer; None where it comes without one."""
        return self.checkpoint.own_tokenizer()

    def files(self) -> dict[str, str]:
        """Name -> sha256 of what the weights and the config were read from."""
        return {name: sha256(path) for name, path in self.checkpoint.files().items()}


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Ids (B, T) to logits (B, T, V), whichever of the two implementations it is."""

    def logits(ids: Tensor) -> Tensor:
        out = model(ids)
        return out if isinstance(out, Tensor) else out.logits

    return logits
