"""The public record: numbers that other projects published for the official weights, computed again with our model.

transformers and our model could share a mistake. These numbers come from projects that share no code. ``public_record.toml``
has each with its source, protocol and tolerance. They are computed in float32, as most of them were. A number whose text is not
available is reported as not computed, with the reason.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch

from gpt2.pages.reports import Printed, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType


class Kind(Enum):
    """The kind of number: its name in the data file, and the fields that a record of this kind has."""

    LOGITS = "logits", "ids position columns values tolerance"  # at ``position``, of the ids ``columns``
    MEAN_LOGIT = "mean-logit", "ids values tolerance"  # over all positions and the vocabulary
    FINAL_HIDDEN = "final-hidden", "ids position columns values tolerance"  # the residual stream after ln_f, entries ``columns``
    LOG_PROBABILITIES = "log-probabilities", "ids positions values tolerance"  # natural, of the id after each position
    LOSS = "loss", "ids values tolerance"  # mean over ``ids``, nats per token
    GREEDY_IDS = "greedy-ids", "ids values"  # the greedy continuation of ``ids``
    GREEDY_TEXT = "greedy-text", "prompt continuation"  # the greedy continuation of ``prompt``
    # The loss of one batch of ``text`` before each of the steps on it.
    ADAMW_LOSSES = "adamw-losses", "text batch length optimizer values tolerance"
    PERPLEXITY = "perplexity", "text values tolerance"
    LAST_WORD_ACCURACY = "last-word-accuracy", "text values tolerance"  # over the passages of ``text``
    LAST_WORD_PERPLEXITY = "last-word-perplexity", "text values tolerance"

    fields: frozenset[str]

    def __new__(cls, value: str, fields: str = "") -> Kind:
        kind = object.__new__(cls)
        kind._value_, kind.fields = value, frozenset(fields.split())
        return kind

    @property
    def exact(self) -> bool:
        """Whether this is a greedy continuation, which must be reproduced as a whole and counts as one number."""
        return "tolerance" not in self.fields

    @property
    def expensive(self) -> bool:
        """Whether it takes minutes and a text that may have to be downloaded."""
        return "text" in self.fields


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


def parse(toml: str) -> tuple[Record, ...]:
    """Read the records from the text of a data file; a missing or unknown field is a ValueError."""
    data = tomllib.loads(toml)
    sources = {name: Source(**row) for name, row in data["sources"].items()}
    return tuple(_record(row, sources) for row in data["records"])


def _record(row: dict[str, Any], sources: Mapping[str, Source]) -> Record:
    kind = Kind(row["kind"])
    if odd := set(row) ^ {"model", "kind", "source", "protocol"} ^ kind.fields:
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
    """Return every record of this package."""
    return parse(files("gpt2.parity").joinpath("public_record.toml").read_text(encoding="utf-8"))
