"""The sides that are checkpoints: run by our implementation (MODEL) or by transformers (``hf/MODEL``). They show everything."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import Checkpoint, StoredCheckpoint, open_checkpoint
from gpt2.checkpoint.keys import HEAD
from gpt2.checkpoint.loading import require_device, require_intact
from gpt2.checkpoint.names import FLOATS, RUNS, ModelName, dtype_name
from gpt2.comparison.sides.side import SHOWABLE, Read, Side
from gpt2.damage import require_finite
from gpt2.data import Tokenizer
from gpt2.int8 import rounded_parameter
from gpt2.measure.environment import dtype_label
from gpt2.measure.placement import placed
from gpt2.measure.tracing import Recorded, trace_blocks
from gpt2.model import GPT2
from gpt2.parity import reference
from gpt2.parity.checks import hidden_of

HF_PREFIX = "hf/"  # prefix of a name: transformers' implementation of the checkpoint


@dataclass(eq=False)
class CheckpointSide(Side):
    """A model by name, with its config."""

    name: str
    by_transformers: bool  # whether transformers runs it, or our implementation
    checkpoint: Checkpoint
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shows = frozenset(SHOWABLE)

    @classmethod
    def open(
        cls, name: str, *, revision: str | None = None, offline: bool = False, dtype: str | None = None, device: str = "cpu"
    ) -> "CheckpointSide":
        """Open a name as :func:`gpt2.load` does, with an optional prefix ``hf/``; ``dtype`` is for a name that gives none."""
        hf = name.startswith(HF_PREFIX) and name != HF_PREFIX
        default, where = None if dtype is None else dtype_name(dtype, FLOATS), require_device(device)
        parsed = ModelName.parse(name.removeprefix(HF_PREFIX) if hf else name, FLOATS if hf else RUNS, revision=revision)
        checkpoint = open_checkpoint(replace(parsed, dtype=parsed.dtype or default), offline=offline)
        return cls(name, hf, checkpoint, require_device(where, checkpoint.dtype))

    @property
    def size(self) -> int:  # type: ignore[override]  # read-only
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

    def load(self, stack: ExitStack) -> nn.Module:
        """Return the model in eval mode, on the side's device."""
        model: nn.Module
        if self.by_transformers:
            folder = stack.enter_context(reference.directory(self.checkpoint))
            model = reference.load_reference(folder, self.dtype, self.config)
        else:
            model = self.checkpoint.load()
        require_intact(model, self.name)
        return placed(model, self.device)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:  # type: ignore[override]
        return self.checkpoint.own_tokenizer()

    def forward(self, ids: Tensor) -> Tensor:
        output = self.program(ids)
        return output if isinstance(output, Tensor) else output.logits

    def require_finite(self, logits: Tensor) -> None:
        require_finite(logits, self.name, self.program)  # it names the weights

    def class_scores(self, ids: Tensor) -> Tensor:
        """Return the score of each class (C,) of ``classifier``, which reads the last token, for a text of (1, T) ``ids``."""
        hidden, head = hidden_of(self.program, ids.to(self.device))[0, -1].cpu(), self.classifier
        return F.linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())

    def blocks(self, ids: Tensor) -> Iterator[Recorded]:
        return trace_blocks(self.program, ids)

    implementation = property(lambda self: f"transformers {version('transformers')}" if self.by_transformers else "gpt2")
    gpt2 = property(lambda self: self.program if isinstance(self.program, GPT2) else None)
    config = property(lambda self: self.checkpoint.config)
    dtype = property(lambda self: self.checkpoint.dtype)
    stored = property(lambda self: dtype_label(self.dtype))
    revision = property(lambda self: self.checkpoint.revision)
    files = property(lambda self: self.checkpoint.files())  # of the weights and the config
    heads = property(lambda self: getattr(self.checkpoint, "extra", {}))  # a module's weights have none
    classifier = property(lambda self: getattr(self.checkpoint, "classifier", None))


def heads_left_out(*sides: Side) -> dict[str, str]:
    """Return what is said of heads beside the language model's, which a comparison leaves out; {} where no model has one."""
    heads = [(side.name, side.heads) for side in sides]
    (_, first), *_ = heads
    equal = all(first.keys() == each.keys() and all(torch.equal(first[key], each[key]) for key in first) for _, each in heads)
    which = "; ".join(f"{name} has {', '.join(held)}" for name, held in heads if held)
    how = "; --cases FILE with text and label compares classes" * ("score.weight" in which)
    return {"heads, which are equal" if equal else "heads": f"{which}: no part of a language model{how}"} if which else {}
