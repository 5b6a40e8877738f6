"""The public record: numbers that other projects published for the official weights, computed again with our model.

transformers and our model could share a mistake. These numbers come from projects that share no code. ``public_record.toml``
has each with its source, protocol and tolerance. They are computed in float32, as most of them were. A number whose text is not
available is reported as not computed, with the reason.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.generation import generate
from gpt2.measure.last_words import score_last_words
from gpt2.measure.metrics import Progress, language_score, log_probabilities, silent, token_losses
from gpt2.measure.texts import Text, open_text
from gpt2.model import GPT2
from gpt2.pages.reports import Printed, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType


class Kind(Enum):
    """The kind of number, as the data file names it."""

    LOGITS = "logits"  # at ``position``, of the ids ``columns``
    MEAN_LOGIT = "mean-logit"  # over all positions and the vocabulary
    FINAL_HIDDEN = "final-hidden"  # the residual stream after ln_f at ``position``, entries ``columns``
    LOG_PROBABILITIES = "log-probabilities"  # natural, of the id after each of the ``positions``
    LOSS = "loss"  # mean over ``ids``, nats per token
    GREEDY_IDS = "greedy-ids"  # the greedy continuation of ``ids``: ``values``
    GREEDY_TEXT = "greedy-text"  # the greedy ``continuation`` of ``prompt``
    ADAMW_LOSSES = "adamw-losses"  # of ``batch`` rows of a ``text``, ``length`` tokens each, before each of the steps on them
    PERPLEXITY = "perplexity"  # of a ``text``
    LAST_WORD_ACCURACY = "last-word-accuracy"  # over the passages of ``text``
    LAST_WORD_PERPLEXITY = "last-word-perplexity"

    @property
    def exact(self) -> bool:
        """Whether this is a greedy continuation, which must be reproduced as a whole and counts as one number."""
        return self in (Kind.GREEDY_IDS, Kind.GREEDY_TEXT)


@dataclass(frozen=True)
class Source:
    """Who published the number, and where."""

    project: str
    url: str


@dataclass(frozen=True)
class AdamW:
    """The optimizer of :attr:`Kind.ADAMW_LOSSES`; it decays every parameter, and ``clip`` limits the total norm."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float | None = None


@dataclass(frozen=True)
class Record:
    """One published result: ``values`` with an absolute ``tolerance``, or an exact ``continuation`` or exact ids."""

    model: str  # an official name: "gpt2"
    kind: Kind
    source: Source
    protocol: str  # details without a field of their own
    values: tuple[float, ...] = ()
    tolerance: float = 0.0
    ids: tuple[int, ...] = ()
    position: int = 0
    positions: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    prompt: str = ""
    continuation: str = ""
    text: str = ""  # a name for :func:`gpt2.measure.texts.open_text`
    batch: int = 0
    length: int = 0
    optimizer: AdamW | None = None

    @property
    def numbers(self) -> int:
        """The count of published numbers in this record."""
        return 1 if self.kind.exact else len(self.values)


@dataclass(frozen=True)
class Outcome:
    """A record and what our model computes; ``not_computed`` is the reason if nothing was computed."""

    record: Record
    ours: tuple[float, ...] | str = ()
    not_computed: str = ""

    @property
    def errors(self) -> tuple[float, ...]:
        """Absolute differences from the published numbers; empty for a greedy continuation."""
        if isinstance(self.ours, str) or self.record.kind.exact or self.not_computed:
            return ()
        return tuple(abs(ours - recorded) for ours, recorded in zip(self.ours, self.record.values, strict=True))

    @property
    def reproduced(self) -> int:
        """The count of the record's numbers that our model reproduces within the tolerance."""
        if self.record.kind.exact:
            return int(self.ours == (self.record.continuation or self.record.values))
        return sum(error <= self.record.tolerance for error in self.errors)

    @property
    def ok(self) -> bool:
        """Whether every number was reproduced, or none was computed."""
        return bool(self.not_computed) or self.reproduced == self.record.numbers

    def to_dict(self) -> dict[str, Any]:
        """Return the record, our numbers and the judgement as JSON values."""
        record = {**vars(self.record), "kind": self.record.kind.value, "numbers": self.record.numbers}
        return {**record, "ours": self.ours, "reproduced": self.reproduced, "ok": self.ok, "not_computed": self.not_computed}


@dataclass(frozen=True)
class RecordReport(Printed):
    """The outcomes for one model: of all records (``everything``), or of the cheap ones; ``left`` counts the rest."""

    model: str
    outcomes: tuple[Outcome, ...]
    everything: bool = False
    left: int = 0

    @property
    def ok(self) -> bool:
        """Whether every computed number agrees."""
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def numbers(self) -> int:
        """The count of computed numbers."""
        return sum(outcome.record.numbers for outcome in self.outcomes if not outcome.not_computed)

    @property
    def reproduced(self) -> int:
        return sum(outcome.reproduced for outcome in self.outcomes)

    def line(self) -> str:
        """``"31 of 31 numbers recorded by 7 other projects"``, and what was not computed, with the reasons."""
        projects = len({outcome.record.source.project for outcome in self.outcomes if not outcome.not_computed})
        line = f"{self.reproduced} of {self.numbers} numbers recorded by {projects} other project{'s' * (projects != 1)}"
        if missing := [outcome for outcome in self.outcomes if outcome.not_computed]:
            reasons = "; ".join(dict.fromkeys(outcome.not_computed for outcome in missing))
            line += f"; {sum(outcome.record.numbers for outcome in missing)} not computed: {reasons}"
        if wrong := [outcome.record for outcome in self.outcomes if not outcome.ok]:
            line += f"; first that differs: {wrong[0].kind.value} by {wrong[0].source.project}"
        return line + (f"; {self.left} more with --record" if self.left else "")

    def to_dict(self) -> dict[str, Any]:
        counts = {"ok": self.ok, "numbers": self.numbers, "reproduced": self.reproduced, "left": self.left}
        return {"model": self.model, **counts, "records": [outcome.to_dict() for outcome in self.outcomes]}

    def parts(self) -> Iterator[RenderableType]:
        """Yield a table with a row per record, if all were computed, and the summary line."""
        from rich.markup import escape

        table = data_table("recorded", "by", "right", "error", "within", right=(2, 3, 4))
        table.show_edge = False  # the longest names need all 80 columns
        for outcome in self.outcomes:
            record, mark = outcome.record, "" if outcome.ok else "[bold red]"
            count = "–" if outcome.not_computed else f"{mark}{outcome.reproduced}/{record.numbers}"
            # torch's maximum is NaN where an error is NaN.
            error = f"{mark}{torch.tensor(outcome.errors).max().item():.1e}" if outcome.errors else ""
            tolerance = "exact" if record.kind.exact else f"{record.tolerance:g}"
            table.add_row(record.kind.value, record.source.project, count, error, tolerance)
        if self.everything:
            yield table
        yield f"{'[green]✓[/green]' if self.ok else '[bold red]✗[/bold red]'} {escape(self.line())}"


@cache
def public_record() -> tuple[Record, ...]:
    """Return every record of this package."""
    data = tomllib.loads(files("gpt2.parity").joinpath("public_record.toml").read_text(encoding="utf-8"))
    sources = {name: Source(**row) for name, row in data["sources"].items()}
    return tuple(_record(row, sources[row["source"]]) for row in data["records"])


def _record(row: Mapping[str, Any], source: Source) -> Record:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    optimizer = AdamW(**row["optimizer"]) if "optimizer" in row else None
    return Record(**fields | {"kind": Kind(row["kind"]), "source": source, "optimizer": optimizer})


class NotComputed(Exception):
    """The reason why a record cannot be computed here."""


@dataclass(frozen=True)
class Setup:
    """What records are computed with; ``build`` makes a new model in float32 for the record that trains it."""

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
    """Compute the ``records`` of an official ``model``: those that need no text, which take seconds, or ``everything``."""
    own = [record for record in records if record.model == model]
    chosen = [record for record in own if everything or not record.text]
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
    ids, at = torch.tensor([record.ids]), (0, record.position, list(record.columns))
    if record.kind is Kind.FINAL_HIDDEN:
        return model.hidden(ids)[at]
    logits = model(ids)
    match record.kind:
        case Kind.LOGITS:
            return logits[at]
        case Kind.MEAN_LOGIT:
            return logits.mean(dtype=torch.float64)
        case Kind.LOG_PROBABILITIES:
            before = torch.tensor(record.positions)
            return log_probabilities(logits[0])[before, ids[0, before + 1]]
        case Kind.LOSS:
            return token_losses(logits[:, :-1], ids[:, 1:]).mean(dtype=torch.float64)
    raise ValueError(f"a record of kind {record.kind.value} takes more than one forward pass")


def _adamw_losses(record: Record, setup: Setup) -> list[float]:
    """Return the loss before each step; without dropout, as in llm.c."""
    ids = torch.tensor(setup.own_tokenizer().encode(setup.open(record.text).text)[: record.batch * record.length + 1])
    x, y = (part.view(record.batch, record.length) for part in (ids[:-1], ids[1:]))
    settings, model = record.optimizer, setup.build().eval().requires_grad_(True)
    assert settings is not None
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
