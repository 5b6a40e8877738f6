"""LAMBADA: guess the last word of a passage, which nobody guesses from its last sentence alone.

The protocol is that of lm-evaluation-harness (0.4; tasks/lambada/lambada_openai.yaml, ``_encode_pair`` in api/model.py), which
most published figures follow: the word counts with the space before it, from the whole passage's tokens; a passage longer than
the context loses its beginning; a word is right where each of its tokens is the likeliest one; perplexity is per word, not per
token. The GPT-2 paper's own figures are of another protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gpt2.comparison.distributions import Bootstrap, Estimate
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.metrics import Logits, token_losses

BATCH = 1024  # tokens that are run together: 200 MB of logits over GPT-2's vocabulary


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


@torch.inference_mode()
def score_last_words(
    model: Logits,
    tokenizer: Tokenizer,
    passages: Sequence[str],
    *,
    context: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> LastWord:
    """Score the last word of each passage, what stands behind its last space; ``context`` is how many tokens the model reads.

    Raises:
        InputError: no passages, one that is a single word where there is no end-of-text token to predict it from, or a word of
            more tokens than the context.
    """
    if not passages:
        raise InputError("there are no passages to score the last words of; give at least one")
    pairs = [_encode(tokenizer, passage, i, context) for i, passage in enumerate(passages)]
    losses, right, done = torch.zeros(len(pairs), dtype=torch.float64), torch.zeros(len(pairs), dtype=torch.bool), 0
    for batch in _batches([len(ids) - 1 for ids, _ in pairs]):
        width = len(pairs[batch[0]][0]) - 1  # the longest comes first
        inputs = torch.zeros(len(batch), width, dtype=torch.long)  # what stands behind a passage cannot be seen from it
        for row, i in enumerate(batch):
            inputs[row, : len(pairs[i][0]) - 1] = torch.tensor(pairs[i][0][:-1])
        logits = model(inputs)  # (B, T, V)
        for row, i in enumerate(batch):
            ids, word = pairs[i]
            targets = torch.tensor(ids[-word:], device=logits.device)
            told = logits[row, len(ids) - 1 - word : len(ids) - 1]  # (word, V)
            losses[i] = token_losses(told[None], targets[None]).sum(dtype=torch.float64)
            right[i] = bool((told.argmax(-1) == targets).all())
        del logits
        done += len(batch)
        progress(f"last words: {done:,} of {len(pairs):,} passages")
    bootstrap = Bootstrap(len(pairs), seed)
    return LastWord(
        bootstrap.fraction(right),
        bootstrap.interval(_exp(losses.mean().item()), bootstrap.means(losses).exp()),
        len(pairs),
        context,
        tuple(losses.tolist()),
        tuple(right.tolist()),
    )


def last_words_change(a: LastWord, b: LastWord, *, seed: int = 0) -> LastWordChange:
    """Two models on the same passages."""
    if a.n != b.n:
        raise InputError(f"{a.n} passages and {b.n} cannot be compared one by one; score both models on the same")
    bootstrap = Bootstrap(a.n, seed)
    gained = torch.tensor(b.right).double() - torch.tensor(a.right).double()
    lost = torch.tensor(b.losses, dtype=torch.float64) - torch.tensor(a.losses, dtype=torch.float64)
    return LastWordChange(bootstrap.mean(gained), bootstrap.interval(_exp(lost.mean().item()), bootstrap.means(lost).exp()))


def _encode(tokenizer: Tokenizer, passage: str, number: int, context: int) -> tuple[list[int], int]:
    """The ids of a passage, as many as the model can read and one more, and how many of them are the last word's."""
    before, _, word = passage.rpartition(" ")
    before = before.rstrip()  # further spaces belong to the word
    ids = tokenizer.encode(passage if before else f" {word}")
    length = len(ids)
    if before:
        length -= len(tokenizer.encode(before))
    elif tokenizer.eot is not None:
        ids.insert(0, tokenizer.eot)
    else:
        raise InputError(f"passage {number} is the word {word[:40]!r} alone; give passages of two words or more")
    if not 0 < length <= context:
        raise InputError(f"passage {number}: its last word {word[:40]!r} is {length} tokens, not 1 .. {context}; leave it out")
    return ids[-(context + 1) :], length


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Indices, the longest first, as many together as make :data:`BATCH` tokens with what pads them."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > BATCH:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _exp(x: float) -> float:
    return math.inf if x >= 700 else math.exp(x)  # NaN stays NaN
