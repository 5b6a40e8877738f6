"""Training steps that are almost right, and right ones of many kinds, to test `diagnose_step`.

`plain.py` is a right step, and `faults.toml` has patches of it, one fault each. `right.py` has other right steps.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.model import GPT2
from gpt2.port.step.settings import KEYS
from support.faulty import CONFIG
from support.patches import patched
from support.ports import PORTS
from support.random_models import random_model

__all__ = ["CONFIG", "FAULTY_STEPS", "MEANINGS", "SCHEDULE", "MakeStep", "Settings", "Step", "module_of", "our_model"]

MakeStep = Callable[[nn.Module], Callable[[Tensor, Tensor], object]]
SOURCE = Path(__file__).with_name("plain.py").read_text()


@dataclass(frozen=True)
class Settings:
    """What a step should do, in a recipe's keys: the rate follows warm-up and cosine, decay is on matrices and embeddings.

    With ``padded`` some targets are -100, and are not trained on.
    """

    lr: float = 1e-3
    min_lr: float = 1e-3
    warmup: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    steps: int = 1000
    batch_size: int = 4
    grad_accum: int = 1
    context: int = 8
    dropout: float = 0.0
    padded: str = ""

    def overrides(self) -> tuple[str, ...]:
        """All of them as the command line takes them: ``optim.lr=0.001``."""
        return tuple(f"{key}={getattr(self, name)}" for key, name in KEYS.items())

    def changed(self, changes: Mapping[str, float | str]) -> Settings:
        return replace(self, **changes)


@dataclass(frozen=True)
class Meaning:
    """The meaning of a fault's name.

    ``ids`` are the causes that describe it, the best first; ``implied`` are causes that follow from it and are true as well: what
    an optimizer lacks, its zero_grad leaves alone. ``settings`` are those in which it shows. ``patches``: old and new texts, by
    which the right step of ``plain.py`` gets it.
    """

    stage: str
    ids: tuple[str, ...]
    settings: Mapping[str, float | str] = field(default_factory=dict)
    implied: tuple[str, ...] = ()
    patches: tuple[tuple[str, str], ...] = ()


SCHEDULE = {"warmup": 3, "steps": 12, "min_lr": 1e-4}
PREPARED = "        model.train()\n"  # where plain.py prepares the model

_FOUND = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
COMBINED: list[str] = _FOUND.pop("combined")["lines"]


def _meaning(stage: str, ids: str, patch: Sequence[str] = (), prepare: str = "", implied: str = "", **settings: Any) -> Meaning:
    patches = [*zip(patch[::2], patch[1::2], strict=True), *([(PREPARED, f"{PREPARED}        {prepare}\n")] if prepare else [])]
    shows = SCHEDULE if "schedule" in settings else settings
    return Meaning(stage, tuple(ids.split()), shows, tuple(implied.split()), tuple(patches))


MEANINGS = {word: _meaning(stage, **row) for stage, rows in _FOUND.items() for word, row in rows.items()}


@cache
def _ours() -> GPT2:
    return random_model(CONFIG, 0.2, 0.1, dtype=torch.float32, seed=5)


def our_model() -> GPT2:
    """A model of random weights, in float32 and eval mode."""
    return copy.deepcopy(_ours())


def module_of(kind: str) -> nn.Module:
    """The module ``kind`` ("ours", or a name of PORTS) with the weights of :func:`our_model`, without dropout."""
    if kind == "ours":
        module: nn.Module = our_model()
    else:
        module = PORTS[kind].build(CONFIG).float()
        PORTS[kind].fill(module, our_model().state_dict())
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "attn_pdrop"):  # floats, of attention weights
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module


@dataclass(frozen=True)
class Step:
    """The step of `plain.py` with its faults, as a line of words; an empty line is the right one.

    ``given``: settings in place of those that the faults ask for.
    """

    line: str
    given: Settings | None = None

    @property
    def meanings(self) -> dict[str, Meaning]:
        return {word: MEANINGS[word] for word in self.line.split()}

    @property
    def settings(self) -> Settings:
        settings = Settings()
        for meaning in self.meanings.values():
            settings = settings.changed(meaning.settings)
        return self.given or settings

    def module(self) -> nn.Module:
        return module_of("nano")

    @property
    def make_step(self) -> MakeStep:
        return _with_faults(self.line)["make"](self.settings)


@cache
def _with_faults(line: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "plain"}
    source = patched(SOURCE, (patch for word in line.split() for patch in MEANINGS[word].patches))
    exec(compile(source, f"plain with {line}", "exec"), namespace)  # our own text
    return namespace


FAULTY_STEPS = {line: Step(line) for line in (*MEANINGS, *COMBINED)}
