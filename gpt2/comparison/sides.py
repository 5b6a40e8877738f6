"""Open one of the two models of a comparison: its config, tokenizer, tensors one at a time, or the whole model."""

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
from gpt2.measure.metrics import Logits
from gpt2.parity import reference

HF_PREFIX = "hf/"  # of a model's name: transformers' implementation of the same checkpoint


@dataclass(frozen=True)
class Side:
    """A model by name. Its config is read; no weights are in memory yet."""

    name: str  # as asked for: "hf/gpt2:bf16"
    by_transformers: bool  # whether transformers runs it, or our implementation
    checkpoint: Checkpoint

    @classmethod
    def open(cls, name: str, *, revision: str | None = None, offline: bool = False, dtype: str | None = None) -> Side:
        """Open a name as :func:`gpt2.load` does, with an optional prefix ``hf/``; ``dtype`` is for a name that gives none.

        Raises:
            InputError: no such model or dtype. CheckpointError: its tensors do not fit its config.
        """
        hf = name.startswith(HF_PREFIX) and name != HF_PREFIX
        default = None if dtype is None else dtype_name(dtype, VERIFIES)
        parsed = ModelName.parse(name.removeprefix(HF_PREFIX) if hf else name, VERIFIES if hf else RUNS, revision=revision)
        parsed = replace(parsed, dtype=parsed.dtype or default)
        return cls(name, hf, open_checkpoint(parsed, offline=offline))

    @property
    def config(self) -> GPT2Config:
        return self.checkpoint.config

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model runs in."""
        return self.checkpoint.dtype

    @property
    def revision(self) -> str | None:
        return self.checkpoint.revision

    def reader(self) -> Callable[[str], Tensor]:
        """A function that reads one parameter, in the dtype it runs in, into new memory."""
        read = self.checkpoint.reader(mapped=False)
        if self.dtype == torch.int8:
            return lambda name: rounded_parameter(name, read(name, torch.float32))
        return lambda name: read(name, self.dtype)

    @contextmanager
    def model(self, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
        """Load the model, in eval mode, for the time of the ``with`` block; ``dtype`` replaces its own."""
        if self.by_transformers:
            with reference.directory(self.checkpoint) as folder:
                yield reference.load_reference(folder, dtype or self.dtype)
        else:
            yield self.checkpoint.load(dtype)

    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's own tokenizer; None if it has none."""
        return self.checkpoint.own_tokenizer()

    def files(self) -> dict[str, str]:
        """File name -> sha256, of the files that hold the weights and the config."""
        return {name: sha256(path) for name, path in self.checkpoint.files().items()}


def logits_of(model: nn.Module) -> Logits:
    """A function from ids (B, T) to logits (B, T, V), for our models and transformers'."""

    def logits(ids: Tensor) -> Tensor:
        output = model(ids)
        return output if isinstance(output, Tensor) else output.logits

    return logits
