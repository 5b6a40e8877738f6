"""Score LAMBADA: accuracy and perplexity of the last words of passages, with intervals over passages.

:mod:`gpt2.measure.last_words` has the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpt2.comparison.distributions import Bootstrap, Estimate, exp_or_inf
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.last_words import last_word_losses
from gpt2.measure.metrics import Logits


@dataclass(frozen=True)
class LastWord:
    """How well a model guesses the last words of ``n`` passages; intervals hold 95 %, over passages.

    ``losses`` (nats per word) and ``right`` are in the order of the passages.
    """

    accuracy: Estimate
    perplexity: Estimate
    n: int
    context: int
    losses: tuple[float, ...]
    right: tuple[bool, ...]


@dataclass(frozen=True)
class LastWordChange:
    """From a to b, paired by passage: what accuracy gains, and b's perplexity over a's."""

    accuracy: Estimate
    ratio: Estimate


@dataclass(frozen=True)
class LastWords:
    """Two models on the same passages."""

    a: LastWord
    b: LastWord
    change: LastWordChange


def score_last_words(
    model: Logits,
    tokenizer: Tokenizer,
    passages: Sequence[str],
    *,
    context: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> LastWord:
    """Accuracy and perplexity of the last words of ``passages``; arguments and errors as of ``last_word_losses``."""
    losses, right = last_word_losses(model, tokenizer, passages, context=context, progress=progress)
    bootstrap = Bootstrap(len(passages), seed)
    return LastWord(
        bootstrap.fraction(right),
        bootstrap.interval(exp_or_inf(losses.mean().item()), bootstrap.means(losses).exp()),
        len(passages),
        context,
        tuple(losses.tolist()),
        tuple(right.tolist()),
    )


def last_words_change(a: LastWord, b: LastWord, *, seed: int = 0) -> LastWordChange:
    """Compare two models' scores on the same passages."""
    if a.n != b.n:
        raise InputError(f"one model was scored on {a.n} passages, the other on {b.n}; score both on the same passages")
    bootstrap = Bootstrap(a.n, seed)
    gained = torch.tensor(b.right).double() - torch.tensor(a.right).double()
    lost = torch.tensor(b.losses, dtype=torch.float64) - torch.tensor(a.losses, dtype=torch.float64)
    return LastWordChange(bootstrap.mean(gained), bootstrap.interval(exp_or_inf(lost.mean().item()), bootstrap.means(lost).exp()))
