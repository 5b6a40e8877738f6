"""List what a program may do otherwise than GPT-2: each known fault in all blocks, in one, in some, or outside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from gpt2.port.alternatives import table
from gpt2.port.alternatives.alternative import IN_PROMPT, IN_STEPS, Alternative, Schedule, Which, scheduled
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.alternatives.outside import orders, standing
from gpt2.port.alternatives.schedule import prompts, stepped
from gpt2.port.dump.part import Part
from gpt2.port.graph import ROWS


class Faults:
    """What may be wrong in a part. ``plain``: formulas; ``steps``: what shows only in several calls."""

    def __init__(self, part: Part) -> None:
        self.part, self.model, self.tokens = part, part.model, part.model.ids.shape[1]
        self.is_first, self.small = part.entrance is None, part.model.small
        every = self.model.always("alternatives", lambda: table(self.model))
        self.plain, self.steps = ([one for one in every if one.steps == steps] for steps in (False, True))

    def everywhere(self, one: Alternative) -> Candidate:
        """Return an alternative in all blocks of the part."""
        return Candidate(tuple((one, n) for n in self.part.blocks) if one.edits else ((one, None),))

    def singles(self) -> Iterator[Candidate]:
        """Yield every fault alone, in the blocks of the part and in what surrounds them there; of a large model, rare faults
        in all blocks alone."""
        part, layers, several = self.part, self.model.config.n_layer, len(self.part.blocks) > 1
        for one in self.plain:
            begins, around = "embed" in one.outside, bool(one.outside)
            inside, outside = self.everywhere(one), self.is_first if begins else part.is_last
            if around and outside and not (one.edits and begins):
                yield Candidate(((one, None),))
            if one.edits and several:
                yield inside
            if one.edits and several and around and (self.is_first or not begins) and part.is_last:
                yield replace(inside, sites=(*inside.sites, (one, None)))
            if one.edits and part.is_last and self.is_first and self.small:
                some = (group for group in scopes(layers) if one.shared or (len(group) > 1 and not one.rare))
                yield from (Candidate(tuple((one, n) for n in group)) for group in some)
            if one.edits and (self.small or not one.rare) and not (several and one.shared):
                yield from (Candidate(((one, n),)) for n in part.blocks)
        if part.all_blocks:
            yield from (Candidate(order=order) for order in orders(layers))

    def in_calls(self, some: Iterable[Alternative], how: Schedule) -> list[Candidate]:
        """Return alternatives in a text that is read in calls, in all blocks of the part."""
        return [self.everywhere(scheduled(one, how)) for one in some]

    def mixing(self) -> list[Alternative]:
        """Return what differs in a text that is read in calls."""
        some = (one for one in (*self.plain, *self.steps) if (one.sees or one.steps) and one.sees != ROWS)
        return [one for one in some if self._is_inside(one)]

    def in_steps(self, lengths: Iterable[int]) -> Iterator[Candidate]:
        """Yield what shows only in single tokens behind a prompt of one of these lengths."""
        some = [one for one in self.steps if self._is_inside(one)]
        for how in prompts(self.model):
            yield from self.in_calls(some, how) if how.calls[0][1] in lengths else ()

    def since(self, token: int) -> list[Candidate]:
        """Return every fault of a formula in the tokens from ``token`` on."""
        how = Schedule(IN_STEPS.format(token), stepped(token, self.tokens), Which.LATER)
        some = (one for one in (*self.plain, *standing(self.model)) if not (one.rare or one.shared) and self._is_inside(one))
        return [self.everywhere(_in_some(one, how)) for one in some]

    def until(self, token: int, some: Iterable[Alternative]) -> list[Candidate]:
        """Return alternatives in a prompt of ``token`` tokens alone."""
        how = Schedule(IN_PROMPT.format(token), stepped(token, self.tokens), Which.FIRST)
        return [self.everywhere(_in_some(one, how)) for one in some if one.edits and not one.steps]

    def _is_inside(self, one: Alternative) -> bool:
        return bool(one.edits) or (self.is_first and "embed" in one.outside)


def _in_some(one: Alternative, how: Schedule) -> Alternative:
    """Return an alternative in some calls; where it is the same in calls of any length, the later ones are one."""
    (_, end), (_, last) = how.calls[0], how.calls[-1]
    return scheduled(one, how if one.sees else replace(how, calls=((0, end), (end, last))))


def scopes(layers: int) -> list[tuple[int, ...]]:
    """Return the groups of blocks that a mistake may be in: every other block, all but the first, all but the last."""
    every = tuple(range(layers))
    parts = dict.fromkeys((every[1::2], every[::2], every[1:], every[:-1])) if layers > 1 else {}
    return [part for part in parts if len(part) < layers]
