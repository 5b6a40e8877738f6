"""A side of a comparison: one context manager with ``config``, ``tokenizer``, ``weights``, ``blocks`` and ``logits``."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from gpt2.checkpoint.checkpoint import Checkpoint, ClassifierHead
from gpt2.checkpoint.official import Official, official_files
from gpt2.checkpoint.saving import sha256
from gpt2.comparison.passage import DEFAULT_CONTEXT, Passage
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.errors import InputError, out_of_memory
from gpt2.measure.environment import Environment, environment
from gpt2.measure.tracing import Recorded
from gpt2.measure.user_code import error_line
from gpt2.model import GPT2

T = TypeVar("T")
Read = Callable[[str], Tensor]  # parameter's name -> its tensor
SHOWABLE = ("weights", "activations", "logits")  # what a side can show; a comparison measures what both sides show


@dataclass(frozen=True)
class ComparedModel:
    """One of the models, with everything needed to run it again."""

    name: str
    implementation: str  # "gpt2" or "transformers 5.23.0"
    dtype: str  # "" where the side does not tell it
    revision: str | None
    parameters: int | None  # None where the side does not tell them
    config: dict[str, Any]  # empty where the side does not tell it
    paths: Mapping[str, Path | str] = field(repr=False, compare=False)  # its files, or hashes of them, by name
    checkpoint: str | None = None  # its name, where it is one of stored files
    in_memory: bool = False  # a model, and no name of one

    @cached_property
    def files(self) -> dict[str, str]:
        """Name -> sha256 of its files, which are read when this is first asked for: JSON and pages alone show it."""
        known = {name: path for name, path in self.paths.items() if isinstance(path, str) or path.exists()}
        return {name: path if isinstance(path, str) else sha256(path) for name, path in known.items()}

    def hashed(self) -> "ComparedModel":
        """Return the same, its files read now: they may be gone when a report is written."""
        return replace(self, paths=self.files)

    @property
    def official(self) -> Official | None:
        """Whether its files are official ones; None where it is no checkpoint of stored files."""
        return None if self.checkpoint is None else official_files(self.files, self.checkpoint)

    @property
    def figures(self) -> dict[str, object]:
        """What the JSON has of it."""
        own = ("name", "implementation", "dtype", "revision", "parameters", "config", "files", "official", "in_memory")
        return {name: getattr(self, name) for name in own}


class Side(ABC):
    """One of the models of a comparison, by name; nothing heavy is loaded before the ``with`` block, in which it is run.

    It says what it has: ``weights``, ``blocks`` and ``logits`` are asked only of a side that ``shows`` them, and its checkpoint,
    tokenizer, classifier and config are None where it has none, or does not tell it. Without a config ``n_positions`` and
    ``vocab_size`` say what is known (None: anything).
    """

    name: str  # as requested: "hf/gpt2:bf16"
    shows: frozenset[str]  # of SHOWABLE
    config: GPT2Config | None = None
    dtype: torch.dtype | None = None  # in which it runs, where torch has that dtype
    device: torch.device = torch.device("cpu")
    revision: str | None = None
    stored: str = ""  # the type of its weights in words, where that is known
    in_memory: bool = False  # whether it is a model that was given, and no name
    recording: Passage | None = None  # of a side that can be asked about no other text
    checkpoint: Checkpoint | None = None  # its own weights
    classifier: ClassifierHead | None = None  # the head beside the model that tells the class of a text
    heads: Mapping[str, Tensor] = {}  # tensors of heads beside the language model's, by their keys
    advice: str = "convert the model again"  # where it fails
    program: Any = None  # what runs it, while it is loaded
    gpt2: GPT2 | None = None  # our model, while it is loaded, where the side is one
    implementation: str = "gpt2"  # what runs it, with its version
    tokenizer: Tokenizer | None = None  # its own; without one it reads its partner's ids
    files: Mapping[str, Path] = {}  # by name
    size: int | None = None  # bytes of its weights as stored, or in the dtype in which it runs; None where it has no files here
    sides: "Sequence[Side]" = ()  # those of its comparison
    seconds: float = 0.0  # in forward passes
    inputs: int = 0  # tokens that it was run on
    unnamed: float = 0.0  # the sum of what it gave to rows without a token

    @property
    def speed(self) -> float:
        """Tokens a second in forward passes; NaN before the first."""
        return self.inputs / self.seconds if self.seconds else math.nan

    @property
    def n_positions(self) -> int | None:
        """The most tokens that it reads at once."""
        return None if self.config is None else self.config.n_positions

    @property
    def vocab_size(self) -> int | None:
        """The number of its logits for a token, padding included."""
        return None if self.config is None else self.config.vocab_size

    context = property(lambda self: self.n_positions or DEFAULT_CONTEXT)

    def ask(self, call: Callable[[], T], advice: str = "") -> T:
        """Return what another program, or the user's code, answers.

        Raises InputError: it fails, with the ``advice``, by default the side's; or memory does not suffice.
        """
        try:
            return call()
        except (InputError, KeyboardInterrupt):
            raise
        except BaseException as error:  # theirs have no common base: GeneratorExit is no Exception
            if out_of_memory(error):
                advice = "memory does not suffice: choose a smaller model, or a shorter context, as in --on TEXT:context=512"
            raise InputError(f"{self.name}: {error_line(error)}; {advice or self.advice}") from None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.program = self.load(stack)
            self._loaded = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.program = None
        self._loaded.close()

    @abstractmethod
    def load(self, stack: ExitStack) -> Any:
        """Return what runs the side, until the stack is closed."""

    @property
    def text_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that reads its text: its partner's, where it has none."""
        return next((side.tokenizer for side in (self, *self.sides) if side.tokenizer is not None), None)

    @cached_property
    def vocab(self) -> int:
        """The number of its own tokens, without padding; the fewest of any side, where it tells none; 0 where no side does."""
        tokenizer = self.text_tokenizer
        own = (self.vocab_size, None if tokenizer is None else tokenizer.n_vocab), (side.vocab_size for side in self.sides)
        return next((min(told) for sizes in own if (told := [size for size in sizes if size is not None])), 0)

    @property
    def rows_left_out(self) -> dict[str, str]:
        """Say of rows without a token what they take of the probability, where that is 0.1 % or more; {} else."""
        share = self.unnamed / max(1, self.inputs)
        why = f"they take {share:.1%} of its probability in programs that count them; generate leaves them out too"
        return {f"rows of {self.name} without a token": why} if share >= 0.001 else {}

    def weights(self, rows: int, *, mapped: bool = False) -> Read:
        """Return a reader of its parameters, of the tables some ``rows``, before it is loaded; copies, unless ``mapped``."""
        raise NotImplementedError

    @abstractmethod
    def forward(self, ids: Tensor) -> Tensor:
        """Return what the program says after each of ``ids`` (B, T): logits (B, T, V), or log-probabilities."""

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of its own tokens, without rows that have none, and count their time.

        Raises InputError: an id that it does not know; they are hidden states, too few, or not finite.
        """
        if self.vocab and (largest := int(ids.max())) >= self.vocab:
            raise InputError(f"the text holds the id {largest}, and {self.name} knows {self.vocab:,} tokens; leave it out")
        began = time.perf_counter()
        logits = self.forward(ids)
        self.seconds += time.perf_counter() - began
        self.inputs += ids.numel()
        self.require_head(logits.size(-1))
        if logits.size(-1) < self.vocab:
            sizes = f"knows {logits.size(-1):,} tokens and the text's tokenizer {self.vocab:,}"
            several = len(self.sides) > 1
            advice = "use models of one tokenizer, or compare it alone" if several else "use the model's own tokenizer"
            raise InputError(f"{self.name}: {sizes}; {advice}")
        if self.vocab and logits.size(-1) > self.vocab:
            beyond = logits[..., self.vocab :].float().logsumexp(-1)
            self.unnamed += float((beyond - logits.float().logsumexp(-1)).exp().sum())
            logits = logits[..., : self.vocab]
        self.require_finite(logits)
        return logits

    def require_head(self, width: int | None) -> None:
        """Raise InputError if the columns that it gives as logits are as many as the models are wide: hidden states."""
        for config in (each.config for each in self.sides if each.config is not None):
            if width == config.n_embd < config.vocab_size and (self.config is None or self.config.vocab_size != width):
                what = f"{width:,} columns, as wide as the model: hidden states, and no logits over {config.vocab_size:,} tokens"
                how = "export it with the head (logits = x @ wte.T; of ONNX: --task text-generation)"
                raise InputError(f"{self.name}: gives {what}; {how}")

    def require_finite(self, logits: Tensor) -> None:
        """Raise InputError: one is NaN or infinite."""
        if bad := int((~logits.isfinite()).sum()):
            raise InputError(f"{self.name}: {bad:,} logits are not finite numbers, but NaN or infinite; {self.advice}")

    def blocks(self, ids: Tensor) -> Iterator[Recorded]:
        """Yield the activations on (1, T) ``ids`` one block at a time, as :func:`gpt2.measure.tracing.trace_blocks` does."""
        raise NotImplementedError

    def left_out(self, ids: Tensor) -> dict[str, str]:
        """Return the parts of a comparison of (1, T) ``ids`` that turn out not to be shown, each with the reason."""
        return {}

    def describe(self) -> ComparedModel:
        """Return everything needed to run this side again; no file is read yet."""
        config, parameters = (asdict(self.config), self.config.num_parameters()) if self.config else ({}, None)
        stored = self.checkpoint.name if self.checkpoint and self.files else None
        about = self.name, self.implementation, self.stored, self.revision, parameters, config
        return ComparedModel(*about, self.files, stored, self.in_memory)


def environment_of(sides: Iterable[Side]) -> Environment:
    """Return this process's environment, with the dtypes of the sides, and the device where their checkpoints ran."""
    sides = list(sides)
    device = next((side.device for side in sides if side.device.type != "cpu"), "cpu")
    return environment((side.dtype for side in sides if side.dtype is not None), device)
