"""Open one of the two models of a comparison: its config, tokenizer, single tensors, or the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import Checkpoint, open_checkpoint
from gpt2.checkpoint.names import RUNS, VERIFIES, ModelName, dtype_name
from gpt2.checkpoint.official_files import official_files
from gpt2.checkpoint.saving import sha256
from gpt2.comparison.results import Model
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.int8 import rounded_parameter
from gpt2.measure.metrics import Logits
from gpt2.pages.reports import dtype_label
from gpt2.parity import reference

HF_PREFIX = "hf/"  # prefix of a name: transformers' implementation of the checkpoint


@dataclass(frozen=True)
class Side:
    """A model by name, with its config; weights are not loaded yet."""

    name: str  # as requested: "hf/gpt2:bf16"
    by_transformers: bool  # whether transformers runs it, or our implementation
    checkpoint: Checkpoint

    @classmethod
    def open(cls, name: str, *, revision: str | None = None, offline: bool = False, dtype: str | None = None) -> Side:
        """Open a name as :func:`gpt2.load` does, with an optional prefix ``hf/``; ``dtype`` is for a name that gives none."""
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
        """The dtype in which the model runs."""
        return self.checkpoint.dtype

    def reader(self) -> Callable[[str], Tensor]:
        """Return a function that reads one parameter, in the dtype in which it runs, into new memory."""
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
        """Return the checkpoint's own tokenizer, or None."""
        return self.checkpoint.own_tokenizer()

    def describe(self, versions: dict[str, str]) -> Model:
        """Return everything needed to run this side again; hashes the files of the weights and the config."""
        implementation = f"transformers {versions['transformers']}" if self.by_transformers else "gpt2"
        config, revision = self.config, self.checkpoint.revision
        files = {name: sha256(path) for name, path in self.checkpoint.files().items()}
        official = official_files(files, self.checkpoint.name) if files else None
        dtype, parameters = dtype_label(self.dtype), config.num_parameters()
        return Model(self.name, implementation, dtype, revision, parameters, asdict(config), files, official)


def text_tokenizers(sides: Sequence[Side]) -> tuple[Tokenizer, ...]:
    """Return each side's own tokenizer, or the first one if it has none; without any, raise an InputError."""
    own = [side.tokenizer() for side in sides]
    shared = next((tokenizer for tokenizer in own if tokenizer is not None), None)
    if shared is None:
        raise InputError(f"{sides[0].name}: has no tokenizer to read a text with; give a model that comes with one")
    return tuple(tokenizer or shared for tokenizer in own)


def logits_of(model: nn.Module) -> Logits:
    """Return a function from ids (B, T) to logits (B, T, V), for our models and transformers'."""

    def logits(ids: Tensor) -> Tensor:
        output = model(ids)
        return output if isinstance(output, Tensor) else output.logits

    return logits
