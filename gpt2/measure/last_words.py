"""The last word of each passage: how many nats it costs a model, and whether the model would have said it.

The protocol is that of lm-evaluation-harness (0.4; tasks/lambada/lambada_openai.yaml, ``_encode_pair`` in api/model.py), which
most published figures follow: the word counts with the space before it, from the whole passage's tokens; a passage longer than
the context loses its beginning; a word is right where each of its tokens is the likeliest one; perplexity is per word, not per
token. The GPT-2 paper's own figures are of another protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.metrics import Logits, token_losses

BATCH = 1024  # tokens that are run together: 200 MB of logits over GPT-2's vocabulary


@torch.inference_mode()
def last_word_losses(
    model: Logits,
    tokenizer: Tokenizer,
    passages: Sequence[str],
    *,
    context: int,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[Tensor, Tensor]:
    """The loss of the last word of each passage, what stands behind its last space, and whether it is the likeliest.

    Nats per word (N,), float64, and booleans (N,), in the order of the passages; ``context`` is how many tokens the model reads.

    Raises:
        InputError: no passages, one that is a single word where there is no end-of-text token to predict it from, or a word of
            more tokens than the context.
    """
    if not passages:
        raise InputError("there are no passages to score the last words of; give at least one")
    pairs = [_encode(tokenizer, passage, i, context) for i, passage in enumerate(passages)]
    losses, right, done = torch.zeros(len(pairs), dtype=torch.float64), torch.zeros(len(pairs), dtype=torch.bool), 0
    for batch in _batches([len(ids) - 1 for ids, _ in pairs]):
        for i, (loss, likeliest) in zip(batch, score_targets(model, [pairs[i] for i in batch]), strict=True):
            losses[i], right[i] = loss, likeliest
        done += len(batch)
        progress(f"last words: {done:,} of {len(pairs):,} passages")
    return losses, right


def score_targets(model: Logits, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
    """Score the last tokens of each row of (ids, how many are scored), in one batch.

    Returns for each row the sum of the losses in nats, and whether every scored token is the model's likeliest.
    """
    inputs = torch.zeros(len(rows), max(len(ids) for ids, _ in rows) - 1, dtype=torch.long)  # padded at the end
    for row, (ids, _) in enumerate(rows):
        inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
    output = model(inputs)  # (B, T, V)
    scores = []
    for row, (ids, length) in enumerate(rows):
        targets = torch.tensor(ids[len(ids) - length :], dtype=torch.long, device=output.device)
        logits = output[row, len(ids) - 1 - length : len(ids) - 1]  # (length, V)
        loss = token_losses(logits[None], targets[None]).sum(dtype=torch.float64).item()
        scores.append((loss, bool((logits.argmax(-1) == targets).all())))
    return scores


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
        raise InputError(f"passage {number} is the single word {word[:40]!r}; give passages of two words or more")
    if not 0 < length <= context:
        raise InputError(
            f"passage {number}: its last word {word[:40]!r} is {length} tokens, not 1 .. {context}; leave this passage out"
        )
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
