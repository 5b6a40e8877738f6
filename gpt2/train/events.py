"""What a run tells whoever listens, as it happens: plain facts, rendered elsewhere."""

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
    """Told once, before the first step."""

    recipe: Recipe
    config: GPT2Config | BigramConfig
    train_tokens: int
    val_tokens: int
    step: int
    memory: int = 0  # bytes, an estimate of the peak
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Estimated:
    """Told once, after the first :data:`ESTIMATE_AFTER` steps: how long the rest will take, evaluations and all."""

    step: int
    seconds_left: float


@dataclass(frozen=True)
class Diverged:
    """A step that never reached the weights, and what the recipe's ``on_divergence`` made of it."""

    step: int
    why: str
    action: str


@dataclass(frozen=True)
class Logged:
    """A logged step; ``seconds_left`` is an estimate. ``loss`` is the training loss of this step's batch, nats per token; ``mfu``
    the share of the measured speed of matrix products that the step makes of it (:mod:`gpt2.train.speed`), 0 where none was.
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
    """The whole validation text scored, and a sample of what the model now writes."""

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


Listener = Callable[[Started | Logged | Evaluated | Estimated | Diverged], None]
