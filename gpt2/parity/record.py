"""The public record: numbers that other people recorded on the official weights, computed again with our model.

transformers could be wrong, and we with it; these numbers come from projects that share no code. They lie in
``public_record.toml``, each with its source, protocol and tolerance, and are computed in float32, as most of them were. A number
that cannot be computed here, because its text is out of reach, is counted as not computed, with the reason.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.generation import generate
from gpt2.measure.last_words import last_word_losses
from gpt2.measure.metrics import language_score, log_probabilities, token_losses
from gpt2.measure.texts import Text, open_text
from gpt2.measure.windows import Windows
from gpt2.model import GPT2
from gpt2.pages.reports import data_table

if TYPE_CHECKING:
    from rich.console import RenderableType


class Kind(Enum):
    """What was recorded. The value is its name in the data file."""

    LOGITS = "logits"  # at ``position``, of the ids ``columns``
    MEAN_LOGIT = "mean-logit"  # over all positions and the vocabulary
    FINAL_HIDDEN = "final-hidden"  # the stream after ln_f at ``position``, entries ``columns``
    LOG_PROBABILITIES = "log-probabilities"  # natural, of the id after each of ``positions``
    LOSS = "loss"  # mean over ``ids``, nats per token
    GREEDY_IDS = "greedy-ids"  # what greedy decoding adds to ``ids``
    GREEDY_TEXT = "greedy-text"  # what it adds to ``prompt``
    ADAMW_LOSSES = "adamw-losses"  # the loss of one batch of ``text`` before each of the steps on it
    PERPLEXITY = "perplexity"  # over ``text``
    LAST_WORD_ACCURACY = "last-word-accuracy"  # over the passages of ``text``
    LAST_WORD_PERPLEXITY = "last-word-perplexity"


@dataclass(frozen=True)
class Source:
    """Who recorded it, and where it was read."""

    project: str
    url: str


@dataclass(frozen=True)
class AdamW:
    """The optimizer of :attr:`Kind.ADAMW_LOSSES`; it decays every parameter, and ``clip`` is a total norm."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float | None = None


@dataclass(frozen=True)
class Record:
    """One recorded thing: ``values`` within ``tolerance`` (absolute), or exactly ``continuation`` or ids."""

    model: str  # an official name: "gpt2"
    kind: Kind
    source: Source
    protocol: str  # what the other fields do not say
    values: tuple[float, ...] = ()
    tolerance: float = 0.0
    ids: tuple[int, ...] = ()
    position: int = 0
    positions: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    prompt: str = ""
    continuation: str = ""
    text: str = ""  # as :func:`gpt2.measure.texts.open_text` takes it
    batch: int = 0
    length: int = 0
    optimizer: AdamW | None = None

    @property
    def numbers(self) -> int:
        """How many recorded numbers this is; a greedy continuation counts as one."""
        return 1 if self.kind in (Kind.GREEDY_IDS, Kind.GREEDY_TEXT) else len(self.values)


@dataclass(frozen=True)
class Outcome:
    """A record beside what our model computes. ``not_computed`` is the reason where nothing was."""

    record: Record
    ours: tuple[float, ...] | str = ()
    not_computed: str = ""

    @property
    def reproduced(self) -> int:
        """How many of the record's numbers our model gives, within the tolerance."""
        record = self.record
        if self.not_computed:
            return 0
        if record.kind is Kind.GREEDY_TEXT:
            return int(self.ours == record.continuation)
        if record.kind is Kind.GREEDY_IDS:
            return int(self.ours == record.values)
        return sum(error <= record.tolerance for error in self.errors)

    @property
    def errors(self) -> tuple[float, ...]:
        """Absolute differences from the recorded numbers; none for a greedy continuation."""
        if isinstance(self.ours, str) or self.record.kind is Kind.GREEDY_IDS or self.not_computed:
            return ()
        return tuple(abs(ours - recorded) for ours, recorded in zip(self.ours, self.record.values, strict=True))

    @property
    def ok(self) -> bool:
        """Every number was reproduced, or none was computed."""
        return bool(self.not_computed) or self.reproduced == self.record.numbers

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the record, what our model gives, and the judgement."""
        record = {**asdict(self.record), "kind": self.record.kind.value, "numbers": self.record.numbers}
        return {**record, "ours": self.ours, "reproduced": self.reproduced, "ok": self.ok, "not_computed": self.not_computed}


@dataclass(frozen=True)
class RecordReport:
    """What became of the records of one model: of all (``everything``), or of the cheap ones, which leaves ``left`` numbers."""

    model: str
    outcomes: tuple[Outcome, ...]
    everything: bool = False
    left: int = 0

    @property
    def ok(self) -> bool:
        """No number that was computed differs."""
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def numbers(self) -> int:
        """How many numbers were computed."""
        return sum(outcome.record.numbers for outcome in self.outcomes if not outcome.not_computed)

    @property
    def reproduced(self) -> int:
        return sum(outcome.reproduced for outcome in self.outcomes)

    def line(self) -> str:
        """``"31 of 31 numbers recorded by 7 other projects"``, and what was not computed, with the reasons."""
        computed = [outcome for outcome in self.outcomes if not outcome.not_computed]
        projects = len({outcome.record.source.project for outcome in computed})
        line = f"{self.reproduced} of {self.numbers} numbers recorded by {projects} other project{'s' * (projects != 1)}"
        missing = [outcome for outcome in self.outcomes if outcome.not_computed]
        if missing:
            reasons = "; ".join(dict.fromkeys(outcome.not_computed for outcome in missing))
            line += f"; {sum(outcome.record.numbers for outcome in missing)} not computed: {reasons}"
        wrong = [outcome.record for outcome in self.outcomes if not outcome.ok]
        if wrong:
            line += f"; first that differs: {wrong[0].kind.value} by {wrong[0].source.project}"
        return line + (f"; {self.left} more with --record" if self.left else "")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        counts = {"ok": self.ok, "numbers": self.numbers, "reproduced": self.reproduced, "left": self.left}
        return {"model": self.model, **counts, "records": [outcome.to_dict() for outcome in self.outcomes]}

    def render(self) -> RenderableType:
        """A row per record, for 80 columns."""
        table = data_table("recorded", "by", "numbers", "error", "tolerance", right=(2, 3, 4))
        for outcome in self.outcomes:
            record, mark = outcome.record, "" if outcome.ok else "[bold red]"
            count = "not computed" if outcome.not_computed else f"{mark}{outcome.reproduced} of {record.numbers}"
            exact = record.kind in (Kind.GREEDY_IDS, Kind.GREEDY_TEXT)
            error = f"{mark}{max(outcome.errors, key=_nan_first):.1e}" if outcome.errors else ""
            table.add_row(record.kind.value, record.source.project, count, error, "exact" if exact else f"{record.tolerance:.1e}")
        return table


def _nan_first(error: float) -> float:
    return math.inf if math.isnan(error) else error


REQUIRED: Mapping[Kind, tuple[str, ...]] = {
    Kind.LOGITS: ("ids", "position", "columns", "values", "tolerance"),
    Kind.MEAN_LOGIT: ("ids", "values", "tolerance"),
    Kind.FINAL_HIDDEN: ("ids", "position", "columns", "values", "tolerance"),
    Kind.LOG_PROBABILITIES: ("ids", "positions", "values", "tolerance"),
    Kind.LOSS: ("ids", "values", "tolerance"),
    Kind.GREEDY_IDS: ("ids", "values"),
    Kind.GREEDY_TEXT: ("prompt", "continuation"),
    Kind.ADAMW_LOSSES: ("text", "batch", "length", "optimizer", "values", "tolerance"),
    Kind.PERPLEXITY: ("text", "values", "tolerance"),
    Kind.LAST_WORD_ACCURACY: ("text", "values", "tolerance"),
    Kind.LAST_WORD_PERPLEXITY: ("text", "values", "tolerance"),
}


def parse(toml: str) -> tuple[Record, ...]:
    """Records from the text of a data file.

    Raises:
        ValueError: a record that lacks a field of its kind, or has one that its kind does not know.
    """
    data = tomllib.loads(toml)
    sources = {name: Source(**row) for name, row in data["sources"].items()}
    return tuple(_record(row, sources) for row in data["records"])


def _record(row: dict[str, Any], sources: Mapping[str, Source]) -> Record:
    kind = Kind(row["kind"])
    common = {"model", "kind", "source", "protocol"}
    if odd := set(row) ^ common ^ set(REQUIRED[kind]):
        raise ValueError(f"a record of kind {kind.value} for {row.get('model')}: {', '.join(sorted(odd))} missing or unknown")
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    if "columns" in fields and len(fields["columns"]) != len(fields["values"]):
        raise ValueError(f"a record of kind {kind.value} for {row['model']}: columns and values differ in number")
    fields |= {"kind": kind, "source": sources[row["source"]]}
    if "optimizer" in fields:
        fields["optimizer"] = AdamW(**fields["optimizer"])
    return Record(**fields)


@cache
def public_record() -> tuple[Record, ...]:
    """Every record that this package holds."""
    return parse(files("gpt2.parity").joinpath("public_record.toml").read_text(encoding="utf-8"))


class NotComputed(Exception):
    """Why a record cannot be computed here."""


@dataclass(frozen=True)
class Setup:
    """What records are computed with. ``build`` makes the model anew, for the record that trains it."""

    build: Callable[[], GPT2]
    model: GPT2  # float32, in eval mode
    tokenizer: Tokenizer | None
    offline: bool = False
    progress: Callable[[str], None] = lambda what: None

    def encode(self, text: str) -> list[int]:
        return self.own_tokenizer().encode(text)

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
    chosen = [record for record in own if everything or record.kind not in EXPENSIVE]
    outcomes = []
    for number, record in enumerate(chosen):
        setup.progress(f"public record {number + 1} of {len(chosen)}: {record.kind.value}, {record.source.project}")
        try:
            outcomes.append(Outcome(record, COMPUTE[record.kind](record, setup)))
        except NotComputed as reason:
            outcomes.append(Outcome(record, not_computed=str(reason)))
    return RecordReport(model, tuple(outcomes), everything, sum(record.numbers for record in own if record not in chosen))


@torch.inference_mode()
def _logits(record: Record, setup: Setup) -> tuple[float, ...]:
    logits = setup.model(_row(record.ids))[0, record.position]
    return tuple(logits[list(record.columns)].tolist())


@torch.inference_mode()
def _mean_logit(record: Record, setup: Setup) -> tuple[float, ...]:
    return (setup.model(_row(record.ids)).mean(dtype=torch.float64).item(),)


@torch.inference_mode()
def _final_hidden(record: Record, setup: Setup) -> tuple[float, ...]:
    hidden = setup.model.hidden(_row(record.ids))[0, record.position]
    return tuple(hidden[list(record.columns)].tolist())


@torch.inference_mode()
def _log_probabilities(record: Record, setup: Setup) -> tuple[float, ...]:
    logp = log_probabilities(setup.model(_row(record.ids))[0])
    return tuple(logp[position, record.ids[position + 1]].item() for position in record.positions)


@torch.inference_mode()
def _loss(record: Record, setup: Setup) -> tuple[float, ...]:
    ids = _row(record.ids)
    return (token_losses(setup.model(ids[:, :-1]), ids[:, 1:]).mean(dtype=torch.float64).item(),)


def _greedy_ids(record: Record, setup: Setup) -> tuple[float, ...]:
    ids = generate(setup.model, list(record.ids), len(record.values), temperature=0)
    return tuple(float(i) for i in ids[len(record.ids) :])


def _greedy_text(record: Record, setup: Setup) -> str:
    """As much text as was recorded; its tokens may be more than the text's own, for a model may spell a word another way."""
    prompt, tokenizer = setup.encode(record.prompt), setup.own_tokenizer()
    expected = len(setup.encode(record.continuation))
    ids = generate(setup.model, prompt, expected + 4, temperature=0)[len(prompt) :]
    return tokenizer.decode(ids)[: len(record.continuation)]


def _adamw_losses(record: Record, setup: Setup) -> tuple[float, ...]:
    """Loss before each step; dropout is off, as in llm.c, which has none."""
    ids = torch.tensor(setup.encode(setup.open(record.text).text)[: record.batch * record.length + 1])
    x, y = (part.view(record.batch, record.length) for part in (ids[:-1], ids[1:]))
    settings, model = record.optimizer, setup.build().eval()
    assert settings is not None  # _record saw to it
    betas = (settings.beta1, settings.beta2)
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    losses = []
    for _ in record.values:
        loss = token_losses(model(x), y).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
    return tuple(losses)


def _perplexity(record: Record, setup: Setup) -> tuple[float, ...]:
    text = setup.open(record.text)
    ids, n_positions = torch.tensor(setup.encode(text.text)), setup.model.config.n_positions
    cut = Windows(min(text.protocol.context or n_positions, n_positions), text.protocol.stride, text.protocol.guide)
    lengths = torch.ones(setup.model.config.vocab_size, dtype=torch.long)  # bits per byte are not asked for
    score = language_score(setup.model, ids, lengths, cut, batch_size=1)
    return (score.perplexity,)


def _last_words(record: Record, setup: Setup) -> tuple[Tensor, Tensor]:
    passages, context = setup.open(record.text).passages, setup.model.config.n_positions
    return last_word_losses(setup.model, setup.own_tokenizer(), passages, context=context, progress=setup.progress)


def _last_word_accuracy(record: Record, setup: Setup) -> tuple[float, ...]:
    return (_last_words(record, setup)[1].double().mean().item(),)


def _last_word_perplexity(record: Record, setup: Setup) -> tuple[float, ...]:
    return (_last_words(record, setup)[0].mean().exp().item(),)


def _row(ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)])


COMPUTE: Mapping[Kind, Callable[[Record, Setup], tuple[float, ...] | str]] = {
    Kind.LOGITS: _logits,
    Kind.MEAN_LOGIT: _mean_logit,
    Kind.FINAL_HIDDEN: _final_hidden,
    Kind.LOG_PROBABILITIES: _log_probabilities,
    Kind.LOSS: _loss,
    Kind.GREEDY_IDS: _greedy_ids,
    Kind.GREEDY_TEXT: _greedy_text,
    Kind.ADAMW_LOSSES: _adamw_losses,
    Kind.PERPLEXITY: _perplexity,
    Kind.LAST_WORD_ACCURACY: _last_word_accuracy,
    Kind.LAST_WORD_PERPLEXITY: _last_word_perplexity,
}
EXPENSIVE = (Kind.ADAMW_LOSSES, Kind.PERPLEXITY, Kind.LAST_WORD_ACCURACY, Kind.LAST_WORD_PERPLEXITY)
