"""Search the rule of a step's updates, and the clipping before it that nothing else shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpt2.port.deadline import Deadline
from gpt2.port.golden_section import least
from gpt2.port.step.clipping import LIMITS, Clip, ClipKind, Norms, clipped
from gpt2.port.step.fitting import EPSILONS, EXACT, EXPLAINED, ROUNDED, Search
from gpt2.port.step.rules import Array, Correction, Eps, Kind, Rule, Track, fit
from gpt2.port.step.settings import Settings

FITS = 1e-6  # relative error of changes that a known rule explains
LATER = 1e-4  # the same in the sessions after the first
USUAL, SINGLE = 7, 24  # the first structures of rules: those people use; those with one departure from AdamW
STEADY, STEADY_NOISY = 1e-4, 1e-2  # relative spread of rates that are meant to be one; where the parameters are rounded
GRID, STEPS = 32, 44  # limits that are tried of each kind, and steps that refine the best
NEAR = 0.3  # the error at the best of the limits that are tried, above which it is not refined
CUT = 1.001  # times the least error: any smaller limit gives the same changes


@dataclass(frozen=True)
class Run:
    """One session's updates: a track for each parameter, and the norms of the gradients that it used."""

    tracks: Mapping[str, Track]
    norms: Norms

    def clipped(self, clip: Clip | None, names: Sequence[str]) -> list[Track]:
        """Return the tracks of some parameters with gradients as clipping makes them."""
        return [clipped(self.tracks[name], clip, self.norms) for name in names if name in self.tracks]


@dataclass(frozen=True)
class Answer:
    """A rule and clipping, and the number of the variant of the gradients; ``as_set``: with the rates that the settings say."""

    rule: Rule
    clip: Clip | None
    error: float
    variant: int = 0
    as_set: bool = False


Try = tuple[int, Clip | None]  # a variant of the gradients, and how they are clipped


@dataclass(frozen=True)
class RuleSearch:
    """The search for the rule of a few parameters, ``names``, that explains all sessions.

    ``variants``: what the gradients may be that the updates used, each by session; of ``likely`` ones, every usual clipping is
    tried before any rare rule. ``hidden``: nothing shows the gradients that exact updates used, so they may be clipped;
    ``clips``: rounded ones may. Behind ``deadline``, the answer is the best so far.
    """

    variants: Sequence[Sequence[Run]]
    names: Sequence[str]
    settings: Settings
    hidden: bool = False
    clips: bool = True
    likely: int = 1
    deadline: Deadline = field(default_factory=Deadline)

    @property
    def noisy(self) -> bool:
        """Whether the changes are rounded."""
        return any(track.noise is not None for track in self.tracks((0, None)))

    def tracks(self, one: Try, session: int = 0) -> list[Track]:
        """Return the tracks that are searched, of one variant with its clipping."""
        variant, clip = one
        return self.variants[variant][session].clipped(clip, self.names)

    def best(self) -> Answer:
        """Return the first answer that explains all changes, the usual before the rare; else the one with the least error."""
        best: Answer | None = None
        enough = EXPLAINED if self.noisy else ROUNDED
        for answer in self._noisy() if self.noisy else self._exact():
            best = answer if best is None or answer.error < best.error else best
            if self._explains(answer, enough):
                return self._plain(answer)
            if self.deadline.passed:
                break
        assert best is not None
        return self._plain(best)

    def _explains(self, answer: Answer, enough: float) -> bool:
        """Whether an answer gives the changes of all sessions."""
        return answer.error <= enough and self._later(answer.rule, answer.variant, answer.clip) <= LATER

    def _later(self, rule: Rule, variant: int, clip: Clip | None) -> float:
        """Return the largest error of a rule in the sessions after the first."""
        later = [track for number in range(1, len(self.variants[variant])) for track in self.tracks((variant, clip), number)]
        return max((fit(track, rule).error for track in later), default=0.0)

    # The order of attempts

    def _exact(self) -> Iterator[Answer]:
        """Yield attempts where changes are exact: a rule that explains them is theirs."""
        wanted = Clip(ClipKind.NORM, self.settings.clip) if self.settings.clip else None
        tries = [(variant, clip) for variant in range(len(self.variants)) for clip in dict.fromkeys([None, wanted])]
        usual = replace(Rule(), beta1=self.settings.beta1 or 0.9, beta2=self.settings.beta2 or 0.999)
        coupled = [replace(usual, coupled=self.settings.weight_decay)] if self.settings.weight_decay else []
        rules = [usual, *coupled, Rule(kind=Kind.SGD, beta1=0.0)]
        kinds = [ClipKind.NORM, ClipKind.PARAMETER, ClipKind.ENTRY, ClipKind.LARGEST]
        if self.hidden:
            answer = self._side_by_side(tries, USUAL)
            if self._explains(answer, EXACT):
                yield answer
            yield from self._limited(kinds, rules, search=False)
        plain = self._side_by_side(tries if self.hidden else tries[:1], None)
        yield plain
        yield from self._limited(kinds, [*rules, plain.rule], search=True)

    def _noisy(self) -> Iterator[Answer]:
        """Yield attempts where changes are rounded, so that several rules may explain them: the likeliest first."""
        wanted = Clip(ClipKind.NORM, self.settings.clip) if self.settings.clip and self.clips else None
        limits = [limit for limit in (self.settings.clip, *LIMITS) if limit] if self.clips else []
        pieces = [ClipKind.PARAMETER, *([ClipKind.STACK] if self.variants[0][0].norms.stack else [])]
        usual = [ClipKind.NORM, ClipKind.ENTRY, *pieces, ClipKind.LARGEST, ClipKind.SUM]
        pairs = [*itertools.product(usual, limits), *itertools.product((ClipKind.SQUARES, ClipKind.MATRICES), limits[:1])]
        clips = dict.fromkeys([wanted, None, *(Clip(kind, limit) for kind, limit in pairs)])
        yield self._side_by_side([(0, wanted)], SINGLE)
        for variant, clip in itertools.product(range(self.likely), clips):
            yield self._side_by_side([(variant, clip)], USUAL)
        if self.clips and self.settings.clip != 0:
            given = [(b1, b2) for b1, b2 in [(self.settings.beta1, self.settings.beta2)] if b1 and b2]
            rules = [Rule(beta1=b1, beta2=b2) for b1, b2 in given or ((0.9, 0.95), (0.9, 0.999))]
            yield from self._limited([ClipKind.ENTRY, *pieces], rules, search=True)
        for clip in dict.fromkeys([wanted, None]):
            yield self._side_by_side([(0, clip)], None)
        for variant in range(self.likely, len(self.variants)):
            yield self._side_by_side([(variant, wanted)], SINGLE)
            for clip in clips:
                yield self._side_by_side([(variant, clip)], USUAL)

    def _side_by_side(self, tries: Sequence[Try], most: int | None) -> Answer:
        """Return the first rule of ``most`` structures that explains all sessions in one of the tries; else the nearest.

        Of several that do, one with a usual eps and one rate for all steps, which SGD without its clipping has not.
        """
        last: dict[Try, Answer] = {}
        searches = [Search(self.tracks(one), self.settings) for one in tries]
        for bests in itertools.zip_longest(*(itertools.islice(search.improving(), most) for search in searches)):
            for (variant, clip), best in zip(tries, bests, strict=True):
                if best is not None:
                    last[variant, clip] = Answer(best.rule, clip, best.error, variant)
            explained = [one for one in last.values() if self._explains(one, searches[0].enough)]
            if explained:
                return min(explained, key=self._oddness)
        return min(last.values(), key=lambda one: one.error)

    def _oddness(self, answer: Answer) -> tuple[bool, bool]:
        rates = _rates(self.tracks((answer.variant, answer.clip)), answer.rule)
        odd_eps = min(abs(answer.rule.eps / eps - 1) for eps in EPSILONS) > 0.01
        return odd_eps, bool(np.ptp(rates) > STEADY * np.abs(rates).max())

    # Limits that nobody would guess

    def _limited(self, kinds: Sequence[ClipKind], rules: Sequence[Rule], *, search: bool) -> Iterator[Answer]:
        """Yield rules with the limits of clipping that bring them nearest; with ``search``, also the rules near to these."""
        for kind, rule in itertools.product(kinds, dict.fromkeys(rules)):
            error, clip = self._nearest(kind, rule)
            if clip is not None and search and error > FITS and (error < NEAR or self.noisy):
                rule = Search(self.tracks((0, clip)), self.settings).best(USUAL if self.noisy else None).rule
                error, clip = self._nearest(kind, rule)
            if clip is not None and (error <= FITS or self.noisy):
                yield Answer(rule, clip, Search(self.tracks((0, clip)), self.settings).error(rule))

    def _nearest(self, kind: ClipKind, rule: Rule) -> tuple[float, Clip | None]:
        """Return the least error of a rule with clipping of one kind, and this clipping; None if all is cut off in it."""
        low, high = self._range(kind)

        def error(log: float) -> float:
            clip = Clip(kind, math.exp(log))
            tracks = [replace(track, noise=None) for track in self.tracks((0, clip))]  # a residual is not limited, as by noise
            return max(Search(tracks, self.settings).error(rule), self._later(rule, 0, clip))

        points = list(np.linspace(math.log(low), math.log(high), GRID))
        errors = [error(point) for point in points]
        near, step = points[int(np.argmin(errors))], points[1] - points[0]
        if min(errors) > NEAR and not self.noisy:
            return min(errors), None
        if errors[0] <= CUT * min(errors) + EXACT:
            return min(errors), None
        found, log = least(error, near - step, near + step, STEPS)
        return found, Clip(kind, float(f"{math.exp(log):.7g}"))

    def _range(self, kind: ClipKind) -> tuple[float, float]:
        """Return the limits between which clipping of a kind changes something: the least and the largest of what it bounds."""
        bounded = [0.0]
        for run, name in itertools.product(self.variants[0][:2], self.names):
            if kind is ClipKind.ENTRY:
                largest = np.abs(run.tracks[name].gradient).max(1)
                bounded += [*largest, *(largest / 100)]
            else:
                bounded += [*run.norms.of_kind(kind, name)]
        bounded = [float(value) for value in bounded if value > 0] or [1.0]
        return min(bounded) / 10, max(bounded)

    # One of several names of a rule

    def _plain(self, answer: Answer) -> Answer:
        """Return the answer with the rates that the settings say, or with the rule whose rates are the likeliest."""
        tracks = self.tracks((answer.variant, answer.clip))
        steps = tracks[0].calls or range(len(tracks[0].before))
        rule = plainest(answer.rule, answer.error, tracks, self.settings, steps)
        if self.noisy and self.settings.lr is not None:
            rates = np.array([self.settings.rate(step) for step in steps])
            for one in (answer.rule, rule):
                error = max(fit(track, one, rates).error for track in tracks)
                if error <= EXPLAINED:
                    return replace(answer, rule=one, error=error, as_set=True)
        return replace(answer, rule=rule)


def plainest(rule: Rule, error: float, tracks: Sequence[Track], settings: Settings, calls: Sequence[int]) -> Rule:
    """Return the rule whose rates are the expected ones, or steady, among those that differ in each step by a factor only.

    A factor of a step cannot be told from its rate: moments without correction move a parameter as those do whose eps is added
    before the correction, at other rates. Where noise hides eps, all corrections do.
    """
    search = Search(tracks, settings)
    expected = np.array([settings.rate(call) for call in calls]) if settings.scheduled else np.ones(len(calls))
    if rule.kind is not Kind.ADAM or rule.lost or not bool((expected > 0).all()):
        return rule
    alike = [replace(rule, correction=c, place=p) for p in Eps for c in Correction]
    alike = [one for one in alike if search.error(one) <= max(search.enough, 2 * error)]
    for one in alike:
        shares = _rates(tracks, one) / expected
        if float(np.ptp(shares)) / float(np.abs(shares).max() or 1) < (STEADY_NOISY if search.noisy else STEADY):
            return one
    return rule


def _rates(tracks: Sequence[Track], rule: Rule) -> Array:
    """Return the rates of most tracks, (K,)."""
    rates: Array = np.median(np.stack([fit(track, rule).rates for track in tracks]), axis=0)
    return rates
