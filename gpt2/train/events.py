"""Events that a run reports to its listener; the command line renders them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpt2.config import GPT2Config
from gpt2.measure.metrics import LanguageScore
from gpt2.train.bigram import BigramConfig
from gpt2.train.recipe import Recipe


@dataclass(frozen=True)
class Started:
    """Reported once, before the first step."""

    recipe: Recipe
    config: GPT2Config | BigramConfig
    train_tokens: int
    val_tokens: int
    step: int
    memory: int = 0  # bytes, an estimate of the peak
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Estimated:
    """Reported once, after a few steps: the seconds left, evaluations included."""

    step: int
    seconds_left: float


@dataclass(frozen=True)
class Diverged:
    """A diverged step, which changed no weights; ``action`` is "stop", "skip" or "rewind"."""

    step: int
    why: str
    action: str


@dataclass(frozen=True)
class Logged:
    """A logged step; ``loss`` is of this step's batch, in nats per token; ``seconds_left`` is an estimate.

    ``mfu`` is the share of the measured GEMM rate that the step reaches (:mod:`gpt2.train.speed`), 0 where it was not measured.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds_left: float
    mfu: float = 0.0


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: the score of the validation text, and a sample that the model generated."""

    step: int
    val: LanguageScore
    best: bool
    sample: str = ""
    warning: str = ""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    best_loss: float
    best_step: int
    stopped: str  # "finished", "early" or "interrupted"


Event = Started | Logged | Evaluated | Estimated | Diverged
Listener = Callable[[Event], None]
