"""Which of many hypotheses a port follows: the first whose value is found in the pool, and that what follows bears out.

That a value is in the pool is not enough where it would be there anyway (a norm left out hands on what was there before), so
every choice is borne out by an anchor: a value that only follows from it, such as what a projection makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.port.diagnosis.hypotheses import Finding
from gpt2.port.recording.pool import Match, Pool

EXACT = 1e-13  # a match as good as this needs no better one
BLIND = 48  # of options that are not seen themselves, how many are tried for what follows from them


@dataclass
class Option:
    """Something a port may compute at a place: how, what is wrong if it does, and what it is computed from.

    ``label`` is the same in every block, so that what one block does is tried first in the next. ``silent`` if its value is in
    the pool whether or not the port means it here. ``values`` are traced points that are known if this is so.
    """

    label: str
    make: Callable[[], Tensor]
    findings: tuple[Finding, ...] = ()
    silent: bool = False
    base: Any = None
    cost: float = 0.0
    values: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def value(self) -> Tensor:
        return self.make()

    def seen_as(self, value: Tensor) -> Option:
        """The same, with the port's own numbers for its value."""
        return replace(self, make=lambda: value)

    @property
    def price(self) -> float:
        """How much has to be wrong."""
        return self.cost + len(self.findings) + (self.base.price if isinstance(self.base, Option) else 0.0)

    @property
    def path(self) -> str:
        return f"{self.base.path} | {self.label}" if isinstance(self.base, Option) else self.label


class Choice(NamedTuple):
    """The option that was taken; the port's own value of it; how far it was off; what bore it out; and how far off what would
    have been right there is, if that is something else."""

    option: Option
    value: Tensor
    error: float | None
    result: Any
    missed: float | None = None


class Chooser:
    """Chooses among options, and remembers what was chosen before at the same kind of place."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.known: dict[str, list[str]] = {}
        self.labels: set[str] = set()

    def choose(
        self, place: str, options: Iterable[Option], anchor: Callable[[Option, Tensor], Any], axes: tuple[int, ...]
    ) -> Choice | None:
        """The cheapest option that ``anchor`` bears out: it is given the option and its value, and returns None if not so."""
        known = self.known.setdefault(place, [])
        rank = {label: number for number, label in enumerate(known)}
        ordered = sorted(options, key=lambda o: (o.price > 0, rank.get(o.path, len(rank)), o.label not in self.labels, o.price))
        nearly: list[tuple[float, int, Option, Match]] = []
        unseen: list[Option] = []
        chosen = None
        for number, option in enumerate(ordered):
            match = self.pool.find(option.value, *axes)
            if option.silent or (match is None and option.price == 0):
                if (result := anchor(option, option.value)) is not None:
                    chosen = Choice(option, option.value, None if match is None else match.error, result)
                    break
            elif match is None:
                unseen.append(option)
            elif match.error > EXACT:
                nearly.append((match.error, number, option, match))
            else:
                chosen = self._borne_out(option, match, anchor)
                if chosen is not None:
                    break
        if nearly and (chosen is None or chosen.option.price > 0):
            best = min(error for error, *_ in nearly)
            near = sorted(nearly, key=lambda one: (one[0] > 10 * best, one[1]))
            found = next((c for _, _, option, match in near if (c := self._borne_out(option, match, anchor)) is not None), None)
            if chosen is None or (found is not None and found.option.price < chosen.option.price and found.error < 1e-12):
                chosen = found
        for option in unseen[:BLIND] if chosen is None else ():
            if (result := anchor(option, option.value)) is not None:
                chosen = Choice(option, option.value, None, result)
                break
        if chosen is not None and chosen.option.path not in rank:
            known.append(chosen.option.path)
            self.labels.add(chosen.option.label)
        if chosen is not None and chosen.option.findings:
            right = next((o for o in ordered if o.label == "right" and o.base is chosen.option.base), None)
            right = right or next((o for o in ordered if o.label == "right"), None)
            if right is not None:
                chosen = chosen._replace(missed=worst_relative_error(right.value, chosen.value))
        return chosen

    def _borne_out(self, option: Option, match: Match, anchor: Callable[[Option, Tensor], Any]) -> Choice | None:
        value = self.pool.adopt(option.value, match)
        result = anchor(option, value)
        return None if result is None else Choice(option, value, match.error, result)

    def likely(self, place: str, options: Iterable[Option]) -> list[Option]:
        """Those with which nothing is wrong, and those that were borne out at such a place before."""
        return [option for option in options if option.price <= 0 or option.path in self.known.get(place, ())]

    def remember(self, place: str, option: Option | None) -> None:
        known = self.known.setdefault(place, [])
        if option is not None and option.path not in known:
            known.append(option.path)

    def seen(self, options: Iterable[Option], axes: tuple[int, ...]) -> list[Option]:
        """Those whose values are in the pool, with the port's own numbers; and the one that is right, seen or not."""
        kept = []
        for option in options:
            match = self.pool.find(option.value, *axes)
            if match is not None:
                option = option.seen_as(self.pool.adopt(option.value, match))
            if match is not None or option.price == 0:
                kept.append(option)
        return kept
