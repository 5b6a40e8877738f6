"""Find the faults with which our own forward pass gives a program's values, between two streams that the program shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpt2.measure.metrics import Progress
from gpt2.port.alternative import Alternative, scheduled
from gpt2.port.alternatives.schedule import is_prompt, schedules
from gpt2.port.deadline import Deadline
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.evaluate import Evaluator
from gpt2.port.dump.fitting import fitted
from gpt2.port.dump.lenses import Lens, Lenses, Nearness
from gpt2.port.dump.segments import BETTER, Fit, Segment
from gpt2.port.dump.table import Table
from gpt2.port.graph import ROWS, Program

MAX_CONFIRMED = {True: 40, False: 12}  # candidates that are computed exactly, by whether the model is small
LATE_CONFIRMED = 3  # the nearest, which are computed even after the deadline
SIEVED = 5e-5  # the largest error of a fit in float32, on few tokens, beside the tolerance
BATCH = 1024  # candidates that are ranked together
LATER = 2  # the least token from which on faults of later tokens alone are tried: to the first, many faults change nothing
LAG = 2  # tokens behind the first call, until which a fault of later calls shows
FEW_LEFT = 8  # faults in calls that are run whole
CLOSE = 8.0  # times the tolerance: an error that a fitted number may take away by chance
QUANTISED = 2.0  # the largest error, over the root mean square, that integers of four bits and more are tried for
Ranked = list[tuple[Nearness, Candidate]]


class Search:
    """Looks for the one fault that explains a segment."""

    def __init__(self, segment: Segment, deadline: Deadline, progress: Progress) -> None:
        self.segment, self.deadline, self.progress = segment, deadline, progress
        self.table = segment.model.always("faults", lambda: Table.of(segment.model))
        self.lenses = Lenses(segment.model, segment.span)
        self.small, self.complete = self.lenses.small, True
        self.blocks = range(segment.first, segment.last)
        self.wrong = segment.wrong_tokens() if self.small else []
        # how far a candidate that is run in float32 may be from the program
        self.limit = (2 * segment.allowed(segment.end) + SIEVED) * float(segment.shown[segment.end].square().mean().sqrt())

    def late(self) -> bool:
        return self.deadline.passed

    def fits(self) -> list[Fit]:
        """Return the candidates that explain the segment, the simplest first."""
        ranked: Ranked = []
        for some in self._groups():  # of a large model, most faults are common ones, in all blocks or outside them
            ranked = sorted([*ranked, *self._ranked(some, "single faults")], key=lambda one: one[0].fit)
            self.complete &= not self.late()
            if fits := self._confirmed(ranked, Candidate()):
                return fits
        ways = (self._since, self._in_calls, self._fitted, self._quantised)
        return next((fits for way in ways if not self.late() and (fits := way())), [])

    def _groups(self) -> Iterator[list[Candidate]]:
        """Yield the faults that are tried one after the other."""
        every = [Candidate(), *self.table.singles(self.segment, self.small)]
        if not self.small:
            kinds = ((local, rare) for local in (False, True) for rare in (False, True))
            yield from ([one for one in every if (one.is_local, one.rare) == kind] for kind in kinds)
            return
        # a fault of later calls alone shows soon behind the first one: others of them cannot be the only fault
        near = range(self.wrong[0] - LAG, self.wrong[0] + 1) if self.wrong else ()
        yield [one for one in every if not near or any(begins(one, token) for token in near)]

    def _since(self) -> list[Fit]:
        """Return the faults of later tokens alone that explain the segment, if those before them are right."""
        wrong = self.segment.wrong_tokens()
        if not wrong or wrong[0] < LATER:
            return []
        return self._all(self.table.since(self.segment.model, wrong[0], self.segment), f"faults from token {wrong[0]} on")

    def _in_calls(self) -> list[Fit]:
        """Return the faults that explain the segment in a text that is read in several calls: in all of them, or in the first.

        What a call computes does not depend on later ones. So a fault must give the first call's tokens, then the first two's.
        """
        segment, tokens = self.segment, self.lenses.tokens
        if not (self.small and self.lenses.shows_all):
            return []
        first = self.wrong[0] if self.wrong else tokens
        plain = (one for one in (*self.table.blocks, *self.table.embeddings) if one.calls is None and one.sees != ROWS)
        every = {one.label: one for one in (*plain, *self.table.steps) if one.edits or segment.entrance is None}
        mixing = {label: one for label, one in every.items() if (one.sees or one.steps) and not one.crosses}
        crossing = [one for one in every.values() if one.crosses] if segment.all_blocks and segment.from_start else []
        some: list[Candidate] = []
        for how in schedules(segment.model):
            if self.late():
                break
            end = how.calls[0][1]
            near = self._giving(end, mixing) if end > 1 else mixing
            if end > first and is_prompt(how) and end >= LATER:
                some += self.table.until(end, near, segment, tokens)
            inside = [scheduled(one, how) for one in near.values() if not (one.steps and is_prompt(how))]
            for count in (2, 3):
                if count < len(how.calls) and len(inside) > FEW_LEFT:
                    inside = [*self._giving(how.calls[count - 1][1], {one.label: one for one in inside}).values()]
            inside += [scheduled(one, how) for one in crossing if not is_prompt(how)]
            some += [self._everywhere(one) for one in inside]
        some += self._until([one for one in every.values() if one.edits and not (one.sees or one.steps)])
        return self._all(some, "faults of a text in several calls")

    def _everywhere(self, one: Alternative) -> Candidate:
        return Candidate(tuple((one, n) for n in self.blocks) if one.edits else ((one, None),))

    def _giving(self, tokens: int, some: Mapping[str, Alternative]) -> dict[str, Alternative]:
        """Return those of ``some`` that give the first row's first ``tokens`` as a text of their own."""
        lens = self.lenses.first(tokens)
        programs = [self._everywhere(one).program or Program() for one in some.values()]
        off = (Evaluator(lens, programs, self.deadline).alone() - lens.wanted).abs().amax((1, 2, 3))
        return {label: one for (label, one), near in zip(some.items(), (off <= self.limit).tolist(), strict=True) if near}

    def _until(self, some: Sequence[Alternative]) -> Iterator[Candidate]:
        """Yield faults of a prompt alone by which no token depends on later ones: of as many tokens as they give."""
        segment, lens, bound = self.segment, self.lenses.whole, self.segment.allowed(self.segment.end)
        runner = Evaluator(lens, [self._everywhere(one).program or Program() for one in some], self.deadline)
        for numbers, values in runner.values():
            right = (values - lens.wanted).abs().amax((1, 3)) <= 2 * bound * lens.wanted.square().mean().sqrt()  # (N, T)
            for number, length in zip(numbers.tolist(), right.cumprod(1).sum(1).tolist(), strict=True):
                if LATER <= length < right.shape[1] and length > (self.wrong[0] if self.wrong else 0):
                    yield from self.table.until(length, {some[number].label}, segment, right.shape[1])

    def _fitted(self) -> list[Fit]:
        """Return the faults with one fitted number that explain the segment: a factor of the scores, or an epsilon."""
        segment = self.segment
        if not self.small or segment.right_errors.get(segment.end, math.inf) <= CLOSE * segment.allowed(segment.end):
            return []
        fits = (segment.fit(one) for one in fitted(self.lenses.whole, self.blocks, self.deadline))
        return list(filter(None, [next(filter(None, fits), None)]))

    def _quantised(self) -> list[Fit]:
        """Return the matrices in integers that explain the segment, if all blocks are in it, or one."""
        segment = self.segment
        if not self.small or segment.right_errors.get(segment.end, math.inf) > QUANTISED:
            return []
        if not (segment.all_blocks or segment.last <= segment.first + 2):
            return []
        return self._all(self.table.quantised(segment.model, segment), "matrices in integers")

    def _ranked(self, candidates: Iterable[Candidate], words: str) -> Ranked:
        """Return candidates with their nearness, the nearest first; only those that were run before the deadline."""
        waiting: dict[Lens, list[tuple[Candidate, Program]]] = defaultdict(list)
        for one in candidates:
            program = Program() if one.is_right else one.program
            if program is not None and (one.is_right or self.segment.span.reaches(program)):
                waiting[self.lenses.of({two.sees for two, _ in one.sites})].append((one, program))
        ranked: Ranked = []
        for lens, some in waiting.items():
            for begin in range(0, len(some), BATCH):
                self.progress(f"{self.segment.end}: {len(ranked)} {words}")
                part = some[begin : begin + BATCH]
                near = Evaluator(lens, [program for _, program in part], self.deadline).nearness()
                ranked += [(near[number], one) for number, (one, _) in enumerate(part) if number in near]
        return sorted(ranked, key=lambda one: one[0].fit)

    def _all(self, candidates: Iterable[Candidate], words: str) -> list[Fit]:
        """Return the candidates that explain the segment."""
        return self._confirmed(self._ranked(candidates, words))

    def _confirmed(self, ranked: Ranked, *first: Candidate) -> list[Fit]:
        """Return the candidates that fit exactly, of those that may by their nearness, and of the ``first``, whatever it is."""
        segment = self.segment
        bound = 2 * segment.allowed(segment.end) + (1e-12 if self.small else SIEVED)
        if segment.span.softmaxed:
            bound = math.inf
        some = list(first)
        for number, (near, one) in enumerate(ranked[: MAX_CONFIRMED[self.small]]):
            if near.fit > max(bound, segment.right_errors[segment.end] / BETTER) or (number >= LATE_CONFIRMED and self.late()):
                break
            if (near.fit <= bound or one.rounds) and not one.is_right:  # a rounding alone may leave a few numbers as they are
                some.append(one)
        fits = [fit for one in some if (fit := segment.fit(one)) is not None]
        if tight := [fit for fit in fits if fit.error <= max(map(segment.allowed, segment.shown))]:
            fits = tight
        else:
            fits = sorted(fits, key=lambda fit: fit.error)[:1]
        known = [fit for fit in fits if all(fault.id != "untied-head" for fault in fit.candidate.head)]
        return sorted(
            known or fits, key=lambda fit: (fit.candidate.order_of_naming, fit.error)
        )  # a head's free weights hide other faults


def begins(one: Candidate, token: int) -> bool:
    """Return whether a fault may first show in the call that begins with a token; one that is not of calls may at any."""
    calls = next((two.calls for two, _ in one.sites if two.calls is not None and not two.at_once), None)
    return calls is None or calls[0][1] == token
