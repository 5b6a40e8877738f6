"""The batch of a step, and the table of what people train on instead: labels and averages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # a target that is not trained on
ALL = slice(None)
SUMMED, APART, AVERAGED = "loss-not-averaged", "accumulation-not-averaged", "accumulation-average-wrong"
Average = tuple[float, tuple[str, ...], str]  # what the mean is multiplied by, the causes, and words


@dataclass(frozen=True)
class Batch:
    """Tokens (B, T + 1), the last IGNORED where nothing follows; ``ignored`` (B, T): targets that are not trained on."""

    tokens: Tensor
    ignored: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """What the model reads, (B, T)."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Tensor:
        """The right labels (B, T): the next token of each, IGNORED where there is none to learn."""
        right = self.tokens[:, 1:]
        return right if self.ignored is None else right.masked_fill(self.ignored, IGNORED)

    @property
    def count(self) -> int:
        return int((self.targets >= 0).sum())


def cause_of(key: str) -> tuple[str, str]:
    """Return the cause and the words of a key of :func:`labelings`."""
    id, _, words = key.partition(": ")
    return id, words


def labelings(batch: Batch, special: Sequence[int] = (), parts: int | None = None) -> dict[str, Tensor]:
    """Return labels (B, T) that people train on, each behind its cause and words for it; "" are the right ones, which come first.

    Other labels, then the right ones where some positions are left out, or not left out. ``special``: ids that people take for
    padding, so that the loss ignores them. ``parts``: of a batch, by the settings.
    """
    ids, right = batch.ids, batch.targets
    none, first, last = torch.full_like(ids[:, :1], IGNORED), ids[:, :1], right[:, -1:]
    twice = torch.cat([ids[:, 2:], last, none], 1)[:, -ids.shape[1] :]
    own, word = "labels-not-shifted: each position", "labels-shifted-twice: each position learns the token after the next"
    found = {"": right, f"{own} learns the token that it reads": ids.where(right >= 0, IGNORED)}
    if bool((last < 0).all()):
        found[f"{own}, also the last, learns the token that it reads"] = ids
    found |= {word: twice, f"{word}, and the last two nothing": without(twice, ALL, slice(-2, None))}
    found[f"{word}, and the last one the next"] = torch.cat([twice[:, :-1], last], 1)
    before = torch.cat([first, ids[:, :-1]], 1).where(right >= 0, IGNORED)
    found["labels-wrong: each position learns the token before"] = before
    for words, token in {"the row's first token": first, "the next row's first": first.roll(-1, 0), "token 0": 0 * first}.items():
        found[f"last-token-in-loss: the last position learns {words}"] = torch.cat([right[:, :-1], token], 1)
    if bool((last >= 0).any()):
        found["last-token-missing: the last position learns nothing"] = without(right, ALL, slice(-1, None))
    found["tokens-left-out: the first position learns nothing"] = without(right, ALL, slice(1))
    for id in dict.fromkeys(special):
        if bool((right == id).any()):
            found[f"token-ignored: positions with the label {id} learn nothing"] = right.masked_fill(right == id, IGNORED)
    if parts and parts > 1 and len(right) % parts == 0:
        rows = slice(-(len(right) // parts))
        found["accumulation-last-only: only the last part of the batch is learnt"] = without(right, rows, ALL)
    if not bool((right >= 0).all()):
        found["padding-in-average: ignored targets are learnt"] = right.clamp(min=0)
    return {key: labels for key, labels in found.items() if bool((labels >= 0).any())}


def without(labels: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return labels (B, T) without those of some rows and columns."""
    labels = labels.clone()
    labels[rows, columns] = IGNORED
    return labels


def averages(count: int, length: float, parts: int, rows: int = 0, padded: int = 0) -> list[Average]:
    """Return what a wrong average multiplies the mean by, of the loss or its gradient.

    ``count`` tokens are trained on in ``parts``, ``length`` in each row; ``padded`` with ignored ones. ``rows``: of a batch,
    where its mean may be multiplied by their number.
    """
    again, several = "divided by their number again", parts > 1
    known: list[tuple[bool, Average]] = [
        (several, (parts, (APART,), f"the sum over {parts} parts")),
        (several, (1 / parts, (AVERAGED,), f"the mean over {parts} parts, {again}")),
        (several, (count / parts, (SUMMED,), "the sum over the tokens of each part")),
        (several, (1 / parts**2, (AVERAGED,), f"the mean over {parts} parts, {again}")),
        (several, (count, (SUMMED, APART), "the sum over all tokens and parts")),
        (several, (length * parts, (SUMMED, APART), "the sum over the tokens of a row, and over parts")),
        (True, (count, (SUMMED,), "the sum over all tokens")),
        (True, (length, (SUMMED,), "the sum over the tokens of a row")),
        (rows > 0, (rows, (SUMMED,), "the mean, times the number of rows")),
        (rows > 0, (1 / max(rows, 1), (AVERAGED,), "the mean, divided by the number of rows again")),
        (padded > count, (count / max(padded, 1), ("padding-in-average",), "the sum, divided by all targets, ignored ones too")),
    ]
    return [average for holds, average in known if holds]


def average_of(factor: float, known: Iterable[Average], close: float) -> Average | None:
    """Return the wrong average that multiplies by ``factor``, up to a relative difference of ``close``."""
    return next((one for one in known if abs(factor / one[0] - 1) <= close), None)
