"""What is compared: a model as it was run, the text that it was scored on, and two runs' errors; and what a gate says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from gpt2.checkpoint.cache import Official


@dataclass(frozen=True)
class Model:
    """One of the models, with everything needed to run it again; ``files`` are name -> sha256."""

    name: str
    implementation: str  # "gpt2" or "transformers 5.23.0"
    dtype: str  # "" where the side does not tell it
    revision: str | None
    parameters: int | None  # None where the side does not tell them
    config: dict[str, Any]  # empty where the side does not tell it
    files: dict[str, str]
    official: Official | None = None


@dataclass(frozen=True)
class Scored:
    """The scored text: ``sha256`` of the whole text, and the number of ``tokens`` used from its beginning."""

    name: str
    sha256: str
    tokens: int
    context: int
    stride: int
    told: str  # the protocol in words


@dataclass(frozen=True)
class Numerics:
    """Rounding errors of two runs of the same weights, measured against a float64 run of our model.

    ``points`` are (traced point, relative error of a, relative error of b). ``logits`` are (description, relative error) for
    our model with fused and with eager attention, in each side's dtype.
    """

    points: tuple[tuple[str, float, float], ...]
    logits: tuple[tuple[str, float], ...]


class Verdict(Protocol):
    """What a gate of ``--fail-if`` says of a comparison (:class:`gpt2.comparison.gates.Judgement`)."""

    @property
    def verdict(self) -> str: ...
