"""The report of :func:`gpt2.load_into`, as a frozen dataclass with a table and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gpt2.pages.reports import Printed, as_json

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Row:
    """One parameter of the module: which of the checkpoint's tensors fill it, what was done to them, and the evidence."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    transformation: str
    evidence: str


@dataclass(frozen=True)
class MappingReport(Printed):
    """The weights of ``checkpoint`` in ``module``.

    With the reasons: ``unfilled`` are the module's parameters that were left as they are, ``idle`` those of them that have no
    effect, ``unused`` the checkpoint's tensors without a place. ``ambiguous`` are parameters with two possible sources,
    ``problems`` what keeps the module from computing the checkpoint's model, ``notes`` the rest. ``logits_error`` is the worst
    difference of a logit from our model's, over the root mean square of ours, both in float64; None where it is unknown, and
    ``logits_note`` says why. ``agrees`` is whether the logits are equal.
    """

    module: str
    checkpoint: str
    rows: tuple[Row, ...]
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
        """Every parameter is filled, from one source, or has no effect; and the logits agree."""
        return self.agrees and not (self.unfilled or self.ambiguous or self.problems)

    def to_json(self) -> str:
        """Every parameter with its source, and all the rest of the report."""
        return as_json({"ok": self.ok, **asdict(self)})

    def parts(self) -> Iterator[RenderableType]:
        """Each kind of parameter with its source, what is wrong or worth knowing, and the verdict.

        Parameters whose names differ in numbers only, and that were treated alike, share an entry.
        """
        from rich.padding import Padding
        from rich.text import Text

        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            alike = [re.sub(r"\d+", "#", text) for text in (row.name, row.transformation)]
            alike += [re.sub(r"^h\.\d+", "h.#", source) for source in row.sources]
            groups.setdefault(tuple(alike), []).append(row)
        for rows in groups.values():
            many = f"  ({len(rows)})" if len(rows) > 1 else ""
            sources = [_starred(list(texts)) for texts in zip(*(row.sources for row in rows), strict=True)]
            shown = ", ".join(sources[:3]) + (", ..." if len(sources) > 3 else "")
            evidence = _starred([row.evidence for row in rows])
            words = f"from {shown}; {_starred([row.transformation for row in rows])}; {evidence}" if shown else evidence
            yield Text(f"{_starred([row.name for row in rows])}{many}")
            yield Padding(Text(words), (0, 0, 0, 4))
        yield ""
        for sign, sentences in (
            ("?", self.ambiguous),
            ("✗", self.problems),
            ("✗", _grouped(self.unfilled)),
            ("·", _grouped(self.idle)),
            ("·", self.notes),
        ):
            for sentence in sentences:
                yield Text(f"{sign}  {sentence}")
        error = "" if self.logits_error is None else f" (worst error {self.logits_error:.1e} in float64)"
        verdict = "EQUAL:" if self.ok else "NOT ALL IN PLACE, though" if self.agrees else "NOT EQUAL:"
        yield Text(f"\n{verdict} {self.logits_note}{error}")


def _starred(texts: list[str]) -> str:
    """Texts that differ only in numbers, as one text with a star in place of each number that differs."""
    parts = [re.split(r"(\d+)", text) for text in texts]
    if len({len(part) for part in parts}) > 1:
        return texts[0]
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*parts, strict=True))


def _grouped(reasons: dict[str, str]) -> list[str]:
    """A sentence for each reason why parameters are left as they are, and each kind of name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((re.sub(r"\d+", "#", name), reason), []).append(name)
    return [f"{_starred(names)} left as it is: {reason}" for (_, reason), names in groups.items()]
