"""The sides that are checkpoints: run by our implementation (MODEL) or by transformers (``hf/MODEL``). They show everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import Checkpoint, ClassifierHead, StoredCheckpoint, open_checkpoint
from gpt2.checkpoint.keys import HEAD
from gpt2.checkpoint.loading import require_device, require_intact
from gpt2.checkpoint.names import RUNS, VERIFIES, ModelName, dtype_name
from gpt2.comparison.sides.side import ComparedModel, Read, Shown, Side
from gpt2.config import GPT2Config
from gpt2.damage import require_finite
from gpt2.data import Tokenizer
from gpt2.int8 import rounded_parameter
from gpt2.measure.environment import dtype_label
from gpt2.measure.placement import placed
from gpt2.measure.tracing import Recorded, trace_blocks
from gpt2.model import GPT2
from gpt2.parity import reference

HF_PREFIX = "hf/"  # prefix of a name: transformers' implementation of the checkpoint


@dataclass(eq=False)
class CheckpointSide(Side):
    """A model by name, with its config."""

    name: str
    by_transformers: bool  # whether transformers runs it, or our implementation
    checkpoint: Checkpoint
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shows = frozenset({Shown.WEIGHTS, Shown.ACTIVATIONS, Shown.LOGITS})

    @classmethod
    def open(
        cls,
        name: str,
        *,
        revision: str | None = None,
        offline: bool = False,
        dtype: str | None = None,
        device: str | torch.device = "cpu",
    ) -> CheckpointSide:
        """Open a name as :func:`gpt2.load` does, with an optional prefix ``hf/``; ``dtype`` is for a name that gives none."""
        hf = name.startswith(HF_PREFIX) and name != HF_PREFIX
        default = None if dtype is None else dtype_name(dtype, VERIFIES)
        parsed = ModelName.parse(name.removeprefix(HF_PREFIX) if hf else name, VERIFIES if hf else RUNS, revision=revision)
        parsed = replace(parsed, dtype=parsed.dtype or default)
        where = require_device(device)
        checkpoint = open_checkpoint(parsed, offline=offline)
        return cls(name, hf, checkpoint, require_device(where, checkpoint.dtype))

    @property
    def config(self) -> GPT2Config:  # type: ignore[override]  # read-only, and never None
        return self.checkpoint.config

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype in which the model runs."""
        return self.checkpoint.dtype

    @property
    def size(self) -> int:
        checkpoint = self.checkpoint
        if isinstance(checkpoint, StoredCheckpoint) and self.dtype == checkpoint.stored:
            files, held = checkpoint.assignment.files, checkpoint.assignment.sources.values()
            return sum(files[key].entries[key].end - files[key].entries[key].start for keys in held for key in keys)
        return self.config.num_parameters() * self.dtype.itemsize

    def weights(self, rows: int, *, mapped: bool = False) -> Read:
        stored, dtype = self.checkpoint.reader(mapped=mapped), self.dtype

        def read(name: str, dtype: torch.dtype = dtype) -> Tensor:
            tensor = stored("wte.weight" if name == HEAD and self.config.tie_word_embeddings else name, dtype)
            return tensor[:rows] if name in ("wte.weight", HEAD) else tensor

        return (lambda name: rounded_parameter(name, read(name, torch.float32))) if dtype == torch.int8 else read

    @contextmanager
    def model(self, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
        """Load the model in eval mode, on the side's device, for the time of the ``with`` block; ``dtype`` replaces its own."""
        if self.by_transformers:
            with reference.directory(self.checkpoint) as folder:
                yield self._intact(reference.load_reference(folder, dtype or self.dtype, self.config))
        else:
            yield self._intact(self.checkpoint.load(dtype))

    def _intact(self, model: nn.Module) -> nn.Module:
        require_intact(model, self.name)
        return placed(model, self.device)

    def load(self, stack: ExitStack) -> nn.Module:
        return stack.enter_context(self.model())

    @property
    def gpt2(self) -> GPT2 | None:
        return self.program if isinstance(self.program, GPT2) else None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return self.checkpoint.own_tokenizer()

    @property
    def classifier(self) -> ClassifierHead | None:
        """The head beside the model that tells the class of a text, if it has one."""
        return self.checkpoint.classifier if isinstance(self.checkpoint, StoredCheckpoint) else None

    def logits(self, ids: Tensor) -> Tensor:
        output = self.program(ids)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        require_finite(logits, self.name, self.program)  # it names the weights
        return logits

    def hidden(self, ids: Tensor) -> Tensor:
        """Return what the head reads (B, T, D)."""
        trunk: Any = self.gpt2 or self.program.transformer
        ids = ids.to(trunk.wte.weight.device)
        hidden: Tensor = trunk.hidden(ids) if self.gpt2 else trunk(ids).last_hidden_state
        return hidden.cpu()

    def blocks(self, ids: Tensor) -> Iterator[Recorded]:
        return trace_blocks(self.program, ids)

    @property
    def implementation(self) -> str:
        return f"transformers {version('transformers')}" if self.by_transformers else "gpt2"

    stored = property(lambda self: dtype_label(self.dtype))
    revision = property(lambda self: self.checkpoint.revision)
    files = property(lambda self: self.checkpoint.files())  # of the weights and the config

    def describe(self) -> ComparedModel:
        return replace(super().describe(), checkpoint=self.checkpoint.name if self.files else None)


def heads_left_out(*sides: Side) -> dict[str, str]:
    """Return what is said of heads beside the language model's, which a comparison leaves out; {} where no model has one."""
    stored = [(side.name, side.checkpoint if isinstance(side, CheckpointSide) else None) for side in sides]
    heads = [(name, each.extra if isinstance(each, StoredCheckpoint) else {}) for name, each in stored]
    (_, first), *_ = heads
    equal = all(first.keys() == each.keys() and all(torch.equal(first[key], each[key]) for key in first) for _, each in heads)
    which = "; ".join(f"{name} has {', '.join(held)}" for name, held in heads if held)
    how = "; --cases FILE with text and label compares classes" * ("score.weight" in which)
    return {"heads, which are equal" if equal else "heads": f"{which}: no part of a language model{how}"} if which else {}
