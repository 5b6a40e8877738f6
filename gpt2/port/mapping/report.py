"""The report of :func:`gpt2.load_into`: a frozen dataclass that prints as a table and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from gpt2.pages.reports import Printed, Section, as_json, bold


@dataclass(frozen=True)
class MappingRow:
    """One parameter of the module: the checkpoint's tensors that fill it, and how they were changed."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    transformation: str


@dataclass(frozen=True)
class MappingReport(Printed):
    """The result of :func:`gpt2.load_into`: where the weights of ``checkpoint`` went in ``module``, and whether the logits agree.

    ``unfilled``: parameters left unchanged. ``idle``: parameters that have no effect. ``unused``: the checkpoint's tensors
    without a place. These three map names to reasons. ``ambiguous``: parameters with two possible sources. ``problems``:
    differences that keep the module from computing the checkpoint's model. ``notes``: other facts. ``logits_error``: the worst
    difference of a logit from our model's, over the root mean square of ours, in float64; None if unknown, and ``logits_note``
    says why. ``agrees``: the logits are equal.
    """

    module: str
    checkpoint: str
    rows: tuple[MappingRow, ...]
    unfilled: dict[str, str]
    idle: dict[str, str]
    unused: dict[str, str]
    ambiguous: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    logits_error: float | None
    logits_note: str
    agrees: bool

    @property
    def ok(self) -> bool:
        """Whether every parameter is filled from one source or has no effect, and the logits agree."""
        return self.agrees and not (self.unfilled or self.ambiguous or self.problems)

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        return as_json({"ok": self.ok, **asdict(self)})

    def sections(self) -> Iterator[Section]:
        """Yield parameters with their sources (grouped if treated alike), problems, notes, verdict."""
        yield Section(note=(bold(self.checkpoint), "  into  ", bold(self.module)), for_pages=True)
        groups: dict[tuple[str, ...], list[MappingRow]] = {}
        for row in self.rows:
            alike = [re.sub(r"\d+", "#", text) for text in (row.name, row.transformation)]
            alike += [re.sub(r"^h\.\d+", "h.#", source) for source in row.sources]
            groups.setdefault(tuple(alike), []).append(row)
        for rows in groups.values():
            many = f"  ({len(rows)})" if len(rows) > 1 else ""
            sources = [_starred(list(texts)) for texts in zip(*(row.sources for row in rows), strict=True)]
            shown = ", ".join(sources[:3]) + (", ..." if len(sources) > 3 else "")
            words = f"{f'from {shown}; ' * bool(shown)}{_starred([row.transformation for row in rows])}"
            yield Section(note=f"{_starred([row.name for row in rows])}{many}", columns=("", ""), rows=[("  ", words)])
        yield Section(note="")
        for sign, sentences in (
            ("?", self.ambiguous),
            ("✗", self.problems),
            ("✗", _grouped(self.unfilled)),
            ("·", _grouped(self.idle)),
            ("·", self.notes),
        ):
            for sentence in sentences:
                yield Section(note=f"{sign}  {sentence}")
        error = "" if self.logits_error is None else f" (worst error {self.logits_error:.1e} in float64)"
        verdict = "EQUAL:" if self.ok else "NOT ALL IN PLACE, though" if self.agrees else "NOT EQUAL:"
        yield Section(note=f"\n{verdict} {self.logits_note}{error}")


def _starred(texts: list[str]) -> str:
    """Merge texts that differ only in numbers; each number that differs becomes a star."""
    parts = [re.split(r"(\d+)", text) for text in texts]
    if len({len(part) for part in parts}) > 1:
        return texts[0]
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*parts, strict=True))


def _grouped(reasons: dict[str, str]) -> list[str]:
    """Return one sentence for each reason and kind of name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((re.sub(r"\d+", "#", name), reason), []).append(name)
    return [f"{_starred(names)} left as it is: {reason}" for (_, reason), names in groups.items()]
