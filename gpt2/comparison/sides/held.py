"""A model in memory as a side: a ``GPT2`` in place of a name, such as one that is being trained. A copy of it is run."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.checkpoint.containers.gguf_file import NoTokenizer
from gpt2.checkpoint.loading import load_tokenizer
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.int8 import Int8GPT2
from gpt2.lora import merged
from gpt2.model import GPT2
from gpt2.port.mapping.checkpoint import ModuleCheckpoint


@dataclass(frozen=True)
class HeldCheckpoint(ModuleCheckpoint):
    """The weights of a model in memory, and the tokenizer of the checkpoint that it was loaded from, if it is still there."""

    loaded_from: str
    offline: bool

    def tokenizer(self) -> Tokenizer:
        try:
            found = load_tokenizer(self.loaded_from, offline=self.offline) if self.loaded_from else None
        except InputError:
            found = None
        if found is None or found.n_vocab > self.config.vocab_size:
            raise NoTokenizer("a module has none")
        return found


class HeldSide(CheckpointSide):
    in_memory = True


def held(model: GPT2, *, offline: bool = False) -> CheckpointSide:
    """Return the side of a model as it is now, adapters merged. Raises InputError: it is in int8."""
    loaded_from, table = getattr(model, "name", ""), model.wte.weight
    name = f"{loaded_from or 'a GPT2'} in memory"
    if isinstance(model, Int8GPT2):
        raise InputError(f"{name}: is in int8; give its name, as in {loaded_from or 'MODEL'}:int8")
    weights = {key: each.cpu() for key, each in merged(model).state_dict().items()}
    checkpoint = HeldCheckpoint(name, None, model.config, table.dtype, table.dtype, weights, (), loaded_from, offline)
    return HeldSide(name, False, checkpoint, table.device)
