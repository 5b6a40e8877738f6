"""Names of the faults of training steps: the causes that say each rightly, its stage, and the settings in which it shows."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpt2.port.step.settings import KEYS


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
