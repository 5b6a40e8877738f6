"""``FILE.py:build``: somebody else's GPT-2 in PyTorch, built by a function in the user's file, as for ``gpt2 diagnose``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import Checkpoint
from gpt2.checkpoint.saving import save, sha256
from gpt2.comparison.results import Model
from gpt2.comparison.sides.side import Running, Shown, Side
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.tracing import Recorded, grouped, part_of, points, trace_by_name
from gpt2.measure.user_code import Target, builder, error_line, function_of, logits_of, target

T = TypeVar("T")


@dataclass(frozen=True)
class PortSide(Side):
    """A user's module; ``checkpoint`` is its partner's, whose folder ``build`` gets if it takes one.

    It shows logits, and beside a MODEL the activations that its modules' names tell; ``gpt2 diagnose`` finds the others.
    """

    name: str
    target: Target
    checkpoint: Checkpoint | None
    shows = frozenset({Shown.LOGITS, Shown.ACTIVATIONS})

    @classmethod
    def open(cls, name: str, checkpoint: Checkpoint | None) -> PortSide:
        return cls(name, target(name), checkpoint)

    def tokenizer(self) -> Tokenizer | None:
        """A module has none, so it reads its partner's ids."""
        return None

    def describe(self, versions: dict[str, str]) -> Model:
        file = self.target.path
        return Model(self.name, f"{file.name}, torch {versions['torch']}", "", None, None, {}, {file.name: sha256(file)})

    @contextmanager
    def running(self) -> Iterator[Running]:
        argv, path = sys.argv, list(sys.path)
        try:
            with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # its prints must not end up in a report
                yield RunningPort(self._build(Path(folder)), self.name, self.checkpoint)
        finally:  # changed for the user's file, which may import its neighbours as late as in a forward pass
            sys.argv, sys.path[:] = argv, path

    def _build(self, folder: Path) -> nn.Module:
        file, name = self.target.path, self.target.name
        try:
            build, takes_directory = builder(function_of(file, name), file, name)
            module = build(self._folder(folder)) if takes_directory else build()
        except InputError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise InputError(f"{self.name}: {error_line(error)}; gpt2 diagnose {self.name} finds out why") from None
        if not isinstance(module, nn.Module):
            raise InputError(f"{self.name}: {name}() returned {type(module).__name__}; return the torch.nn.Module")
        return module.eval()

    def _folder(self, temporary: Path) -> str:
        if self.checkpoint is None:
            raise InputError(f"{self.name}: {self.target.name}() takes a checkpoint's folder; compare it with a MODEL")
        path = getattr(self.checkpoint, "path", None)
        if isinstance(path, Path) and (path / "config.json").is_file():
            return str(path)
        return str(save(self.checkpoint.load(), self.checkpoint.own_tokenizer(), temporary / "checkpoint"))


@dataclass(frozen=True)
class RunningPort(Running):
    module: nn.Module
    name: str
    checkpoint: Checkpoint | None  # the partner's

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self._asked(ids, lambda ids: logits_of(self.module(ids), ids)).cpu()
        if logits.shape[:2] != ids.shape:
            shape = tuple(logits.shape)
            raise InputError(f"{self.name}: returned logits of shape {shape} for {tuple(ids.shape)} ids; return one row each")
        return logits

    def _asked(self, ids: Tensor, ask: Callable[[Tensor], T]) -> T:
        """Call the user's module, where its parameters are."""
        device = next((tensor.device for tensor in self.module.parameters()), torch.device("cpu"))
        try:
            return ask(ids.to(device))
        except Exception as error:  # the user's module may raise anything
            raise InputError(f"{self.name}: {error_line(error)}; gpt2 diagnose {self.name} finds out why") from None

    def _traced(self, ids: Tensor) -> Recorded:
        """Return the activations on (1, T) ``ids``, and the logits."""
        if self.checkpoint is None:
            return {}
        config = self.checkpoint.config
        found = self._asked(ids, lambda ids: trace_by_name(self.module, ids, config))
        return {**found, "logits": self.logits(ids)} if found else {}

    def left_out(self, ids: Tensor) -> dict[str, str]:
        if self.checkpoint is None:
            return {"activations": f"{self.name}: the points of a port are known only beside a MODEL"}
        layers = self.checkpoint.config.n_layer
        if not (found := self._traced(ids)):
            return {
                "activations": f"{self.name}: no list of {layers} blocks that return the stream; gpt2 diagnose finds its points"
            }
        missing = dict.fromkeys(part_of(name) for name in points(layers) if name not in found)
        return {f"activations at {', '.join(missing)}": f"no module of {self.name} has that name"} if missing else {}

    def blocks(self, ids: Tensor) -> Iterator[Recorded]:
        return grouped(self._traced(ids))
