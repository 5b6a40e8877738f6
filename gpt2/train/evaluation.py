"""Score the validation text: the loss over scored tokens, and, where prompts or filler are among them, over all tokens too."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gpt2.data.batches import FILLER, SCORED, documents
from gpt2.decoder import evaluating
from gpt2.measure.metrics import LanguageScore, language_scores
from gpt2.measure.windows import Windows
from gpt2.model import GPT2
from gpt2.train.bigram import Bigram
from gpt2.train.corpus import Corpus
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe


def scores(model: GPT2 | Bigram, text: Corpus, recipe: Recipe, ranks: Ranks) -> tuple[LanguageScore, LanguageScore | None]:
    """Return the score of the scored tokens, and of all that is no filler (None: the same); the ranks share the windows.

    The windows are those of training: with ``data.reset`` documents do not see each other. The end-of-text token counts as no
    bytes, because it is no text.
    """
    ids, end = torch.from_numpy(text.val_ids).long(), text.end
    lengths = torch.tensor([len(text.tokenizer.token_bytes(i)) for i in range(text.tokenizer.n_vocab)])
    if text.tokenizer.eot is not None:
        lengths[text.tokenizer.eot] = 0
    part = ranks.part(recipe)
    rows = part.batch_size // part.grad_accum  # as many as a training step holds in memory
    windows = -(-(len(ids) - 1) // recipe.context)
    first, last = (windows * rank // ranks.size * recipe.context for rank in (ranks.rank, ranks.rank + 1))
    own, masks = slice(first, last + 1), _masks(text)
    found: list[LanguageScore | None] = [None] * len(masks)
    if len(ids[own]) > 1:
        logits = model if end is None or not isinstance(model, GPT2) else partial(_apart, model, end)
        with evaluating(model) if isinstance(model, GPT2) else nullcontext():
            masks = [None if mask is None else mask[own] for mask in masks]
            found = [*language_scores(logits, ids[own], lengths, Windows(recipe.context), masks, batch_size=rows)]
    if ranks.size > 1:
        for index, score in enumerate(found):
            total, tokens, size = ranks.sum(*((score.loss * score.tokens, score.tokens, score.bytes) if score else (0, 0, 0)))
            found[index] = LanguageScore(total / tokens, int(tokens), int(size), recipe.context, recipe.context)
    assert found[0] is not None, "the validation text has two tokens or more"
    return found[0], found[1] if len(found) > 1 else None


def _masks(text: Corpus) -> list[Tensor | None]:
    """Return which validation tokens are scored, and which are no filler (N,); one None if all are both."""
    if text.val_marks is None and text.end is None:
        return [None]
    marks = np.full(len(text.val_ids), SCORED) if text.val_marks is None else text.val_marks.copy()
    if text.end is not None:
        marks[1:][text.val_ids[:-1] == text.end] = FILLER  # a document's first token is not predicted from the one before
    return [torch.from_numpy(marks == SCORED), torch.from_numpy(marks != FILLER)]


def _apart(model: GPT2, end: int, ids: Tensor) -> Tensor:
    """Return the logits of ids (B, T) whose documents do not see each other."""
    numbers = documents(ids.numpy(), end)
    device = model.wte.weight.device
    return model.head(model.hidden(ids.to(device), documents=None if numbers is None else torch.from_numpy(numbers).to(device)))
