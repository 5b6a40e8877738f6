"""The settings that a training step should have, by the keys of a recipe; what is not given is unknown."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpt2.errors import InputError

OPTIM = ("lr", "min_lr", "warmup", "beta1", "beta2", "weight_decay", "clip")
COUNTS = ("steps", "batch_size", "context", "grad_accum")  # 1 or more
WHOLE = (*COUNTS, "optim.warmup")
FRACTIONS = ("dropout", "optim.beta1", "optim.beta2")


@dataclass(frozen=True)
class Settings:
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
    def parse(cls, lines: Iterable[str]) -> Settings:
        """Parse ``key=value`` lines, as in ``optim.lr=3e-4``; raise InputError for an unknown key or a bad value."""
        values: dict[str, object] = {}
        for line in lines:
            key, sign, text = (part.strip() for part in line.partition("="))
            if not sign or not key:
                raise InputError(f"--set {line}: write key=value, as in optim.lr=3e-4")
            values[key] = text
        return cls.of(values)

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Settings:
        """Return the settings of a mapping from a recipe's keys to values, as numbers or text."""
        known: dict[str, Any] = {}
        for key, value in values.items():
            if key == "data.prompt":
                known["padded"] = bool(value)
            elif key in KEYS:
                known[KEYS[key]] = _number(key, value)
            else:
                close = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}?" if close else f"keys are {', '.join(KEYS)}"
                raise InputError(f"--set {key}: not a setting of a training step; {hint}")
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
        """Return the rate at ``step`` (from 0): linear warm-up to ``lr``, then cosine decay to ``min_lr``, as a recipe says."""
        assert self.lr is not None
        warmup, least = self.warmup or 0, self.lr if self.min_lr is None else self.min_lr
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.steps is None:
            return self.lr
        part = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return least + (1 + math.cos(math.pi * part)) / 2 * (self.lr - least)


KEYS = {f"optim.{one.name}" if one.name in OPTIM else one.name: one.name for one in fields(Settings) if one.name != "padded"}


def _number(key: str, value: object) -> float | int:
    said = f"--set {key}={value}: give"
    try:
        number = float(str(value))
    except ValueError:
        raise InputError(f"{said} a number") from None
    least, most = int(key in COUNTS), 1 if key in FRACTIONS else math.inf
    if not least <= number < most:
        raise InputError(f"{said} {least} or more{' and less than 1' if key in FRACTIONS else ''}")
    if key not in WHOLE:
        return number
    if number != int(number):
        raise InputError(f"{said} a whole number")
    return int(number)
