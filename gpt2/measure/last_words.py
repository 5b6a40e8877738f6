"""Score the last word of each passage: its loss in nats, and whether the model predicts it.

As in lm-evaluation-harness (0.4; tasks/lambada/lambada_openai.yaml, ``_encode_pair`` in api/model.py), which most published
numbers use: the word includes the space before it, within the passage's own tokens; a passage longer than the context loses its
beginning; a word is correct if each of its tokens is the likeliest one; perplexity is per word. The GPT-2 paper's differs.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.metrics import Logits, Progress, exp_or_inf, silent, token_losses

BATCH = 1024  # tokens per batch: 200 MB of logits over GPT-2's vocabulary
Rows = Sequence[tuple[list[int], int]]  # ids, and how many tokens at their end are to be predicted


@dataclass(frozen=True)
class LastWord:
    """How well a model predicts the last words of ``n`` passages; 95 % intervals over passages, losses in nats per word."""

    accuracy: Estimate
    perplexity: Estimate
    n: int
    context: int
    losses: tuple[float, ...]
    right: tuple[bool, ...]


@dataclass(frozen=True)
class LastWordChange:
    """The change from a to b, paired by passage: accuracy's difference, and b's perplexity over a's."""

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
    model: Logits, tokenizer: Tokenizer, passages: Sequence[str], *, context: int, seed: int = 0, progress: Progress = silent
) -> LastWord:
    """Return accuracy and perplexity of each passage's last word, the text after its last space; ``context`` is in tokens.

    Raises InputError: a single word without an end-of-text token to predict it from, or a word beyond the context.
    """
    pairs = [_encode(tokenizer, passage, i, context) for i, passage in enumerate(passages)]
    what = "last words", "passages"
    return score_pairs(model, pairs, Bootstrap(len(pairs), seed), what, context=context, progress=progress)


@torch.inference_mode()
def score_pairs(
    model: Logits, pairs: Rows, bootstrap: Bootstrap, what: tuple[str, str], *, context: int, progress: Progress
) -> LastWord:
    """Return how well a model predicts the last tokens of each row; ``what`` names them, and the rows."""
    losses, right, done = torch.zeros(len(pairs), dtype=torch.float64), torch.zeros(len(pairs), dtype=torch.bool), 0
    for batch in batches([len(ids) - 1 for ids, _ in pairs]):
        for i, (loss, likeliest) in zip(batch, score_targets(model, [pairs[i] for i in batch]), strict=True):
            losses[i], right[i] = loss, likeliest
        done += len(batch)
        progress(f"{what[0]}: {done:,} of {len(pairs):,} {what[1]}")
    return scored(losses, right, bootstrap, context)


def scored(losses: Tensor, right: Tensor, bootstrap: Bootstrap, context: int) -> LastWord:
    """Sum up the losses (N,) of passages, and whether each is right (N,)."""
    perplexity = bootstrap.mean(losses).through(exp_or_inf)
    return LastWord(bootstrap.fraction(right), perplexity, len(losses), context, tuple(losses.tolist()), tuple(right.tolist()))


def last_words_change(a: LastWord, b: LastWord, *, seed: int = 0, bootstrap: Bootstrap | None = None) -> LastWordChange:
    bootstrap = bootstrap or Bootstrap(a.n, seed)
    gained = torch.tensor(b.right).double() - torch.tensor(a.right).double()
    lost = torch.tensor(b.losses, dtype=torch.float64) - torch.tensor(a.losses, dtype=torch.float64)
    accuracy = bootstrap.mean(gained).through(lambda share: min(max(share, -1.0), 1.0))
    return LastWordChange(accuracy, bootstrap.mean(lost).through(exp_or_inf))


def score_targets(model: Logits, rows: Rows) -> list[tuple[float, bool]]:
    """Score the last tokens of each of rows of one length: their loss in nats, and whether all are first."""
    output = model(torch.tensor([ids[:-1] for ids, _ in rows]))  # (B, T, V)
    scores = []
    for row, (ids, length) in enumerate(rows):
        targets = torch.tensor(ids[len(ids) - length :], dtype=torch.long, device=output.device)
        logits = output[row, len(ids) - 1 - length : len(ids) - 1]  # (length, V)
        loss = token_losses(logits[None], targets[None]).sum(dtype=torch.float64).item()
        scores.append((loss, bool((logits.argmax(-1) == targets).all())))
    return scores


def _encode(tokenizer: Tokenizer, passage: str, number: int, context: int) -> tuple[list[int], int]:
    """Return a passage's ids, at most context + 1, and the number of the last word's tokens."""
    before, _, word = passage.rpartition(" ")
    before = before.rstrip()  # further spaces count to the word
    ids = tokenizer.encode(passage if before else f" {word}")
    length = len(ids)
    if before:
        length -= len(tokenizer.encode(before))
    elif tokenizer.eot is not None:
        ids.insert(0, tokenizer.eot)
    else:
        raise InputError(f"passage {number} is the single word {word[:40]!r}; give passages of two words or more")
    if not 0 < length <= context:
        long = f"its last word {word[:40]!r} is {length} tokens, not 1 .. {context}"
        raise InputError(f"passage {number}: {long}; leave this passage out")
    return ids[-(context + 1) :], length


def batches(lengths: list[int]) -> Iterator[list[int]]:
    """Yield batches of indices of one length, longest first, of at most :data:`BATCH` tokens: padding would move int8 engines."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for length, equally_long in itertools.groupby(order, lengths.__getitem__):
        while batch := list(itertools.islice(equally_long, max(1, BATCH // max(1, length)))):
            yield batch
