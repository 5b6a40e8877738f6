"""Classify texts: a head with a row for each class, on the last token, saved as transformers' GPT2ForSequenceClassification.

A document's class follows its tokens as if it were the next token, and alone is scored: so training is a language model's.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gpt2.checkpoint import saving
from gpt2.checkpoint.checkpoint import open_path
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.data.batches import SCORED
from gpt2.decoder import evaluating
from gpt2.errors import InputError
from gpt2.model import GPT2

HEAD = "score.weight"  # (C, D), transformers' name


class Classifier(GPT2):
    """GPT-2 with the head ``score`` (C, D) in place of the language model's: logits (B, T, C); the last token's count."""

    def __init__(self, config: GPT2Config, classes: Sequence[str], *, initialise: bool = True) -> None:
        super().__init__(replace(config, tie_word_embeddings=True), initialise=initialise)
        self.classes = tuple(classes)
        self.score = nn.Embedding.from_pretrained(torch.zeros(len(classes), config.n_embd), freeze=False)

    @property
    def head_table(self) -> nn.Embedding:
        return self.score


def classifier(model: GPT2, classes: Sequence[str], seed: int, directory: Path | None) -> Classifier:
    """Return ``model`` with a head for ``classes``: that of the same classes in ``directory`` if it has one, else a new one."""
    made = Classifier(model.config, classes, initialise=False)
    made.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}, False, True)
    head = made.score.weight.data.normal_(0, model.config.initializer_range, generator=torch.Generator().manual_seed(seed))
    if directory is not None and (directory / "config.json").is_file():
        stored = open_path(directory).classifier
        if stored is not None and stored.classes == tuple(classes) and stored.weight.shape == head.shape:
            head.copy_(stored.weight)
    return made


def save(model: Classifier, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a new directory that transformers' AutoModelForSequenceClassification opens, and ``gpt2.load`` without the head."""
    trunk = GPT2(model.config, initialise=False)
    trunk.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name != HEAD}, assign=True)
    saving.save(trunk, tokenizer, directory, {HEAD: model.score.weight.detach()})
    path = directory / "config.json"
    names = dict(enumerate(model.classes))
    own = {"architectures": ["GPT2ForSequenceClassification"], "id2label": names, "label2id": {b: a for a, b in names.items()}}
    saving.write_json(path, {**json.loads(path.read_text()), **own, "pad_token_id": tokenizer.eot})


def confusion(
    model: Classifier, ids: np.ndarray, marks: np.ndarray, context: int, batch_size: int
) -> tuple[float, list[list[int]]]:
    """Return the mean cross-entropy (nats) of rows of ``context`` tokens, and of each class how often each was said."""
    rows = torch.from_numpy(ids[:-1].reshape(-1, context).astype(np.int64))
    at = torch.from_numpy((marks[:-1].reshape(-1, context) == SCORED).argmax(1))
    table, total = torch.zeros(len(model.classes), len(model.classes), dtype=torch.int64), 0.0
    with evaluating(model), torch.inference_mode():
        for part, places in zip(rows.split(batch_size), at.split(batch_size), strict=True):
            own = torch.arange(len(part))
            hidden = model.hidden(part[:, : int(places.max())].to(model.wte.weight.device))
            logits, true = model.head(hidden[own, places - 1]).float().cpu(), part[own, places]
            total += F.cross_entropy(logits, true, reduction="sum").item()
            table += torch.bincount(true * len(table) + logits.argmax(1), minlength=table.numel()).view_as(table)
    return total / len(rows), table.tolist()


def classes_of(labels: Sequence[str], n_vocab: int) -> tuple[str, ...]:
    """Return the classes in order. Raises InputError: there is one only, or there are too many to be classes."""
    classes = tuple(sorted({*labels}))
    if not 2 <= len(classes) <= min(n_vocab, len(labels) // 2):
        found = f"{len(labels):,} documents have {len(classes):,} different values of data.label, from {classes[0][:40]!r}"
        raise InputError(f"{found}; name a field with two classes or more, each of several documents")
    return classes
