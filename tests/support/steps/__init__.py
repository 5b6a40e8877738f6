"""Training steps: `plain.py` is right, `faults.toml` has one fault each for it, and `right.py` has other right ones."""

import copy
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.model import GPT2
from gpt2.port.step.settings import KEYS, StepSettings
from support.faulty import TWO as CONFIG
from support.patches import patched
from support.ports import PORTS
from support.random_models import random_model

MakeStep = Callable[[nn.Module], Callable[[Tensor, Tensor], object]]
SOURCE = Path(__file__).with_name("plain.py").read_text()
SETTINGS = StepSettings(
    lr=1e-3, min_lr=1e-3, warmup=0, beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0, steps=1000, batch_size=4, context=8,
    grad_accum=1, dropout=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Meaning:
    """The meaning of a fault's name.

    ``ids`` are the causes that describe it, the best first; ``implied`` are causes that follow from it and are true as well: what
    an optimizer lacks, its zero_grad leaves alone. ``settings`` are those in which it shows. ``patches``: old and new texts, by
    which the right step of ``plain.py`` gets it.
    """

    ids: tuple[str, ...]
    settings: Mapping[str, float | str] = field(default_factory=dict)
    implied: tuple[str, ...] = ()
    patches: tuple[tuple[str, str], ...] = ()


SCHEDULE = {"warmup": 3, "steps": 12, "min_lr": 1e-4}
PREPARED = "        model.train()\n"  # where plain.py prepares the model

_FOUND = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
COMBINED: list[str] = _FOUND.pop("combined")["lines"]
_ROWS = zip_longest([*_FOUND["loss"], *_FOUND["gradient"]], _FOUND["update"], _FOUND["clip"], fillvalue="")
COMBINED += [" ".join(row).strip() for row in _ROWS]  # each fault once, beside those of other stages


def _meaning(ids: str, patch: Sequence[str] = (), prepare: str = "", implied: str = "", **settings: Any) -> Meaning:
    patches = [*zip(patch[::2], patch[1::2], strict=True), *([(PREPARED, f"{PREPARED}        {prepare}\n")] if prepare else [])]
    shows = SCHEDULE if "schedule" in settings else settings
    return Meaning(tuple(ids.split()), shows, tuple(implied.split()), tuple(patches))


MEANINGS = {word: _meaning(**row) for rows in _FOUND.values() for word, row in rows.items()}


@cache
def right_model(layers: int = 2) -> GPT2:
    """The model that every step is compared with: random weights, in float32 and eval mode. Who trains it takes a copy."""
    return random_model(replace(CONFIG, n_layer=layers), 0.2, 0.1, dtype=torch.float32, seed=5)


def module_of(kind: str, layers: int = 2) -> nn.Module:
    """The module ``kind`` ("ours", or a name of PORTS, of two layers) with :func:`right_model`'s weights, without dropout."""
    if kind == "ours":
        module: nn.Module = copy.deepcopy(right_model(layers))
    else:
        module = PORTS[kind].build(CONFIG).float()
        PORTS[kind].fill(module, right_model().state_dict())
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "attn_pdrop"):  # floats, of attention weights
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module


@dataclass(frozen=True)
class Step:
    """What ``make`` makes of its settings, and a module of this kind. ``meanings``: its faults, by name; none of a right step."""

    make: Callable[[StepSettings], MakeStep]
    kind: str = "nano"
    settings: StepSettings = SETTINGS
    meanings: Mapping[str, Meaning] = field(default_factory=dict)
    slow: bool = False

    @property
    def make_step(self) -> MakeStep:
        return self.make(self.settings)

    @property
    def given(self) -> dict[str, Any]:
        """All settings, by a recipe's keys."""
        return {key: getattr(self.settings, name) for key, name in KEYS.items()}

    def module(self) -> nn.Module:
        return module_of(self.kind)


@cache
def _with_faults(line: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "plain"}
    source = patched(SOURCE, (patch for word in line.split() for patch in MEANINGS[word].patches))
    exec(compile(source, f"plain with {line}", "exec"), namespace)  # our own text
    return namespace


def made_with(line: str, settings: StepSettings) -> MakeStep:
    """Return what `plain.py` makes with these faults, a line of words; an empty line is the right one."""
    made: MakeStep = _with_faults(line)["make"](settings)
    return made


def _faulty(line: str) -> Step:
    meanings = {word: MEANINGS[word] for word in line.split()}
    shows = {key: value for meaning in meanings.values() for key, value in meaning.settings.items()}
    return Step(partial(made_with, line), settings=replace(SETTINGS, **shows), meanings=meanings)


FAULTY_STEPS = {line: _faulty(line) for line in (*MEANINGS, *COMBINED)}
