"""Training steps that are almost right, and right ones of many kinds, to test `diagnose_step`.

`plain.py` and `functional.py` are right steps, and `faults.toml` has patches of them, one fault each. `right.py` has other right
steps. tests/port/test_steps.py proves, by the independent computation of `reference.py`, that every faulty step ends at other
parameters and every right one at the same.
"""

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
from support.steps.faults import COMBINED, MEANINGS, PATCHES, STAGES, Meaning, Settings

__all__ = [
    "CONFIG",
    "FAULTY_STEPS",
    "MEANINGS",
    "STAGES",
    "STYLES",
    "Settings",
    "Step",
    "WithSettings",
    "module_of",
    "our_model",
]

MakeStep = Callable[[nn.Module], Callable[[Tensor, Tensor], object]]

# Style -> the module that it trains, and its right script.
STYLES = {"plain": "nano", "functional": "vmapped"}
SOURCES = {style: Path(__file__).with_name(f"{style}.py").read_text() for style in STYLES}


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
    """A training step of one style with its faults, as a line of words; an empty line is the style without a fault."""

    style: str
    line: str

    @property
    def name(self) -> str:
        return f"{self.style}: {self.line or 'right'}"

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.line.split())

    @property
    def meanings(self) -> dict[str, Meaning]:
        return {word: MEANINGS[word] for word in self.words}

    @property
    def settings(self) -> Settings:
        settings = Settings()
        for meaning in self.meanings.values():
            settings = settings.changed(meaning.settings)
        return settings

    def module(self) -> nn.Module:
        return module_of(STYLES[self.style])

    @property
    def make_step(self) -> MakeStep:
        return _with_faults(self.style, self.words)["make"](self.settings)


@cache
def _with_faults(style: str, words: tuple[str, ...]) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": style}
    source = patched(SOURCES[style], (patch for word in words for patch in PATCHES[style][word]))
    exec(compile(source, f"{style} with {' '.join(words)}", "exec"), namespace)  # our own text
    return namespace


class WithSettings(Step):
    """A step with settings other than those its faults ask for."""

    def __init__(self, style: str, line: str, settings: Settings) -> None:
        super().__init__(style, line)
        object.__setattr__(self, "given", settings)

    @property
    def settings(self) -> Settings:
        return self.given


FAULTY_STEPS = {step.name: step for style, words in PATCHES.items() for step in (Step(style, word) for word in words)} | {
    step.name: step for step in (Step("plain", line) for line in COMBINED)
}
