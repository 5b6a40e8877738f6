"""Training steps that are almost right, and right ones of many kinds, to test `diagnose_step`.

`plain.py` is a right step, and `faults.toml` has patches of it, one fault each. The other styles are files with
`make(has, settings)`, which returns its author's `make_step(model)`; `has` is the set of its faults. `right.py` has the steps
without a fault. tests/port/test_steps.py proves, by the independent computation of `reference.py`, that every faulty step ends
at other parameters and every right one at the same.
"""

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.model import GPT2
from support.faulty import CONFIG
from support.ports import PORTS
from support.random_models import random_model
from support.steps.faults import COMBINED, MEANINGS, STAGES, Meaning, Settings, patched

__all__ = [
    "COMBINED",
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
PLAIN = Path(__file__).with_name("plain.py").read_text()

# Style -> the module that it trains, and what it is.
STYLES = {"plain": ("nano", "a right script; its faults are patches of it, in faults.toml")}


# The second set: written apart from the engine, and not used to develop it.
SECOND = {"functional": ("vmapped", "pure functions, explicit state, gradients by torch.func")}
# The third set: written after the engine was mended on the second, run once before anything was mended on it.
THIRD = {
    "callbacks": ("ours", "a trainer class with callbacks, gradient hooks, AdamW called with a closure"),
    "closures": ("ours", "an optimizer of two functions, gradients by torch.autograd.grad"),
}


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
        return module_of(kind_of(self.style))

    @property
    def make_step(self) -> MakeStep:
        if self.style in STYLES:
            return _plain(self.words)["make"](self.settings)
        return importlib.import_module(f"{__name__}.{self.style}").make(frozenset(self.words), self.settings)


def patches_of(names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [patch for name in names for patch in MEANINGS[name].patches]


@cache
def _plain(names: tuple[str, ...]) -> dict[str, Any]:
    source, namespace = patched(PLAIN, patches_of(names)), {"__name__": "plain"}
    assert source is not None, f"the patches of {names} do not apply"
    exec(compile(source, f"plain with {' '.join(names)}", "exec"), namespace)  # our own text
    return namespace


class WithSettings(Step):
    """A step with settings other than those its faults ask for."""

    def __init__(self, style: str, line: str, settings: Settings) -> None:
        super().__init__(style, line)
        object.__setattr__(self, "given", settings)

    @property
    def settings(self) -> Settings:
        return self.given


def kind_of(style: str) -> str:
    """The module that a style trains."""
    return (STYLES | SECOND | THIRD)[style][0]


def words_of(style: str) -> list[str]:
    """The faults that a style can have."""
    if style in STYLES:
        return [name for name, meaning in MEANINGS.items() if meaning.patches]
    return importlib.import_module(f"{__name__}.{style}").WORDS


def _steps(styles: dict[str, tuple[str, str]]) -> dict[str, Step]:
    steps = (Step(style, line) for style in styles for line in (*words_of(style), *COMBINED[style]))
    return {step.name: step for step in steps}


FAULTY_STEPS, SECOND_STEPS, THIRD_STEPS = (_steps(styles) for styles in (STYLES, SECOND, THIRD))
