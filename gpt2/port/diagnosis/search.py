"""Choose the hypothesis that a port follows: the cheapest that is recorded and that the next stage confirms.

A recorded value is not proof: if a norm is left out, its input is recorded anyway. So a value that only follows from the choice,
such as the next projection's result, must confirm it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.port.diagnosis.places import Place
from gpt2.port.recording.pool import Match, Pool

MAX_UNSEEN = 48  # how many options without a recorded value are tried
Result = TypeVar("Result")
Formula = Callable[[Tensor], Tensor]
Confirm = Callable[[Tensor], Result | None]  # returns a recorded result that follows from the value, or None
Axes = tuple[int, ...]  # axes along which a port may split a value


@dataclass(frozen=True)
class Fault:
    """One fault: a cause's id, the part of the block (or the point outside the blocks), and what the port does.

    Faults of one id and ``kind`` are one fault in several places, for a ``detail`` that names a block. ``norm_after``: the norm
    ("ln_1", "ln_2") that may have moved from before the branch to after it. ``fitted``: a factor was fitted. ``layer``: the
    running block's number, None outside. ``error``: of the match that shows the fault. ``fix``: the corrected line, if it is not
    that of the table. ``share``: "q", "k" or "v", if only that third of c_attn is concerned. ``leaf``: "bias", if only a
    layer's bias is. ``head``: the one that stands for all heads.
    """

    id: str
    part: str
    detail: str
    kind: str = ""
    norm_after: str = ""
    fitted: bool = False
    layer: int | None = None
    error: float | None = None
    fix: str | None = None
    share: str = ""
    leaf: str = ""
    head: int | None = None

    @property
    def place(self) -> Place:
        return replace(Place.at(self.layer, self.part), share=self.share)


class Kind(Enum):
    RIGHT = auto()  # GPT-2's own formula
    NO_NORM = auto()  # the stream enters a branch without a norm
    NORM_AFTER = auto()  # a norm behind a branch
    PARALLEL = auto()  # the feed-forward takes the stream before attention
    OTHER = auto()


@dataclass
class Option:
    """A value that a port may compute at a place: the formula, its faults, and the option that it starts from.

    ``label``: equal in all blocks, so that one block's choice is tried first in the next. ``silent``: the value is recorded
    whether or not the port uses it here. ``values``: traced points known if this holds. ``factor``: of attention's scores.
    """

    label: str
    make: Callable[[], Tensor]
    faults: tuple[Fault, ...] = ()
    kind: Kind = Kind.OTHER
    silent: bool = False
    base: Option | None = None
    cost: float = 0.0
    values: dict[str, Tensor] = field(default_factory=dict)
    factor: float | None = None

    @cached_property
    def value(self) -> Tensor:
        return self.make()

    @classmethod
    def known(cls, label: str, value: Tensor, *faults: Fault, **fields: Any) -> Option:
        """Return an option with a computed value that starts from no option."""
        return cls(label, lambda: value, faults, **fields)

    def then(self, label: str, formula: Formula, *faults: Fault, **fields: Any) -> Option:
        return Option(label, lambda: formula(self.value), faults, base=self, **fields)

    def seen_as(self, value: Tensor) -> Option:
        """Return this option with the port's own numbers as its value."""
        return replace(self, make=lambda: value)

    @property
    def price(self) -> float:
        """The cost of this option's faults."""
        return self.cost + len(self.faults) + (0.0 if self.base is None else self.base.price)

    @property
    def path(self) -> tuple[str, ...]:
        """The labels of the options that lead to this one, and its own."""
        return (self.label,) if self.base is None else (*self.base.path, self.label)

    @property
    def is_faultless(self) -> bool:
        return not self.faults and (self.base is None or self.base.is_faultless)

    @property
    def is_parallel(self) -> bool:
        return self.kind is Kind.PARALLEL or (self.base is not None and self.base.is_parallel)


class Recorded(NamedTuple):
    """A port's own value, the error of the match (None: not recorded), and the faults that this value shows."""

    value: Tensor
    error: float | None
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Choice(Generic[Result]):
    """The chosen option, the port's value, the match's error (None: not recorded), and the confirming result."""

    option: Option
    value: Tensor
    error: float | None
    result: Result
    missed: float | None = None  # the error of GPT-2's own formula here, if the port follows another


def against_right(chosen: Choice[Result], options: Iterable[Option]) -> Choice[Result]:
    """Return a choice with the error of GPT-2's own formula, which is among ``options``, if the port follows another."""
    rights = [option for option in options if option.kind is Kind.RIGHT] if chosen.option.faults else []
    alike = (o for o in rights if o.base is chosen.option.base and o.factor == chosen.option.factor)
    right = next(alike, next(iter(rights), None))
    return chosen if right is None else replace(chosen, missed=worst_relative_error(right.value, chosen.value))


class Chooser:
    """Chooses among options, and remembers earlier choices at the same kind of place."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.known: dict[str, list[tuple[str, ...]]] = {}
        self.labels: set[str] = set()

    def recorded(self, value: Tensor, axes: Axes) -> Recorded | None:
        """Return the port's own numbers for a value, if recorded, whole or sliced along ``axes``."""
        match = self.pool.find(value, *axes)
        return None if match is None else Recorded(self.pool.adopt(value, match), match.error)

    def choose(
        self, place: str, options: Iterable[Option], confirm: Confirm[Result], axes: Axes, max_unseen: int = MAX_UNSEEN
    ) -> Choice[Result] | None:
        """Return the cheapest option with a value that ``confirm`` accepts (by returning a result); None if there is none."""
        known = self.known.setdefault(place, [])
        rank = {path: number for number, path in enumerate(known)}
        ordered = sorted(options, key=lambda o: (o.price > 0, rank.get(o.path, len(rank)), o.label not in self.labels, o.price))
        chosen = self._first(place, ordered, confirm, axes, max_unseen)
        if chosen is None:
            return None
        if chosen.option.path not in rank:
            known.append(chosen.option.path)
            self.labels.add(chosen.option.label)
        return against_right(chosen, ordered)

    def _first(
        self, place: str, ordered: list[Option], confirm: Confirm[Result], axes: Axes, max_unseen: int
    ) -> Choice[Result] | None:
        def confirmed(option: Option, match: Match | None) -> Choice[Result] | None:
            value = option.value if match is None or option.silent else self.pool.adopt(option.value, match)
            result = confirm(value)
            return None if result is None else Choice(option, value, None if match is None else match.error, result)

        near: list[tuple[int, Option, Match]] = []
        unseen: list[Option] = []
        chosen: Choice[Result] | None = None
        for number, option in enumerate(ordered):
            match = self.pool.find_at(place, option.value, *axes)
            if match is not None and option.price > 0 and match.error > self.pool.fault_bound(place):
                continue
            if match is None and option.price != 0 and not option.silent:
                unseen.append(option)
            elif match is not None and match.error > self.pool.exact and not option.silent:
                near.append((number, option, match))
            elif (chosen := confirmed(option, match)) is not None:
                break
        if near and (chosen is None or chosen.option.price > 0):
            best = min(match.error for _, _, match in near)
            for _, option, match in sorted(near, key=lambda one: (one[2].error > 10 * best, one[0])):
                if (nearest := confirmed(option, match)) is not None:
                    if chosen is None or (option.price < chosen.option.price and match.error < 1e-12):
                        chosen = nearest
                    break
        for option in unseen[:max_unseen] if chosen is None else ():
            if (chosen := confirmed(option, None)) is not None:
                break
        return chosen

    def likely(self, place: str, options: Iterable[Option]) -> list[Option]:
        """Return the options without a fault, and those chosen at such a place before."""
        return [option for option in options if option.price <= 0 or option.path in self.known.get(place, ())]

    def remember(self, place: str, option: Option | None) -> None:
        known = self.known.setdefault(place, [])
        if option is not None and option.path not in known:
            known.append(option.path)

    def seen(self, options: Iterable[Option], axes: Axes, others: Iterable[Option] = ()) -> list[Option]:
        """Return the options with recorded values, as the port's own numbers, and the right one in any case.

        If the right one alone is left, and not recorded, return for a dump those of ``others`` before it that are recorded. The
        right one stays: a wrong norm of it that is recorded looks like another stream. A module's pool holds every tensor, a
        norm's inner ones too, so that this proves nothing there.
        """
        kept, unseen = [], []
        for option in options:
            if (recorded := self.recorded(option.value, axes)) is not None:
                kept.append(option.seen_as(recorded.value))
            elif option.price == 0 or (self.pool.allowance and option.is_faultless):
                unseen.append(option)
        wrong = [one for one in others if one.price > 0 and not one.silent] if self.pool.allowance else []
        better = self.seen(wrong, axes) if unseen and not kept else []
        return [*better, *kept, *unseen]
