"""Search the rule of a step's updates together with what nothing else shows: clipping, and gradients that lack a part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpt2.port.deadline import Deadline
from gpt2.port.golden_section import least
from gpt2.port.step.clipping import Clip, ClipKind, spread
from gpt2.port.step.rules import CORRECTIONS, PLACES, Array, Rule, Track, fit
from gpt2.port.step.search import EPSILONS, EXACT, EXPLAINED, FITS, LATER, NOTHING, ROUNDED, Answer, Search
from gpt2.port.step.settings import Settings
from gpt2.port.step.tracks import Run

USUAL, SINGLE = 7, 24  # the first structures of rules: those people use; those with one departure from AdamW
STEADY, STEADY_NOISY = 1e-4, 1e-2  # relative spread of rates that are meant to be one; where the parameters are rounded
GRID, STEPS = 32, 44  # limits that are tried of each kind, and steps that refine the best
NEAR = 0.3  # the error at the best of the limits that are tried, above which it is not refined
CUT = 1.001  # times the least error: any smaller limit gives the same changes


@dataclass(frozen=True)
class RuleSearch:
    """The search for the rule of a few parameters, ``names``, that explains all sessions.

    ``variants``: what the gradients may be that the updates used, each by session; of ``likely`` ones, every clipping is tried
    before any rare rule. ``clips``: how they may be clipped, the likeliest first; ``free``: kinds of clipping whose limit may be
    any. Behind ``deadline``, the answer is the best so far.
    """

    variants: Sequence[Sequence[Run]]
    names: Sequence[str]
    settings: Settings
    clips: Sequence[Clip | None] = (None,)
    free: Sequence[ClipKind] = ()
    likely: int = 1
    deadline: Deadline = field(default_factory=Deadline)

    @property
    def noisy(self) -> bool:
        """Whether the changes are rounded."""
        return any(track.noise is not None for track in self.tracks(NOTHING))

    def tracks(self, answer: Answer, session: int = 0) -> list[Track]:
        """Return the tracks that are searched, with the gradients of an answer."""
        return self.variants[answer.variant][session].clipped(answer.clip, self.names)

    def best(self) -> Answer:
        """Return the first answer that explains all changes, the usual before the rare; else the one with the least error."""
        best, enough = NOTHING, EXPLAINED if self.noisy else FITS if self.free else ROUNDED
        for answer in self._attempts():
            best = answer if best is NOTHING or answer.error < best.error else best
            if self._explains(answer, enough):
                return self._plain(answer)
            if self.deadline.passed:
                break
        return self._plain(best)

    def _explains(self, answer: Answer, enough: float) -> bool:
        """Whether an answer gives the changes of all sessions."""
        return answer.error <= enough and self._later(answer) <= LATER

    def _later(self, answer: Answer) -> float:
        """Return the largest error of a rule in the sessions after the first."""
        later = (track for n in range(1, len(self.variants[answer.variant])) for track in self.tracks(answer, n))
        return max((fit(track, answer.rule).error for track in later), default=0.0)

    def _attempts(self) -> Iterator[Answer]:
        """Yield attempts, the likeliest first: several rules may explain changes that are rounded; an exact one is theirs."""
        variants = range(len(self.variants))
        ways = [[replace(NOTHING, clip=clip, variant=variant) for clip in self.clips] for variant in variants]
        first = [one for some in ways[: 1 if self.noisy else None] for one in some[:2]]
        together = [[one] for one in first] if self.noisy else [first]
        yield self._side_by_side(together[0], SINGLE)
        for one in itertools.chain(*ways[: self.likely]) if len(self.clips) > 2 else ():
            yield self._side_by_side([one], USUAL)
        for search in (True,) if self.noisy else (False, True):
            yield from self._limited(search=search)
        for tries in together:
            yield self._side_by_side(tries, None)
        for some in ways[self.likely :]:
            yield self._side_by_side(some[:1], SINGLE)
            for one in some:
                yield self._side_by_side([one], USUAL)

    def _side_by_side(self, tries: Sequence[Answer], most: int | None) -> Answer:
        """Return the first rule of ``most`` structures that explains all sessions with the gradients of a try; else the nearest.

        Of several that do, one with a usual eps and one rate for all steps, which SGD without its clipping has not.
        """
        last, searches = list(tries), [Search(self.tracks(one), self.settings) for one in tries]

        def oddness(answer: Answer) -> tuple[bool, bool]:
            rates = _rates(self.tracks(answer), answer.rule)
            return min(abs(answer.rule.eps / eps - 1) for eps in EPSILONS) > 0.01, spread(rates) > STEADY

        for bests in itertools.zip_longest(*(itertools.islice(search.improving(), most) for search in searches)):
            pairs = zip(last, bests, strict=True)
            last = [one if best is None else replace(one, rule=best.rule, error=best.error) for one, best in pairs]
            if explained := [one for one in last if self._explains(one, searches[0].enough)]:
                return min(explained, key=oddness)
        return min(last, key=lambda one: one.error)

    # Limits that nobody would guess

    def _limited(self, *, search: bool) -> Iterator[Answer]:
        """Yield rules with the limits of clipping that bring them nearest; with ``search``, also the rules near to these."""
        settings = self.settings
        given = [(settings.beta1, settings.beta2)] if settings.beta1 and settings.beta2 else [(0.9, 0.95), (0.9, 0.999)]
        rules = [Rule(beta1=one, beta2=two) for one, two in given]
        coupled = [replace(rules[0], coupled=settings.weight_decay)] if settings.weight_decay else []
        rules += [] if self.noisy else [*coupled, Rule(kind="sgd", beta1=0.0)]
        for kind, rule in itertools.product(self.free, rules):
            error, clip = self._nearest(kind, rule)
            if clip is not None and search and error > FITS and (error < NEAR or self.noisy):
                tracks = self.tracks(replace(NOTHING, clip=clip))
                rule = Search(tracks, self.settings).best(USUAL if self.noisy else None).rule
                error, clip = self._nearest(kind, rule)
            if clip is not None and (error <= FITS or self.noisy):
                one = Answer(rule, error, clip)
                yield replace(one, error=Search(self.tracks(one), self.settings).error(rule))

    def _nearest(self, kind: ClipKind, rule: Rule) -> tuple[float, Clip | None]:
        """Return the least error of a rule with clipping of one kind, and this clipping; None if all is cut off in it."""
        bounded = [0.0]  # what clipping of this kind bounds: between the least and the largest, a limit changes something
        for run, name in itertools.product(self.variants[0][:2], self.names):
            largest = np.abs(run.tracks[name].gradient).max(1)
            bounded += [*largest, *(largest / 100)] if kind is ClipKind.ENTRY else [*run.norms.of_kind(kind, name)]
        bounded = [float(value) for value in bounded if value > 0] or [1.0]

        def error(log: float) -> float:
            one = Answer(rule, math.inf, Clip(kind, math.exp(log)))
            tracks = [replace(track, noise=None) for track in self.tracks(one)]  # a residual is not limited, as by noise
            return max(Search(tracks, self.settings).error(rule), self._later(one))

        points = np.linspace(math.log(min(bounded) / 10), math.log(max(bounded)), GRID).tolist()
        errors = [error(point) for point in points]
        near, step, lowest = points[int(np.argmin(errors))], points[1] - points[0], min(errors)
        if (lowest > NEAR and not self.noisy) or errors[0] <= CUT * lowest + EXACT:
            return lowest, None
        found, log = least(error, near - step, near + step, STEPS)
        return found, Clip(kind, float(f"{math.exp(log):.7g}"))

    # One of several names of a rule

    def _plain(self, answer: Answer) -> Answer:
        """Return the answer with the rates that the settings say, or with the rule whose rates are the likeliest.

        A factor of a step cannot be told from its rate: moments without correction move a parameter as those do whose eps is
        added before the correction, at other rates. Where noise hides eps, all corrections do.
        """
        tracks, settings, rule = self.tracks(answer), self.settings, answer.rule
        search, steps = Search(tracks, settings), tracks[0].calls or range(len(tracks[0].before))
        expected = np.array([settings.rate(step) for step in steps]) if settings.scheduled else np.ones(len(steps))
        if rule.kind == "adam" and not rule.lost and bool((expected > 0).all()):
            alike = (replace(rule, correction=c, place=p) for p in PLACES for c in CORRECTIONS)
            alike = (one for one in alike if search.error(one) <= max(search.enough, 2 * answer.error))
            close = STEADY_NOISY if self.noisy else STEADY
            rule = next((one for one in alike if spread(_rates(tracks, one) / expected) < close), rule)
        if self.noisy and settings.lr is not None:
            rates = np.array([settings.rate(step) for step in steps])
            for one in (answer.rule, rule):
                error = max(fit(track, one, rates).error for track in tracks)
                if error <= EXPLAINED:
                    return replace(answer, rule=one, error=error, rates=rates)
        return replace(answer, rule=rule)


def _rates(tracks: Sequence[Track], rule: Rule) -> Array:
    """Return the rates of most tracks, (K,)."""
    rates: Array = np.median(np.stack([fit(track, rule).rates for track in tracks]), axis=0)
    return rates
