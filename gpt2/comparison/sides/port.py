"""``FILE.py:build``: somebody else's GPT-2 in PyTorch, built by a function in the user's file, as for ``gpt2 diagnose``."""

import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import Checkpoint
from gpt2.checkpoint.containers import listed
from gpt2.checkpoint.files import open_weights
from gpt2.checkpoint.keys import WRAPPERS
from gpt2.checkpoint.saving import save_official
from gpt2.comparison.sides.side import Side, T
from gpt2.damage import look
from gpt2.errors import InputError
from gpt2.measure.tracing import Recorded, grouped, part_of, points, trace_by_name
from gpt2.measure.user_code import Target, builder, function_of, logits_of, module_of
from gpt2.port.mapping.checkpoint import ModuleCheckpoint, checkpoint_of


@dataclass(eq=False)
class PortSide(Side):
    """A user's module; ``build`` may take the folder of the checkpoint ``beside`` it. Names tell which activations it shows."""

    name: str
    target: Target
    shows = frozenset({"logits", "activations"})

    files = property(lambda self: {self.target.path.name: self.target.path})
    implementation = property(lambda self: f"{self.target.path.name}, torch {version('torch')}")
    advice = property(lambda self: f"gpt2 diagnose {self.name} finds out why")
    beside = property(lambda self: next((side.checkpoint for side in self.sides if side.checkpoint), None))

    def load(self, stack: ExitStack) -> nn.Module:
        stack.callback(setattr, sys, "argv", sys.argv)  # changed for the user's file, which may import its neighbours late
        stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(redirect_stdout(sys.stderr))  # its prints must not end up in a report
        return self.ask(lambda: self._build(folder))

    def _build(self, folder: Path) -> nn.Module:
        path, name = self.target.path, self.target.name
        advice = f"the file does not import; mend it (python {path.name} shows where it fails)"
        build, takes_directory = builder(self.ask(lambda: function_of(path, name), advice), path, name)
        module = module_of(build(self._folder(folder)) if takes_directory else build(), self.target).eval()
        if damage := look((n, p) for n, p in module.named_parameters() if p.requires_grad).damage:  # others may be a mask of -inf
            raise InputError(f"{self.name}: holds {damage}; look where its weights come from")
        return module

    def _folder(self, temporary: Path) -> str:
        if self.beside is None:
            call = f"{self.name}: {self.target.name}() takes a checkpoint's folder"
            raise InputError(f"{call}; compare it with a MODEL, or write a function of nothing that loads your own weights")
        path = getattr(self.beside, "path", temporary)
        if not (path / "config.json").is_file():
            tokenizer = next(side.tokenizer for side in self.sides if side.checkpoint is self.beside)
            path = save_official(self.beside.load(), tokenizer, temporary / "checkpoint")
        return str(path)

    def held(self) -> ModuleCheckpoint:
        """Read the loaded module as a checkpoint. Raises InputError: it is no GPT-2."""
        return self.ask(lambda: checkpoint_of(self.program, self.name))

    def fill(self, path: Path) -> None:
        """Load the tensors of a file or folder into the module by its own names. Raises InputError: they do not fit."""
        files, own = open_weights(path), self.program.state_dict()
        names = {key: _ending(WRAPPERS.sub("", key), own) for key in files}
        stored = {name: files[key].read(key) for key, name in names.items() if name is not None}
        filled = {own[name].data_ptr() for name in stored}  # a tied tensor has two names, and may be stored once
        faults = {
            "unknown": [key for key, name in names.items() if name is None],
            "missing": [name for name, p in self.program.named_parameters() if name not in stored and p.data_ptr() not in filled],
            "misshapen": [name for name, tensor in stored.items() if tensor.shape != own[name].shape],
        }
        if problems := "; ".join(f"{what}: {listed(some)}" for what, some in faults.items() if some):
            raise InputError(f"{path}: does not fit {self.name}: {problems}; give the module that it was saved from")
        self.program.load_state_dict(stored, strict=False)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self._asked(ids, lambda ids: logits_of(self.program(ids), ids)).cpu()
        if logits.shape[:2] != ids.shape:
            raise InputError(f"{self.name}: returned logits {tuple(logits.shape)} for {tuple(ids.shape)} ids; one row each")
        return logits

    def _asked(self, ids: Tensor, ask: Callable[[Tensor], T]) -> T:
        """Call the user's module, where its parameters are."""
        device = next((tensor.device for tensor in self.program.parameters()), torch.device("cpu"))
        return self.ask(lambda: ask(ids.to(device)))

    def _traced(self, ids: Tensor, checkpoint: Checkpoint) -> Recorded:
        """Return the activations on (1, T) ``ids``, and the logits."""
        found = self._asked(ids, lambda ids: trace_by_name(self.program, ids, checkpoint.config))
        return {**found, "logits": self.forward(ids)} if found else {}

    def left_out(self, ids: Tensor) -> dict[str, str]:
        name, checkpoint = self.name, self.beside
        if checkpoint is None:
            return {"activations": f"{name}: the points of a port are known only beside a MODEL"}
        layers = checkpoint.config.n_layer
        if not (found := self._traced(ids, checkpoint)):
            return {"activations": f"{name}: no list of {layers} blocks that return the stream; gpt2 diagnose finds its points"}
        missing = dict.fromkeys(part_of(point) for point in points(layers) if point not in found)
        return {f"activations at {', '.join(missing)}": f"no module of {name} has that name"} if missing else {}

    def blocks(self, ids: Tensor) -> Iterator[Recorded]:
        yield from grouped(self._traced(ids, self.beside)) if self.beside else ()


def _ending(key: str, names: Container[str]) -> str | None:
    """Return the longest end of a dotted ``key`` among the ``names``: a trainer's module may stand around the author's."""
    parts = key.split(".")
    return next((name for start in range(len(parts)) if (name := ".".join(parts[start:])) in names), None)
