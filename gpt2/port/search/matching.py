"""Find the faults with which our own forward pass gives a program's values, from one tensor that it shows to another.

A program may have each known fault in all blocks, in one, in some, or outside them; at once, or in some calls of a text.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from gpt2.measure.metrics import Progress, silent
from gpt2.port.alternatives import table
from gpt2.port.alternatives.alternative import Alternative, Schedule, Which, prompts, prompts_in_chunks, scheduled, schedules
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.alternatives.outside import orders, standing
from gpt2.port.graph import ROWS, TEXT
from gpt2.port.search.batch import Batch
from gpt2.port.search.part import BETTER, Fitting, Part

MAX_CONFIRMED = {True: 40, False: 12}  # candidates that are computed exactly, by whether the model is small
LATE_CONFIRMED = 3  # the nearest, which are computed even where the budget is spent
LATER = 2  # the least token from which on faults of later tokens alone are tried: to the first, many faults change nothing
LAG = 2  # tokens behind the first call, until which a fault of later calls shows
FEW_LEFT = 8  # faults in calls that are run whole
FEW = 4  # tokens of a large model that are compared at least, where a token's values depend on earlier tokens alone
SINGLE = "single faults"
Giving = dict[tuple[object, ...], list[Alternative]]  # alternatives that give the first calls of a text, by these calls


class Faults:
    """What may be wrong in a part. ``plain``: formulas; ``steps``: what shows only in several calls; ``mixing``: what differs in
    a text that is read in calls."""

    def __init__(self, part: Part) -> None:
        self.part, self.model, self.tokens = part, part.model, part.model.ids.shape[1]
        self.is_first, self.small = part.entrance is None, part.model.small
        every = [one for one in table(self.model) if one.outside or self._computes(one)]
        self.plain, self.steps = ([one for one in every if one.steps == steps] for steps in (False, True))
        mixing = (one for one in (*self.plain, *self.steps) if (one.sees or one.steps) and one.sees != ROWS)
        self.mixing = [one for one in mixing if self._is_inside(one)]

    def _computes(self, one: Alternative) -> bool:
        return any(self.part.computes(layer, node) for layer in self.part.blocks for node in one.edits)

    def _is_inside(self, one: Alternative) -> bool:
        return self._computes(one) or (self.is_first and "embed" in one.outside)

    def everywhere(self, one: Alternative, how: Schedule | None = None) -> Candidate:
        """Return an alternative in all blocks of the part, perhaps in a text that is read in calls."""
        if how is not None and how.which in (Which.FIRST, Which.LATER) and not one.sees:
            (_, end), (_, last) = how.calls[0], how.calls[-1]
            how = replace(how, calls=((0, end), (end, last)))  # it is the same in later calls of any length
        one = one if how is None else scheduled(one, how)
        return Candidate(tuple((one, n) for n in self.part.blocks) if one.edits else ((one, None),))

    def singles(self, some: Iterable[Alternative] | None = None) -> Iterator[Candidate]:
        """Yield every fault alone, in the blocks of the part and in what surrounds them there; of a large model, rare faults
        in all blocks alone. ``some``: of these faults."""
        part, layers, several = self.part, self.model.config.n_layer, len(self.part.blocks) > 1
        for one in self.plain if some is None else some:
            begins = "embed" in one.outside
            around = ((one, None),) if one.outside and (self.is_first or not begins) and (part.is_last or begins) else ()
            if around and not (one.edits and begins):
                yield Candidate(around)
            groups = [every := tuple(part.blocks)] * several
            if part.is_last and self.is_first and self.small:
                some_of = dict.fromkeys((every[1::2], every[::2], every[1:], every[:-1])) if several else ()
                groups += [some for some in some_of if len(some) < layers and (one.shared or (len(some) > 1 and not one.rare))]
            if not several or ((self.small or not one.rare) and not one.shared):
                groups += [(n,) for n in part.blocks]
            inside = [tuple((one, n) for n in group) for group in groups if one.edits]
            yield from map(Candidate, inside)
            if inside and several and around and part.is_last:
                yield Candidate((*inside[0], *around))
        if part.all_blocks:
            yield from (Candidate(order=order) for order in orders(layers))

    def in_steps(self, lengths: Iterable[int]) -> Iterator[Candidate]:
        """Yield what shows only in single tokens behind a prompt of one of these lengths."""
        some = [one for one in self.mixing if one.steps]
        hows = (how for how in prompts(self.model) if how.calls[0][1] in lengths)
        yield from (self.everywhere(one, how) for how in hows for one in some)

    def since(self, token: int) -> list[Candidate]:
        """Return every fault of a formula in the tokens from ``token`` on."""
        how = Schedule.of_prompt(token, self.tokens, Which.LATER)
        some = (one for one in (*self.plain, *standing(self.model)) if not (one.rare or one.shared) and self._is_inside(one))
        return [self.everywhere(one, how) for one in some]

    def until(self, token: int, some: Iterable[Alternative]) -> list[Candidate]:
        """Return alternatives in a prompt of ``token`` tokens alone."""
        how = Schedule.of_prompt(token, self.tokens, Which.FIRST)
        return [self.everywhere(one, how) for one in some if one.edits and not one.steps]


class PartSearch:
    """Looks for the one fault that explains a part, of those before it (``earlier``) or of all.

    ``untried``: the kinds of faults of which not all were tried. ``others``: the same part with other arrays at its end.
    """

    def __init__(
        self, part: Part, progress: Progress = silent, earlier: Iterable[Alternative] = (), others: Sequence[Part] = ()
    ) -> None:
        self.parts = (part, *others)
        self.part, self.budget, self.progress, self.earlier = part, part.model.budget, progress, dict.fromkeys(earlier)
        self.faults, self.small, self.wrong = Faults(part), part.model.small, part.wrong_tokens
        self.untried: tuple[str, ...] = ()
        self.whole = Batch(part)
        self.row = self.whole if self.small else Batch(part, 1)
        self.first = min(self.wrong, default=0)  # before the first wrong token, many a fault is like GPT-2
        self.few = self.row if self.small or not part.shows_all else Batch(part, 1, max(FEW, self.first + 1))

    def in_calls(self) -> Iterator[list[Candidate]]:
        """Yield the faults in calls that may give a part, common ones first, until the budget is spent."""
        for words, make in self._ways():
            if words != SINGLE and not self.budget.spent:
                yield self.nearest(make(), words)

    def nearest(self, some: Iterable[Candidate], words: str = SINGLE) -> list[Candidate]:
        """Return the candidates that may fit, the nearest first."""
        return [one for _, one in sorted(self._near(some, words), key=lambda one: one[0])]

    def fits(self) -> list[Fitting]:
        """Return the candidates that explain the part, the simplest first."""
        ways, ranked = [*self._ways()], list[tuple[float, Candidate]]()
        for number, (words, make) in enumerate(ways):
            ranked = sorted([*ranked, *self._near(make(), words)], key=lambda one: one[0])
            if fits := self._confirmed(ranked[: MAX_CONFIRMED[self.small]]):
                return fits
            if self.budget.spent:
                self.untried = tuple(dict.fromkeys(words for words, _ in ways[number:]))
                return []
        return []

    def _ways(self) -> Iterator[tuple[str, Callable[[], Iterable[Candidate]]]]:
        """Yield the faults that are tried one after the other, common ones first."""
        near = range(self.first - LAG, self.first + 1) if self.wrong else range(self.faults.tokens)
        late = list[tuple[str, Callable[[], Iterable[Candidate]]]]()
        if self.small or self.first:
            late.append(("caches", partial(self.faults.in_steps, near)))
        if self.first >= LATER:
            late.append((f"faults from token {self.first} on", partial(self.faults.since, self.first)))
        if self.earlier:
            yield SINGLE, partial(self.faults.singles, self.earlier)
        if self.small:
            yield SINGLE, self.faults.singles
        else:
            if self.first > FEW:  # what is always there is hardly right until then, and to try it all takes the whole budget
                yield from late
            singles = [*self.faults.singles()]
            for kind in sorted({(one.is_local, one.rare) for one in singles}):
                yield SINGLE, partial(filter, lambda one, kind=kind: (one.is_local, one.rare) == kind, singles)
        if self.small or self.first <= FEW:
            yield from late
        if (self.small or len(self.part.blocks) == 1) and self.part.shows_all:
            yield "faults of a text in several calls", partial(self._in_calls, self.first)

    def _in_calls(self, first: int) -> Iterator[Candidate]:
        """Yield faults of a text in several calls: in all of them, or in some; ``first``: the first wrong token.

        What a call computes does not depend on later ones. So a fault must give the first call's tokens, then the first two's.
        """
        faults, giving = self.faults, Giving({(): self.faults.mixing})
        for how in (*schedules(self.part.model), *prompts_in_chunks(self.part.model)):
            end, single = how.calls[0][1], all(last == begin + 1 for begin, last in how.calls[1:])
            if single and end >= LATER and end > first:
                yield from faults.until(end, self._giving(how, 1, giving))
            several = end > 1 and how.calls[1][1] > end + 1 and how.calls[-1][1] == how.calls[-1][0] + 1
            for which in (Which.ALL, Which.SEVERAL)[: 1 + several]:  # chunks, and then single tokens
                seen_in = replace(how, which=which)
                inside = self._giving(seen_in, min(3, len(how.calls) - 1), giving)
                yield from (faults.everywhere(one, seen_in) for one in inside if not (one.steps and single))
        plain = {faults.everywhere(one): one for one in faults.plain if one.edits and not one.sees}
        for some, values in self.whole.values([*plain]):  # of a prompt alone: of as many tokens as it gives
            size = self.part.bound * self.whole.wanted.square().mean().sqrt()
            right = ((values - self.whole.wanted).abs().amax(-1).flatten(1, -2).amax(1) <= size).cumprod(1).sum(1).tolist()
            for one, length in zip(some, right, strict=True):
                if max(first + 1, LATER) <= length < faults.tokens:
                    yield from faults.until(length, [plain[one]])

    def _giving(self, how: Schedule, count: int, giving: Giving) -> list[Alternative]:
        """Return the alternatives that give the first row's tokens in the first ``count`` calls; ``giving``: by calls."""
        key = tuple((*call, how.which.holds(*call)) for call in how.calls[:count])
        if key not in giving:
            some, tokens = self._giving(how, count - 1, giving), how.calls[count - 1][1]
            if tokens > 1 and (count == 1 or len(some) > FEW_LEFT):
                of = {self.faults.everywhere(one, None if count == 1 else how): one for one in some}
                near = Batch(self.part, 1, tokens).errors([*of])
                some = [of[one] for error, one in near if error <= 2 * self.part.bound + 1e-6]
            giving[key] = some
        return giving[key]

    def _near(self, some: Iterable[Candidate], words: str) -> Iterator[tuple[float, Candidate]]:
        """Yield the candidates that may fit with their errors, each on as many tokens as it needs; until the budget is spent."""
        groups: dict[Batch, list[Candidate]] = {}
        for one in some:
            if one.program is not None:
                sees = {two.sees for two, _ in one.sites}
                batch = self.whole if ROWS in sees else self.row if TEXT in sees else self.few
                groups.setdefault(batch, []).append(one)
        mosts = [math.inf if part.softmaxed else part.bound for part in self.parts]
        # what rounds numbers may leave a few of them as they are
        bounds = [(most, max(most, part.right_errors[part.end] / BETTER)) for most, part in zip(mosts, self.parts, strict=True)]
        for batch, group in groups.items():
            self.progress(f"{self.part.end}: {len(group)} {words}")
            for few, values in batch.values(group):
                for part, (most, rounded) in zip(self.parts, bounds, strict=True):
                    near = zip(batch.distances(values, part), few, strict=True)
                    yield from ((error, one) for error, one in near if error <= most or (error <= rounded and one.rounds))

    def _confirmed(self, nearest: list[tuple[float, Candidate]]) -> list[Fitting]:
        """Return the candidates that fit exactly, of GPT-2 itself with another head and the nearest.

        What may fit because it rounds numbers is computed exactly, which takes long, only where nothing nearer fits.
        """
        near = [one for error, one in nearest if error <= self.part.bound or self.part.softmaxed]
        tried, fits = [self.part.fit(Candidate())], list[Fitting]()
        for candidates in (near, [one for _, one in nearest[len(near) :]]):
            for one in candidates:
                if len(tried) <= LATE_CONFIRMED or not self.budget.spent:
                    tried.append(self.part.fit(one))
            found = [fit for fit in tried if fit is not None]
            tight = [fit for fit in found if fit.error <= max(map(self.part.allowed, self.part.shown))]
            some = tight or sorted(found, key=lambda fit: fit.error)[:1]
            tied = [fit for fit in some if all(fault.id != "untied-head" for fault in fit.candidate.head)]
            fits = sorted(tied or some, key=lambda fit: (fit.candidate.order_of_naming, fit.error))  # free weights hide faults
            if tight and tied:
                break
        return fits
