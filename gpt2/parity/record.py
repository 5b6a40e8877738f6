"""The public record: logits, losses and greedy texts that other projects published for the official weights, computed again.

transformers and our model could share a mistake. These numbers come from projects that share no code. ``public_record.toml``
has each with its source, protocol and tolerance. They are computed in float32, as most of them were.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypedDict

import torch

from gpt2.data import Tokenizer
from gpt2.generation import generate
from gpt2.measure.metrics import Progress, silent, token_losses
from gpt2.model import GPT2
from gpt2.pages.reports import Line, Printed, Section, Styled, numbers


class Published(TypedDict):
    """Who published a number, and where: a row of the data file."""

    project: str
    url: str


@dataclass(frozen=True)
class Record:
    """One published result: ``values`` with an absolute ``tolerance``, or a greedy ``continuation``.

    ``ours`` is what our model computes; ``not_computed`` is the reason if nothing was.
    """

    model: str  # an official name: "gpt2"
    # Logits of ``columns`` at ``position``; mean loss over ``ids``, nats per token; the greedy ``continuation`` of ``prompt``.
    kind: Literal["logits", "loss", "greedy-text"]
    source: Published
    protocol: str  # details without a field of their own
    values: tuple[float, ...] = ()
    tolerance: float = 0.0
    ids: tuple[int, ...] = ()
    position: int = 0
    columns: tuple[int, ...] = ()
    prompt: str = ""
    continuation: str = ""
    ours: tuple[float, ...] | str = ()
    not_computed: str = ""

    @property
    def numbers(self) -> int:
        """The count of published numbers; a continuation, which is reproduced as a whole or not, is one."""
        return len(self.values) or 1

    @property
    def errors(self) -> tuple[float, ...]:
        """Absolute differences from the published numbers; empty for a greedy continuation, and where nothing was computed."""
        pairs = () if isinstance(self.ours, str) else zip(self.ours, self.values, strict=not self.not_computed)
        return tuple(abs(ours - recorded) for ours, recorded in pairs)

    @property
    def reproduced(self) -> int:
        """The count of the numbers that our model reproduces within the tolerance."""
        return sum(error <= self.tolerance for error in self.errors) if self.values else int(self.ours == self.continuation)

    @property
    def ok(self) -> bool:
        """Whether every number was reproduced, or none was computed."""
        return bool(self.not_computed) or self.reproduced == self.numbers


@dataclass(frozen=True)
class RecordReport(Printed):
    """The records of one model with what ours computes, in a table if they were ``asked`` for."""

    model: str
    records: tuple[Record, ...]
    asked: bool = False

    @property
    def ok(self) -> bool:
        """Whether every computed number agrees."""
        return all(record.ok for record in self.records)

    @property
    def figures(self) -> dict[str, Any]:
        numbers = sum(record.numbers for record in self.records if not record.not_computed)
        counts = {"ok": self.ok, "numbers": numbers, "reproduced": sum(record.reproduced for record in self.records)}
        own = ("numbers", "reproduced", "ok")
        records = [{**vars(record), **{name: getattr(record, name) for name in own}} for record in self.records]
        return {"model": self.model, **counts, "records": records}

    def line(self) -> str:
        """``"31 of 31 numbers recorded by 7 other projects"``, and what was not computed, with the reasons."""
        counts, missing = self.figures, [record for record in self.records if record.not_computed]
        projects = len({record.source["project"] for record in self.records if not record.not_computed})
        by = f"{projects} other project{'s' * (projects != 1)}"
        line = f"{counts['reproduced']} of {counts['numbers']} numbers recorded by {by}"
        if missing:
            line += f"; {sum(record.numbers for record in missing)} not computed: {missing[0].not_computed}"
        wrong = next((record for record in self.records if not record.ok), None)
        return line if wrong is None else f"{line}; first that differs: {wrong.kind} by {wrong.source['project']}"

    def sections(self) -> Iterator[Section]:
        """Yield a row per record, if they were asked for, and the summary line."""
        rows = list[list[Line]]()
        for record in self.records:
            style = "" if record.ok else "bold red"
            count = "–" if record.not_computed else f"{record.reproduced}/{record.numbers}"
            # torch's maximum is NaN where an error is NaN.
            error = f"{torch.tensor(record.errors).max().item():.1e}" if record.errors else ""
            within = f"{record.tolerance:g}" if record.tolerance else "exact"
            rows.append([record.kind, record.source["project"], Styled(count, style), Styled(error, style), within])
        if self.asked:
            yield Section(columns=("recorded", "by", *numbers("right", "error", "within")), rows=rows)
        yield Section(note=(Styled("✓", "green") if self.ok else Styled("✗", "bold red"), f" {self.line()}"))


@cache
def public_record() -> tuple[Record, ...]:
    """Return every record of this package."""
    data = tomllib.loads(files("gpt2.parity").joinpath("public_record.toml").read_text(encoding="utf-8"))
    rows: Iterator[Any] = ({key: tuple(v) if isinstance(v, list) else v for key, v in row.items()} for row in data["records"])
    return tuple(Record(**r | {"source": data["sources"][r["source"]]}) for r in rows)


@torch.inference_mode()
def compute(
    name: str, records: Sequence[Record], ours: GPT2, tokenizer: Tokenizer | None, asked: bool, progress: Progress = silent
) -> RecordReport:
    """Compute the ``records`` of the official model ``name`` with ``ours`` in float32, which takes seconds."""
    own = [record for record in records if record.model == name]
    for number, record in enumerate(own):
        progress(f"public record {number + 1} of {len(own)}: {record.kind}, {record.source['project']}")
        if record.kind == "greedy-text" and tokenizer is None:
            own[number] = replace(record, not_computed="the checkpoint comes without a tokenizer")
        else:
            own[number] = replace(record, ours=_ours(record, ours, tokenizer))
    return RecordReport(name, tuple(own), asked)


def _ours(record: Record, model: GPT2, tokenizer: Tokenizer | None) -> tuple[float, ...] | str:
    if tokenizer is not None and record.kind == "greedy-text":
        prompt, expected = tokenizer.encode(record.prompt), tokenizer.encode(record.continuation)
        # A model may generate a word as more tokens than the tokenizer uses.
        found = generate(model, prompt, len(expected) + 4, temperature=0)[len(prompt) :]
        return tokenizer.decode(found)[: len(record.continuation)]
    ids = torch.tensor([record.ids])
    logits = model(ids)
    if record.kind == "loss":
        return (token_losses(logits[:, :-1], ids[:, 1:]).mean(dtype=torch.float64).item(),)
    return tuple(logits[0, record.position, list(record.columns)].tolist())
