"""The report of :func:`gpt2.load_into`, and what it lists: departures as causes, what is left over in module and checkpoint."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from gpt2.checkpoint.keys import layer as layer_of
from gpt2.pages.reports import Printed, Section, as_json, bold
from gpt2.port.mapping.departures import missing_entries, other_sizes, rows_apart, structural_causes, vocabulary
from gpt2.port.mapping.mapping import WeightMap
from gpt2.port.recording.dataflow import Holder
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import Place, forward_rank
from gpt2.port.terms.ranking import merge_blocks


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
        listed = (self.ambiguous, self.problems, _grouped(self.unfilled), _grouped(self.idle), self.notes)
        for sign, sentences in zip("?✗✗··", listed, strict=True):
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


@dataclass
class Remarks:
    """What a report lists; ``neutral``: tensors with a bias of zero or a scale of one where the port has no place."""

    mapping: WeightMap
    state: Mapping[str, Tensor]
    unfilled: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    ambiguous: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    neutral: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.anatomy = anatomy = self.mapping.anatomy
        causes = list(structural_causes(self.mapping))
        for cause in causes:
            self.unfilled |= {place.name: cause.detail for place in cause.places if cause.id == "extra-norm"}
        self.problems += [f"your {what} is {size:,}, the checkpoint's {of:,}" for what, size, of in other_sizes(self.mapping)]
        self.problems += [apart] if (apart := rows_apart(anatomy)) else []
        unnormed = {place for cause in causes if cause.id in ("norm-missing", "final-norm-missing") for place in cause.places}
        listed = [cause for cause in (*causes, *self._missing(unnormed)) if cause.id != "extra-norm"]
        layers = self.mapping.config.n_layer
        merged = sorted(merge_blocks(listed, layers), key=lambda cause: forward_rank(cause.place, layers))
        self.problems += map(in_a_line, merged)
        left = "is a buffer and no parameter: it is left as it is"
        self._in_buffers = [f"your {part.part} ({name}) {left}" for part, name in self.mapping.in_buffers]
        self.problems += self._in_buffers
        size, words = self.mapping.config.vocab_size, vocabulary(anatomy)
        if words > size:
            self.notes.append(f"your vocabulary is padded from {size:,} to {words:,} entries: the rest is zero")
        if anatomy.head is None:
            self.notes.append("your forward returns no logits: its hidden states are compared with ours")
        if anatomy.recording.unfollowed:
            self.notes.append(f"not followed: {', '.join(anatomy.recording.unfollowed)}")

    def _missing(self, unnormed: set[Place]) -> list[Cause]:
        """Return what the checkpoint has and the port does not, if it has an effect; set ``unused`` and ``neutral``.

        The scales and shifts of norms that are missing, ``unnormed``, are not listed.
        """
        causes = []
        misfits = {self.mapping.target(part) for part in self.mapping.misfits}
        for missing in missing_entries(self.mapping.placed, self.state):
            name, layer, placed = missing.name, layer_of(missing.name), self.mapping.placed[missing.name]
            if layer is not None and layer not in self.anatomy.layers:
                self.unused[name] = "a block that your module does not run"
            elif name in misfits:
                self.unused[name] = "of another size in your module"
            elif layer is None and placed.ndim > 1:
                rows, every = int(placed.all(1).sum()), len(placed)
                self.unused[name] = f"rows {rows}:{every}" if rows else "all of it"
                if name == "wpe.weight" and rows:
                    words = f"your module has {rows:,} positions, the checkpoint {every:,}: the first {rows:,} are filled"
                    self.notes.append(words)
                elif name == "wpe.weight":
                    self.neutral[name] = torch.zeros_like(self.state[name])
            else:
                part = "in part" if placed.any() else "all of it"
                self.unused[name] = " and ".join(missing.shares) if 0 < len(missing.shares) < 3 else part
                if not missing.norm:
                    self.unused[name] += ": without effect"
                elif Place(layer, Place.of(name).stem) not in unnormed:
                    causes.append(missing.cause())
                if missing.neutral is not None:
                    self.neutral[name] = missing.neutral
        return causes

    def left_over(self, filled: list[tuple[Holder, MappingRow | None, str]]) -> None:
        """Report the parameters that were not filled, not completely filled, or used in two ways."""
        for source, row, left in filled:
            first, *others = self.mapping.uses(source)
            if others and row is not None:
                self.ambiguous.append(f"{source.name} is used {first} and {others[0]}; it is filled for the first")
            if left and source.name not in self.unfilled:
                self._left_out(source, row is None, left)
        alike: dict[str, list[str]] = {}  # parameters that serve as two parts with different weights
        for conflict in self.mapping.conflicts:
            if not torch.equal(*(self.mapping.values(some, self.state) for some in (conflict.taken, conflict.refused))):
                one_part, other = (self.mapping.place(int(entries[0])) for entries in (conflict.taken, conflict.refused))
                if one_part != other:  # else of another head: a departure
                    words = f"{conflict.source} serves as {one_part} and as {other}, which differ; it holds the first"
                    alike.setdefault(re.sub(r"\d+", "#", words), []).append(words)
        self.ambiguous += [words + (f"; so do {len(rest)} more" if rest else "") for words, *rest in alike.values()]

    def _left_out(self, source: Holder, whole: bool, words: str) -> None:
        positions = self.anatomy.positions
        if whole and source.storage not in self.anatomy.recording.uses:
            self.idle[source.name] = "never used in the forward pass"
        elif whole:
            self.unfilled[source.name] = self._why(source)
        elif positions is not None and self.anatomy.recording.name(int(positions.ids[0])) == source.name:
            words = f"{source.name} has more rows than the checkpoint's {self.mapping.config.n_positions:,} positions fill"
            self.notes.append(f"{words}: the rest is left as it is")
        else:
            self.unfilled[source.name] = f"in part ({words})"

    def _why(self, source: Holder) -> str:
        if source.region.overlaps(torch.tensor(list(self.anatomy.adapters))):
            return "a pair of low rank beside a projection, which GPT-2 does not have"
        misfit = next((part for part in self.mapping.misfits if source.region.overlaps(part.ids)), None)
        if misfit is None:
            return "used in the forward pass, but as no part of GPT-2 that is known here"
        beyond = misfit.layer not in (None, *range(self.mapping.config.n_layer))
        return "the checkpoint has no such block" if beyond else "of another size in the checkpoint"

    def settle(self, agrees: bool) -> None:
        """If the logits agree, turn problems about parameters left unchanged into notes: they have no effect."""
        if agrees:
            whole = {name: why for name, why in self.unfilled.items() if not why.startswith("in part")}
            self.idle |= {name: f"{why}; without effect as it is" for name, why in whole.items()}
            self.unfilled = {name: why for name, why in self.unfilled.items() if name not in whole}
            self.problems = [problem for problem in self.problems if problem not in self._in_buffers]
            self.notes += self._in_buffers  # such as a bias of zeros


def in_a_line(cause: Cause) -> str:
    """Return a cause as a line of a report: its id, its places, and what the port does there."""
    return f"{cause.id} at {cause.where}: {cause.detail}"
