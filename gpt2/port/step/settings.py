"""The settings that a training step should have, by the keys of a recipe; what is not given is unknown."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpt2.errors import InputError, did_you_mean
from gpt2.optim import Optim, learning_rate
from gpt2.options import setting

COUNTS = ("steps", "batch_size", "context", "grad_accum")  # 1 or more
WHOLE = (*COUNTS, "optim.warmup")
PROMPT = "data.prompt"
FRACTIONS = ("dropout", "optim.beta1", "optim.beta2")


@dataclass(frozen=True)
class StepSettings:
    """What the user says that the step should do; None where nothing is said. Keys as in a recipe: ``optim.lr`` is ``lr``.

    ``padded``: some targets are -100 and are not to be trained on (the key ``data.prompt``). ``eps`` is AdamW's 1e-8 if any other
    setting of the optimizer is given.
    """

    lr: float | None = None
    min_lr: float | None = None
    warmup: int | None = None
    beta1: float | None = None
    beta2: float | None = None
    weight_decay: float | None = None
    clip: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    context: int | None = None
    grad_accum: int | None = None
    dropout: float | None = None
    padded: bool = False

    @classmethod
    def of(cls, given: Iterable[str] | Mapping[str, object]) -> "StepSettings":
        """Return the settings of ``key=value`` lines, or of a mapping by their keys. Raises InputError: a bad key or value."""
        values = dict(given) if isinstance(given, Mapping) else dict(map(setting, given))
        for key in values.keys() - KEYS:
            hint = did_you_mean(key, KEYS) or f"; keys are {', '.join(KEYS)}"
            raise InputError(f"--set {key}: not a setting of a training step{hint}")
        known: dict[str, Any] = {KEYS[key]: _value(key, value) for key, value in values.items()}
        settings = cls(**known)
        rows, parts = settings.batch_size, settings.grad_accum
        if rows and parts and rows % parts:
            raise InputError(f"--set batch_size={rows}: does not divide into grad_accum {parts} parts")
        return settings

    @property
    def scheduled(self) -> bool:
        """Whether the rate at each step is known: ``optim.lr`` and a part of its schedule are given."""
        return self.lr is not None and (self.warmup, self.min_lr, self.steps) != (None, None, None)

    def rate(self, step: int) -> float:
        """Return the rate at ``step`` (from 0), as a recipe has it; without ``steps`` it does not fall."""
        assert self.lr is not None
        least = self.lr if self.min_lr is None or self.steps is None else self.min_lr
        return learning_rate(step, self.steps or 1, Optim(lr=self.lr, min_lr=least, warmup=self.warmup or 0))


OPTIM = {one.name for one in fields(Optim)}
KEYS = {PROMPT if one == "padded" else f"optim.{one}" if one in OPTIM else one: one for one in StepSettings.__annotations__}


def _value(key: str, value: object) -> float | bool:
    if key == PROMPT:
        return bool(value)
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    least, most, whole = int(key in COUNTS), 1 if key in FRACTIONS else math.inf, key in WHOLE
    if not least <= number < most or (whole and number != int(number)):
        less = " and less than 1" if key in FRACTIONS else ""
        raise InputError(f"--set {key}={value}: give a {'whole ' * whole}number, {least} or more{less}")
    return int(number) if whole else number
