"""Compute the numbers of the public record with our model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.generation import generate
from gpt2.measure.last_words import score_last_words
from gpt2.measure.metrics import Progress, language_score, log_probabilities, silent, token_losses
from gpt2.measure.texts import Text, open_text
from gpt2.model import GPT2
from gpt2.parity.record import Kind, Outcome, Record, RecordReport


class NotComputed(Exception):
    """The reason why a record cannot be computed here."""


@dataclass(frozen=True)
class Setup:
    """What records are computed with; ``build`` makes a new model for the record that trains it."""

    build: Callable[[], GPT2]
    model: GPT2  # float32, in eval mode
    tokenizer: Tokenizer | None
    offline: bool = False
    progress: Progress = silent

    def own_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise NotComputed("the checkpoint comes without a tokenizer")
        return self.tokenizer

    def open(self, spec: str) -> Text:
        self.own_tokenizer()
        try:
            return open_text(spec, offline=self.offline)
        except InputError as error:
            raise NotComputed(str(error)) from error


def compute(model: str, records: Sequence[Record], setup: Setup, *, everything: bool = False) -> RecordReport:
    """Compute the ``records`` of an official ``model``: the cheap ones, or ``everything``."""
    own = [record for record in records if record.model == model]
    chosen = [record for record in own if everything or not record.kind.expensive]
    outcomes = []
    for number, record in enumerate(chosen):
        setup.progress(f"public record {number + 1} of {len(chosen)}: {record.kind.value}, {record.source.project}")
        try:
            outcomes.append(Outcome(record, _ours(record, setup)))
        except NotComputed as reason:
            outcomes.append(Outcome(record, not_computed=str(reason)))
    return RecordReport(model, tuple(outcomes), everything, sum(record.numbers for record in own if record not in chosen))


def _ours(record: Record, setup: Setup) -> tuple[float, ...] | str:
    """Return what our model computes for a record."""
    match record.kind:
        case Kind.GREEDY_IDS:
            ids = generate(setup.model, list(record.ids), len(record.values), temperature=0)
            return tuple(float(i) for i in ids[len(record.ids) :])
        case Kind.GREEDY_TEXT:
            tokenizer = setup.own_tokenizer()
            prompt, expected = tokenizer.encode(record.prompt), tokenizer.encode(record.continuation)
            # A model may generate a word as more tokens than the tokenizer uses.
            ids = generate(setup.model, prompt, len(expected) + 4, temperature=0)[len(prompt) :]
            return tokenizer.decode(ids)[: len(record.continuation)]
        case Kind.ADAMW_LOSSES:
            return tuple(_adamw_losses(record, setup))
        case Kind.PERPLEXITY:
            text, config = setup.open(record.text), setup.model.config
            whole = torch.tensor(setup.own_tokenizer().encode(text.text))
            lengths = torch.ones(config.vocab_size, dtype=torch.long)  # for bits per byte, which are not used
            windows = text.protocol.windows(config.n_positions)
            return (language_score(setup.model, whole, lengths, windows, batch_size=1).perplexity,)
        case Kind.LAST_WORD_ACCURACY | Kind.LAST_WORD_PERPLEXITY:
            passages, context = setup.open(record.text).passages, setup.model.config.n_positions
            scored = score_last_words(setup.model, setup.own_tokenizer(), passages, context=context, progress=setup.progress)
            return ((scored.accuracy if record.kind is Kind.LAST_WORD_ACCURACY else scored.perplexity).value,)
    return tuple(_forward(record, setup.model).flatten().tolist())


@torch.inference_mode()
def _forward(record: Record, model: GPT2) -> Tensor:
    """Return the numbers of one forward pass over ``ids``."""
    ids, columns, positions = torch.tensor([record.ids]), list(record.columns), torch.tensor(record.positions)
    match record.kind:
        case Kind.LOGITS:
            return model(ids)[0, record.position, columns]
        case Kind.FINAL_HIDDEN:
            return model.hidden(ids)[0, record.position, columns]
        case Kind.MEAN_LOGIT:
            return model(ids).mean(dtype=torch.float64)
        case Kind.LOG_PROBABILITIES:
            return log_probabilities(model(ids)[0])[positions, ids[0, positions + 1]]
        case Kind.LOSS:
            return token_losses(model(ids[:, :-1]), ids[:, 1:]).mean(dtype=torch.float64)
    raise ValueError(f"a record of kind {record.kind.value} takes more than one forward pass")


def _adamw_losses(record: Record, setup: Setup) -> list[float]:
    """Return the loss before each step; without dropout, as in llm.c."""
    ids = torch.tensor(setup.own_tokenizer().encode(setup.open(record.text).text)[: record.batch * record.length + 1])
    x, y = (part.view(record.batch, record.length) for part in (ids[:-1], ids[1:]))
    settings, model = record.optimizer, setup.build().eval().requires_grad_(True)
    assert settings is not None  # parse requires it
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr, betas, settings.eps, settings.weight_decay)
    losses = []
    for _ in record.values:
        loss = token_losses(model(x), y).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
    return losses
