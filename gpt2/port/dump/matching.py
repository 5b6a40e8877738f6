"""Find the faults with which our own forward pass gives a program's values, between two streams that the program shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from gpt2.measure.metrics import Progress
from gpt2.port.alternatives.alternative import Alternative
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.alternatives.schedule import is_prompt, schedules
from gpt2.port.dump.batch import Batch
from gpt2.port.dump.known import Faults
from gpt2.port.dump.part import BETTER, Fitting, Part
from gpt2.port.graph import ROWS, TEXT
from gpt2.port.terms.budget import Budget

MAX_CONFIRMED = {True: 40, False: 12}  # candidates that are computed exactly, by whether the model is small
LATE_CONFIRMED = 3  # the nearest, which are computed even where the budget is spent
SIEVED = {
    True: 1e-12,
    False: 5e-5,
}  # the largest error of a fit on few tokens, beside the tolerance; of a large model, in float32
LATER = 2  # the least token from which on faults of later tokens alone are tried: to the first, many faults change nothing
LAG = 2  # tokens behind the first call, until which a fault of later calls shows
FEW_LEFT = 8  # faults in calls that are run whole
FEW = 4  # tokens of a large model that are compared, where a token's values depend on earlier tokens alone
SINGLE = "single faults"
Ranked = list[tuple[float, Candidate]]


class PartSearch:
    """Looks for the one fault that explains a part; ``untried``: the kinds of faults of which not all were tried."""

    def __init__(self, part: Part, budget: Budget, progress: Progress) -> None:
        self.part, self.budget, self.progress = part, budget, progress
        self.faults, self.small, self.wrong = Faults(part), part.model.small, part.wrong_tokens
        self.untried: tuple[str, ...] = ()
        self.bound = 2 * part.allowed(part.end) + SIEVED[self.small]
        self.ranked: Ranked = []
        self.whole = Batch(part)
        self.row = self.whole if self.small else Batch(part, 1)
        shows_all = part.shown[part.end].shape[1] == self.faults.tokens
        self.few = Batch(part, 1, FEW) if not self.small and shows_all else self.row

    def fits(self) -> list[Fitting]:
        """Return the candidates that explain the part, the simplest first."""
        ways = [*self._ways()]
        for number, (words, make) in enumerate(ways):
            self.ranked = sorted([*self.ranked, *self._near(make(), words)], key=lambda one: one[0])
            if fits := self._confirmed():
                return fits
            if self.budget.spent:
                self.untried = tuple(dict.fromkeys(words for words, _ in ways[number:]))
                return []
        return []

    def _ways(self) -> Iterator[tuple[str, Callable[[], Iterable[Candidate]]]]:
        """Yield the faults that are tried one after the other, common ones first."""
        if self.small:
            yield SINGLE, self.faults.singles
        else:
            singles = [*self.faults.singles()]
            for kind in sorted({(one.is_local, one.rare) for one in singles}):
                yield SINGLE, partial(filter, lambda one, kind=kind: (one.is_local, one.rare) == kind, singles)
        first = self.wrong[0] if self.wrong else 0
        if self.small or first:
            near = range(first - LAG, first + 1) if self.wrong else range(self.faults.tokens)
            yield "caches", partial(self.faults.in_steps, near)
        if first >= LATER:
            yield f"faults from token {first} on", partial(self.faults.since, first)
        if self.small and self.part.shows_all:
            yield "faults of a text in several calls", partial(self._in_calls, first)

    def _in_calls(self, first: int) -> Iterator[Candidate]:
        """Yield faults of a text in several calls: in all of them, or in the first; ``first``: the first wrong token.

        What a call computes does not depend on later ones. So a fault must give the first call's tokens, then the first two's.
        """
        mixing = self.faults.mixing()
        for how in schedules(self.part.model):
            end = how.calls[0][1]
            near = self._giving(end, mixing, [self.faults.everywhere(one) for one in mixing]) if end > 1 else mixing
            if is_prompt(how) and end >= LATER and end > first:
                yield from self.faults.until(end, near)
            inside = [one for one in near if not (one.steps and is_prompt(how))]
            for count in (2, 3):
                if count < len(how.calls) and len(inside) > FEW_LEFT:
                    inside = self._giving(how.calls[count - 1][1], inside, self.faults.in_calls(inside, how))
            yield from self.faults.in_calls(inside, how)
        plain = {self.faults.everywhere(one): one for one in self.faults.plain if one.edits and not one.sees}
        for some, values in self.whole.values([*plain], self.budget):  # of a prompt alone: of as many tokens as it gives
            size = self.bound * self.whole.wanted.square().mean().sqrt()
            right = ((values - self.whole.wanted).abs().amax((1, 3)) <= size).cumprod(1).sum(1).tolist()
            for one, length in zip(some, right, strict=True):
                if max(first + 1, LATER) <= length < self.faults.tokens:
                    yield from self.faults.until(length, [plain[one]])

    def _giving(self, tokens: int, some: list[Alternative], candidates: list[Candidate]) -> list[Alternative]:
        """Return those of ``some`` that give the first row's first ``tokens`` as a text of their own."""
        of = dict(zip(candidates, some, strict=True))
        near = Batch(self.part, 1, tokens).errors(candidates, self.budget)
        return [of[one] for error, one in near if error <= 2 * self.bound + 1e-6]

    def _near(self, some: Iterable[Candidate], words: str) -> Iterator[tuple[float, Candidate]]:
        """Yield the candidates that may fit with their errors, each on as many tokens as it needs; until the budget is spent."""
        groups: dict[Batch, list[Candidate]] = {}
        for one in some:
            if one.program is not None:
                sees = {two.sees for two, _ in one.sites}
                batch = self.whole if ROWS in sees else self.row if TEXT in sees else self.few
                groups.setdefault(batch, []).append(one)
        most = math.inf if self.part.softmaxed else self.bound
        rounded = max(most, self.part.right_errors[self.part.end] / BETTER)  # it may leave a few numbers as they are
        for batch, group in groups.items():
            self.progress(f"{self.part.end}: {len(group)} {words}")
            near = batch.errors(group, self.budget)
            yield from ((error, one) for error, one in near if error <= most or (error <= rounded and one.rounds))

    def _confirmed(self) -> list[Fitting]:
        """Return the candidates that fit exactly, of GPT-2 itself with another head and the nearest.

        What may fit because it rounds numbers is computed exactly, which takes long, only where nothing nearer fits.
        """
        nearest = self.ranked[: MAX_CONFIRMED[self.small]]
        near = [one for error, one in nearest if error <= self.bound or self.part.softmaxed]
        tried, fits = [self.part.fit(Candidate())], list[Fitting]()
        for candidates in (near, [one for _, one in nearest[len(near) :]]):
            for one in candidates:
                if len(tried) <= LATE_CONFIRMED or not self.budget.spent:
                    tried.append(self.part.fit(one))
            found = [fit for fit in tried if fit is not None]
            tight = [fit for fit in found if fit.error <= max(map(self.part.allowed, self.part.shown))]
            some = tight or sorted(found, key=lambda fit: fit.error)[:1]
            known = [fit for fit in some if all(fault.id != "untied-head" for fault in fit.candidate.head)]
            fits = sorted(known or some, key=lambda fit: (fit.candidate.order_of_naming, fit.error))  # free weights hide faults
            if tight and known:
                break
        return fits
