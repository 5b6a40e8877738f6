"""Find the faults with which the model gives a program's values, between two streams that the program shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpt2.measure.metrics import Progress
from gpt2.port.alternative import Alternative, scheduled
from gpt2.port.alternatives.schedule import is_prompt, schedules
from gpt2.port.deadline import Deadline
from gpt2.port.dump.candidates import Candidate, Table
from gpt2.port.dump.evaluate import Evaluator, Lens, Lenses, Nearness
from gpt2.port.dump.fitting import fitted
from gpt2.port.dump.pairing import Pairing
from gpt2.port.dump.segments import BETTER, Fit, Segment
from gpt2.port.graph import ROWS, Program

MAX_CONFIRMED = 40  # candidates that are computed exactly
MAX_CONFIRMED_LARGE = 12
LATE_CONFIRMED = 3  # the nearest, which are computed even after the deadline
SIEVED = 5e-5  # the largest error of a fit in float32, on few tokens, beside the tolerance
BATCH = 1024  # candidates that are ranked together
LATER = 2  # the least token from which on faults of later tokens alone are tried: to the first, many faults change nothing
LAG = 2  # tokens behind the first call, until which a fault of later calls shows
FEW_LEFT = 8  # faults in calls that are run whole
FIRSTS = 120  # faults that pairs are built on
RARER = 30  # faults beside which rare ones are tried
CLOSE = 8.0  # times the tolerance: an error that a fitted number may take away by chance
QUANTISED = 2.0  # the largest error, over the root mean square, that integers of four bits and more are tried for
PAIRED = 1.25  # the part of the time for pairs on the first tokens
PAIRS = 400  # pairs of which the first row fits, that are ranked by all rows
DEEPER = 4  # pairs that triples are built on, for each of the first faults
Ranked = list[tuple[Nearness, Candidate]]


class Search:
    """Looks for the faults that explain a segment: single faults, then pairs and triples of the nearest ones."""

    def __init__(self, segment: Segment, table: Table, deadline: Deadline, progress: Progress) -> None:
        self.segment, self.deadline, self.progress = segment, deadline, progress
        self.lenses, self.table = Lenses(segment.model, segment.span), table
        self.singles = list(
            table.singles(
                segment.first,
                segment.last,
                segment.entrance is None,
                segment.is_last,
                self.lenses.small,
                segment.all_blocks,
                segment.from_start,
            )
        )
        wrong = segment.wrong_tokens() if self.lenses.small else []
        # a fault of later calls alone shows soon behind the first one: others of them cannot be the only fault
        self.waiting = {
            one.key for one in self.singles if wrong and not any(begins(one, t) for t in range(wrong[0] - LAG, wrong[0] + 1))
        }
        self.complete = True
        # how far a candidate that is run in float32 may be from the program
        self.limit = (2 * segment.allowed(segment.end) + SIEVED) * float(segment.shown[segment.end].square().mean().sqrt())

    def late(self) -> bool:
        return self.deadline.passed

    def fits(self, several: bool = True) -> list[Fit]:
        """Return the candidates that explain the segment, the simplest first; single faults only, unless ``several``."""
        if self.lenses.small:
            ranked = self._rank(
                [Candidate(), *(one for one in self.singles if one.key not in self.waiting)], None, "single faults"
            )
            fits = self._confirmed(ranked)
        else:  # most faults are in all blocks, or outside them
            local = [one for one in self.singles if one.is_local]
            ranked = self._rank([Candidate(), *(one for one in self.singles if not one.is_local)], None, "faults in all blocks")
            fits = self._confirmed(ranked)
            if not fits:
                ranked += self._rank(local, None, "faults in one block")
                fits = self._confirmed(sorted(ranked, key=lambda one: one[0].fit))
        fits = fits or self._since() or self._in_calls() or self._fitted() or self._quantised()
        if fits or self.late() or not several:
            return fits
        if self.lenses.small:
            waiting = [one for one in self.singles if one.key in self.waiting]
            ranked = sorted([*ranked, *self._rank(waiting, None, "faults of later calls")], key=lambda one: one[0].fit)
        return self._several(ranked)

    def _since(self) -> list[Fit]:
        """Return the faults of later tokens alone that explain the segment, if those before them are right."""
        segment = self.segment
        if (token := segment.first_wrong_token()) < LATER or self.late():
            return []
        late = self.table.since(segment.model, token, segment.first, segment.last, segment.entrance is None)
        return self._confirmed(self._rank(list(late), None, f"faults from token {token} on"), Candidate())

    def _in_calls(self) -> list[Fit]:
        """Return the faults that explain the segment in a text that is read in several calls: in all of them, or in the first.

        What a call computes does not depend on later ones. So a fault must give the first call's tokens, then the first two's.
        """
        segment, model = self.segment, self.segment.model
        blocks, tokens = range(segment.first, segment.last), model.ids.shape[1]
        if not (self.lenses.small and self.lenses.shows_pairs) or self.late():
            return []
        wrong = segment.wrong_tokens()
        first = wrong[0] if wrong else tokens
        plain = (one for one in (*self.table.blocks, *self.table.embeddings) if one.calls is None and one.sees != ROWS)
        every = {one.label: one for one in (*plain, *self.table.steps) if one.edits or segment.entrance is None}
        mixing = {label: one for label, one in every.items() if (one.sees or one.steps) and not one.crosses}
        crossing = [one for one in every.values() if one.crosses] if segment.all_blocks and segment.from_start else []
        some: list[Candidate] = []
        for how in schedules(model):
            if self.late():
                break
            end = how.calls[0][1]
            near = self._giving(end, mixing) if end > 1 else mixing
            if end > first and is_prompt(how) and end >= LATER:
                some += self.table.until([end], near, blocks.start, blocks.stop, tokens)
            inside = [scheduled(one, how) for one in near.values() if not (one.steps and is_prompt(how))]
            for count in (2, 3):
                if count < len(how.calls) and len(inside) > FEW_LEFT:
                    inside = [*self._giving(how.calls[count - 1][1], {one.label: one for one in inside}).values()]
            inside += [scheduled(one, how) for one in crossing if not is_prompt(how)]
            some += [self._everywhere(one) for one in inside]
        some += self._until([one for one in every.values() if one.edits and not (one.sees or one.steps)], wrong)
        return self._confirmed(self._rank(some, Candidate(), "faults of a text in several calls"), Candidate())

    def _everywhere(self, one: Alternative) -> Candidate:
        blocks = range(self.segment.first, self.segment.last)
        return Candidate(tuple((one, n) for n in blocks) if one.edits else ((one, None),))

    def _giving(self, tokens: int, some: Mapping[str, Alternative]) -> dict[str, Alternative]:
        """Return those of ``some`` that give the first row's first ``tokens`` as a text of their own."""
        lens = self.lenses.first(tokens)
        programs = [self._everywhere(one).program or Program() for one in some.values()]
        off = (Evaluator(lens, programs, self.deadline).alone() - lens.wanted).abs().amax((1, 2, 3))
        return {label: one for (label, one), near in zip(some.items(), (off <= self.limit).tolist(), strict=True) if near}

    def _until(self, some: Sequence[Alternative], wrong: Sequence[int]) -> list[Candidate]:
        """Return faults of a prompt alone by which no token depends on later ones: of as many tokens as they give.

        ``wrong``: the tokens whose value is not GPT-2's.
        """
        segment, lens = self.segment, self.lenses.whole
        wholes = [self._everywhere(one) for one in some]
        programs = [one.program for one in wholes]
        numbers = [number for number, program in enumerate(programs) if program is not None]
        bound, out = segment.allowed(segment.end), list[Candidate]()
        runner = Evaluator(lens, [programs[number] or Program() for number in numbers], self.deadline)
        for group, values in runner.values(runner.singles):
            right = (values - lens.wanted).abs().amax((1, 3)) <= 2 * bound * lens.wanted.square().mean().sqrt()  # (N, T)
            for number, length in zip(group.tolist(), right.cumprod(1).sum(1).tolist(), strict=True):
                if LATER <= length < right.shape[1] and length > (wrong[0] if wrong else 0):
                    label = some[numbers[number]].label
                    out += self.table.until([length], {label}, segment.first, segment.last, right.shape[1])
        return out

    def _fitted(self) -> list[Fit]:
        """Return the faults with one fitted number that explain the segment, such as a factor of the scores or of a branch."""
        segment = self.segment
        near = segment.right_errors.get(segment.end, math.inf) <= CLOSE * segment.allowed(segment.end)
        if near or not self.lenses.small or self.late():
            return []
        candidates = fitted(self.lenses.whole, range(segment.first, segment.last), self.deadline)
        return next((fits for one in candidates if (fits := list(segment.fits(one)))), [])

    def _quantised(self) -> list[Fit]:
        """Return the matrices in integers that explain the segment, if all blocks are in it, or one."""
        segment = self.segment
        near = segment.right_errors.get(segment.end, math.inf) <= QUANTISED
        if not (self.lenses.small and near) or self.late() or not (segment.all_blocks or segment.last <= segment.first + 2):
            return []
        wholes = self.table.quantised(segment.model, segment.first, segment.last, segment.all_blocks)
        return self._confirmed(self._rank(list(wholes), Candidate(), "matrices in integers"), Candidate())

    def _rank(self, candidates: list[Candidate], base: Candidate | None, words: str) -> Ranked:
        """Return the candidates with their nearness, the nearest first; ``base``: faults that each has beside its own."""
        waiting: dict[Lens, list[tuple[Candidate, Program]]] = defaultdict(list)
        for candidate in candidates:
            whole = candidate if base is None else base.with_(candidate)
            program = Program() if whole.is_right else whole.program
            if program is not None and (whole.is_right or self.lenses.span.reaches(program)):
                waiting[self.lenses.of({one.sees for one, _ in whole.sites})].append((candidate, program))
        ranked: Ranked = []
        for lens, some in waiting.items():
            for begin in range(0, len(some), BATCH):
                self.progress(f"{self.segment.end}: {len(ranked)} of {len(candidates)} {words}")
                part = some[begin : begin + BATCH]
                near = lens.nearness([program for _, program in part], self.deadline)
                ranked += [(near[number], candidate) for number, (candidate, _) in enumerate(part) if number in near]
        self.complete &= base is not None or not self.late()
        return sorted(ranked, key=lambda one: one[0].fit)

    def _confirmed(self, ranked: Ranked, base: Candidate | None = None) -> list[Fit]:
        """Return the candidates that fit exactly, of those that may by the sieve."""
        segment = self.segment
        bound = 2 * segment.allowed(segment.end) + (1e-12 if self.lenses.small else SIEVED)
        if segment.softmaxed:
            bound = math.inf
        fits: list[Fit] = []
        if base is None:  # its head may be another
            fits += segment.fits(Candidate())
        for number, (near, candidate) in enumerate(ranked[: MAX_CONFIRMED if self.lenses.small else MAX_CONFIRMED_LARGE]):
            if near.fit > max(bound, segment.right_errors[segment.end] / BETTER) or (number >= LATE_CONFIRMED and self.late()):
                break
            whole = candidate if base is None else base.with_(candidate)
            if near.fit > bound and not whole.rounds:  # a rounding alone may leave a few numbers as they are
                continue
            if base is not None or not candidate.is_right:
                fits += segment.fits(whole)
        if tight := [fit for fit in fits if fit.error <= max(map(segment.allowed, segment.shown))]:
            fits = tight
        else:
            fits = sorted(fits, key=lambda fit: fit.error)[:1]
        known = [fit for fit in fits if all(fault.id != "untied-head" for fault in fit.candidate.head)]
        return sorted(
            known or fits, key=lambda fit: (fit.candidate.order_of_naming, fit.error)
        )  # a head's free weights hide other faults

    def _several(self, ranked: Ranked) -> list[Fit]:
        """Return pairs of faults that explain the segment, or triples: the nearest faults, each with every other.

        Faults in all blocks or outside them come first: a mistake in one block alone is rarer, and there are more of them.
        """
        if fits := self._paired(ranked):
            return fits
        firsts = [one for one in _interleaved(ranked) if one.order is None and not one.is_right]
        wide = [one for one in firsts if not one.is_local]
        common = [one for one in self.singles if not one.rare]
        everywhere = [one for one in common if not one.is_local]
        rounds = [(wide, everywhere)] if len(everywhere) < len(common) else []
        rounds += [(firsts, common), (firsts[:RARER], [one for one in self.singles if one.rare])]
        deeper: list[Candidate] = []
        for some, seconds in rounds:
            for number, first in enumerate(some[:FIRSTS]):
                pairs = self._beside(first, seconds, f"faults beside the nearest, number {number + 1}")
                if fits := [fit for fit in self._confirmed(pairs, first) if self.segment.needs(fit, first)]:
                    return fits
                if self.late():
                    return []
                wholes = (first.with_(second) for second in _interleaved(pairs)[:DEEPER] if second.order is None)
                deeper += [whole for whole in wholes if whole.program is not None]
        for number, pair in enumerate(deeper):
            if fits := self._confirmed(self._beside(pair, common, f"faults beside a pair, number {number + 1}"), pair):
                return fits
            if self.late():
                break
        return []

    def _beside(self, first: Candidate, seconds: Iterable[Candidate], words: str) -> Ranked:
        return self._rank([one for one in seconds if first.allows(one)], first, words)

    def _paired(self, ranked: Ranked) -> list[Fit]:
        """Return pairs of common faults that explain the segment, of all that give the first row."""
        if not self.lenses.small:
            return []
        for pairs in Pairing(self.lenses, ranked, self.limit, self.deadline.part(PAIRED)).rounds():
            wholes = [one.with_(other) for one, other in pairs[:PAIRS]]
            firsts = {whole.key: one for whole, (one, _) in zip(wholes, pairs, strict=False)}
            fits = self._confirmed(self._rank(wholes, Candidate(), "pairs of faults"), Candidate())
            if fits := [fit for fit in fits if self.segment.needs(fit, firsts[replace(fit.candidate, head=()).key])]:
                return fits
        return []


def begins(one: Candidate, token: int) -> bool:
    """Return whether a fault may first show in the call that begins with a token; one that is not of calls may at any."""
    calls = next((two.calls for two, _ in one.sites if two.calls is not None and not two.at_once), None)
    return calls is None or calls[0][1] == token


def _interleaved(ranked: Ranked) -> list[Candidate]:
    """Return candidates in turn from the rankings by each measure of nearness."""
    by_log = sorted(ranked, key=lambda one: one[0].log)
    by_angle = sorted(ranked, key=lambda one: one[0].angle)
    by_first = sorted(ranked, key=lambda one: one[0].first)
    once: dict[int, Candidate] = {}
    for several in zip(by_log, by_angle, by_first, strict=True):
        for _, candidate in several:
            once.setdefault(id(candidate), candidate)
    return list(once.values())
