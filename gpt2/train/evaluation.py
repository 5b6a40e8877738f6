"""Score the validation text: the loss over scored tokens, and, where prompts or filler are among them, over all tokens too."""

import time
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpt2.data.batches import FILLER, SCORED, documents
from gpt2.decoder import evaluating
from gpt2.measure.metrics import LanguageScore, language_scores
from gpt2.measure.windows import Windows
from gpt2.model import GPT2
from gpt2.train.bigram import Bigram
from gpt2.train.classify import Classifier, confusion
from gpt2.train.corpus import Corpus
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe


class Scores(NamedTuple):
    """The score of the scored tokens; of all that is no filler (None: the same); tokens per second of each rank, if several."""

    val: LanguageScore
    every: LanguageScore | None
    by_rank: tuple[float, ...]
    confusion: list[list[int]] | None = None  # of a classifier (:func:`gpt2.train.classify.confusion`)


def scores(model: GPT2 | Bigram, text: Corpus, recipe: Recipe, ranks: Ranks) -> Scores:
    """Score the validation text; the ranks share its windows, those of training. The end-of-text token has no bytes."""
    if isinstance(model, Classifier) and text.val_marks is not None:
        loss, table = confusion(model, text.val_ids, text.val_marks, recipe.context, recipe.batch_size)
        return Scores(LanguageScore(loss, sum(map(sum, table)), 0, recipe.context, recipe.context), None, (), table)
    end = text.end
    lengths = torch.tensor(text.tokenizer.bytes_by_id())
    if text.tokenizer.eot is not None:
        lengths[text.tokenizer.eot] = 0
    part = ranks.part(recipe)
    rows = part.batch_size // part.grad_accum  # as many as a training step holds in memory
    windows = (len(text.val_ids) - 1) // recipe.context  # the last rank also has the rest, a window that begins earlier
    first, last = (windows * rank // ranks.size * recipe.context for rank in (ranks.rank, ranks.rank + 1))
    own = slice(first, last + 1 if ranks.rank + 1 < ranks.size else None)
    ids, masks = torch.from_numpy(text.val_ids[own].astype(np.int64)), _masks(text, own)
    found: list[LanguageScore | None] = [None] * len(masks)
    began = time.perf_counter()
    if len(ids) > 1:
        logits = model if end is None or not isinstance(model, GPT2) else partial(_apart, model, end)
        with evaluating(model) if isinstance(model, GPT2) else nullcontext():
            found = [*language_scores(logits, ids, lengths, Windows(recipe.context), masks, batch_size=rows)]
    by_rank: tuple[float, ...] = ()
    if ranks.size > 1:
        by_rank = tuple(ranks.gathered((len(ids) - 1) / max(time.perf_counter() - began, 1e-9)))
        for index, score in enumerate(found):
            total, tokens, size = ranks.sum(*((score.loss * score.tokens, score.tokens, score.bytes) if score else (0, 0, 0)))
            found[index] = LanguageScore(total / tokens, int(tokens), int(size), recipe.context, recipe.context)
    assert found[0] is not None, "the validation text has two tokens or more"
    return Scores(found[0], found[1] if len(found) > 1 else None, by_rank)


def slowest(by_rank: tuple[float, ...]) -> str:
    """Return a remark for the log that names the slowest rank; "" unless several have computed."""
    busy = [speed for speed in by_rank if speed]  # of few windows of validation text, some ranks have none
    if len(busy) < 2:
        return ""
    return f"slowest rank {by_rank.index(min(busy))}: {min(busy):,.0f} tok/s computing, fastest {max(busy):,.0f}"


def _masks(text: Corpus, own: slice) -> list[Tensor | None]:
    """Return which of these validation tokens are scored, and which are no filler (N,); one None if all are both."""
    if text.val_marks is None and text.end is None:
        return [None]
    ids = text.val_ids[own]
    marks = np.full(len(ids), SCORED) if text.val_marks is None else text.val_marks[own].copy()
    if text.end is not None:
        marks[1:][ids[:-1] == text.end] = FILLER  # a document's first token is not predicted from the one before
    return [torch.from_numpy(marks == SCORED), torch.from_numpy(marks != FILLER)]


def _apart(model: GPT2, end: int, ids: Tensor) -> Tensor:
    """Return the logits of ids (B, T) whose documents do not see each other."""
    numbers = documents(ids.numpy(), end)
    device = model.wte.weight.device
    return model.head(model.hidden(ids.to(device), documents=None if numbers is None else torch.from_numpy(numbers).to(device)))
