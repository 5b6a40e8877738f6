"""Training steps that are almost right, and right ones of many kinds, to test `diagnose_step`.

`plain.py` is a right step, and `faults.toml` has patches of it, one fault each. `right.py` has other right steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.model import GPT2
from support.faulty import CONFIG
from support.patches import patched
from support.ports import PORTS
from support.random_models import random_model
from support.steps.faults import COMBINED, MEANINGS, Meaning, Settings

__all__ = ["CONFIG", "FAULTY_STEPS", "MEANINGS", "MakeStep", "Settings", "Step", "module_of", "our_model"]

MakeStep = Callable[[nn.Module], Callable[[Tensor, Tensor], object]]
SOURCE = Path(__file__).with_name("plain.py").read_text()


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
