"""Search the rule of a step, which may clip within its update, or keep its gradients elsewhere than in ``.grad``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from gpt2.port.golden_section import least
from gpt2.port.step.clipping import LIMITS, Clip, ClipKind, Norms, clipped
from gpt2.port.step.records import Update
from gpt2.port.step.rules import Kind, Rule, Track, fit
from gpt2.port.step.settings import Settings
from gpt2.port.step.updates import EPSILONS, EXACT, ROUNDED, USUAL, Found, Search

FITS = 1e-6  # relative error of changes that a known rule explains
KINDS = (ClipKind.NORM, ClipKind.PARAMETER, ClipKind.ENTRY, ClipKind.LARGEST)
GRID, STEPS = 32, 44  # limits that are tried of each kind, and steps that refine the best
NEAR = 0.3  # the error at the best of the limits that are tried, above which it is not refined


def tracks(updates: Sequence[Update], clip: Clip | None = None, names: Sequence[str] | None = None) -> dict[str, Track]:
    """Return each parameter's track over some updates; without a gradient in ``.grad``, what arrived is used."""
    found = {}
    for name in updates[0].before if names is None else names:
        before = torch.stack([update.before[name] for update in updates]).numpy()
        after = torch.stack([update.after[name] for update in updates]).numpy()
        seen = np.array([name in update.gradient.samples for update in updates])
        blank = torch.zeros(before.shape[1], dtype=torch.float64)
        gradient = torch.stack([update.gradient.samples.get(name, blank) for update in updates]).numpy()
        found[name] = Track(name, before, gradient, after - before, seen)
    norms = Norms.of([update.gradient for update in updates])
    return {name: clipped(track, clip, norms) for name, track in found.items()}


@dataclass(frozen=True)
class RuleSearch:
    """The search for the rule of the parameters ``names`` that explains all sessions, and for clipping that ``.grad`` hides."""

    sessions: Sequence[Sequence[Update]]
    names: Sequence[str]
    settings: Settings

    def found(self) -> tuple[Found, Clip | None]:
        """Return the rule with the gradients as they are, if it explains all; else the one with clipping within the update."""
        hidden = any(update.summed for session in self.sessions for update in session)
        if hidden:
            for most in (USUAL, None):
                found = first_explained([self], most)
                if found is not None:
                    return found[1:]
                limited = self._with_limit(self._rules()) if most else None
                if limited is not None:
                    return limited
        best = self.search(None).best()
        if best.error <= ROUNDED and self.explains(best.rule, None):
            return best, None
        for clip in self._usual():
            quick = self.search(clip).quick(best.rule)
            if quick.error <= FITS and self.explains(quick.rule, clip):
                return quick, clip
        return self._with_limit([*self._rules(), best.rule], search=True) or (best, None)

    @property
    def clips(self) -> list[Clip | None]:
        """No clipping within the update, and the one that the settings ask for."""
        return [None, Clip(ClipKind.NORM, self.settings.clip)] if self.settings.clip else [None]

    @cached_property
    def _plain(self) -> list[tuple[dict[str, Track], Norms]]:
        """By session, the tracks without clipping, and the norms of the gradients."""
        return [(tracks(one, None, self.names), Norms.of([update.gradient for update in one])) for one in self.sessions]

    def _tracks(self, session: int, clip: Clip | None) -> list[Track]:
        plain, norms = self._plain[session]
        return [clipped(plain[name], clip, norms) for name in self.names]

    def search(self, clip: Clip | None) -> Search:
        """Return the search in the first session."""
        return Search(self._tracks(0, clip), self.settings)

    def explains(self, rule: Rule, clip: Clip | None) -> bool:
        """Whether a rule gives the changes in the other sessions too."""
        return self._others(rule, clip) <= 1e-4

    def is_steady(self, rule: Rule, clip: Clip | None) -> bool:
        """Whether the first session has one rate in all its steps."""
        rates = np.median(np.stack([fit(track, rule).rates for track in self._tracks(0, clip)]), axis=0)
        return bool(np.ptp(rates) <= 1e-4 * np.abs(rates).max())

    def _others(self, rule: Rule, clip: Clip | None) -> float:
        """Return the largest error of a rule in the sessions after the first."""
        later = [track for number in range(1, len(self.sessions)) for track in self._tracks(number, clip)]
        return max((fit(track, rule).error for track in later), default=0.0)

    def _usual(self) -> Iterator[Clip]:
        limits = dict.fromkeys(limit for limit in (self.settings.clip, *LIMITS) if limit)
        for kind in KINDS:
            for limit in limits:
                yield Clip(kind, limit)

    def _rules(self) -> list[Rule]:
        usual = replace(Rule(), beta1=self.settings.beta1 or 0.9, beta2=self.settings.beta2 or 0.999)
        coupled = [replace(usual, coupled=self.settings.weight_decay)] if self.settings.weight_decay else []
        return [usual, *coupled, Rule(kind=Kind.SGD, beta1=0.0)]

    def _with_limit(self, rules: Sequence[Rule], *, search: bool = False) -> tuple[Found, Clip] | None:
        """Return a rule and clipping to any limit that explain all sessions together; None if there are none.

        With ``search``, the rules near to these are searched too.
        """
        for kind in KINDS:
            for rule in dict.fromkeys(rules):
                error, limit = self._limit(kind, rule)
                if search and FITS < error < NEAR:
                    rule = self.search(Clip(kind, limit)).best().rule
                    error, limit = self._limit(kind, rule)
                if error <= FITS:
                    return Found(rule, self.search(Clip(kind, limit)).error(rule)), Clip(kind, float(f"{limit:.7g}"))
        return None

    def _limit(self, kind: ClipKind, rule: Rule) -> tuple[float, float]:
        """Return the least error of a rule with clipping of one kind, and the limit that has it."""

        def error(log: float) -> float:
            clip = Clip(kind, math.exp(log))
            return max(self.search(clip).error(rule), self._others(rule, clip))

        low, high = self._range(kind)
        points = list(np.linspace(math.log(low), math.log(high), GRID))
        errors = [error(point) for point in points]
        best, step = points[int(np.argmin(errors))], points[1] - points[0]
        if min(errors) > NEAR:
            return min(errors), math.exp(best)
        found, log = least(error, best - step, best + step, STEPS)
        return found, math.exp(log)

    def _range(self, kind: ClipKind) -> tuple[float, float]:
        """Return the limits between which clipping of a kind changes something: the least and the largest of what it bounds."""
        bounded = []
        for gradient in (update.gradient for session in self.sessions[:2] for update in session):
            if kind is ClipKind.NORM:
                bounded.append(gradient.total)
            elif kind is ClipKind.PARAMETER:
                bounded += [gradient.two[name] for name in self.names if name in gradient.two]
            elif kind is ClipKind.ENTRY:
                bounded += [gradient.largest[name] * share for name in self.names if name in gradient.two for share in (1, 1e-2)]
            else:
                bounded.append(max(gradient.largest.values(), default=0.0))
        bounded = [value for value in bounded if value > 0] or [1.0]
        return min(bounded) / 10, max(bounded)


def first_explained(searches: Sequence[RuleSearch], most: int | None = None) -> tuple[int, Found, Clip | None] | None:
    """Return the first rule, the usual before the rare, that explains all sessions of a search; its number, and the clipping.

    Of several that do, one with a usual eps and one rate for all steps, which SGD without its clipping has not. None if there is
    none among the first ``most`` structures.
    """
    tried = [(number, clip) for number, one in enumerate(searches) for clip in one.clips]
    improving = (itertools.islice(searches[number].search(clip).improving(), most) for number, clip in tried)
    for bests in itertools.zip_longest(*improving):
        explained = [
            (number, best, clip)
            for best, (number, clip) in zip(bests, tried, strict=True)
            if best is not None and best.error <= EXACT and searches[number].explains(best.rule, clip)
        ]
        if explained:
            return min(
                explained, key=lambda one: (_has_odd_eps(one[1].rule), not searches[one[0]].is_steady(one[1].rule, one[2]))
            )
    return None


def _has_odd_eps(rule: Rule) -> bool:
    return min(abs(rule.eps / eps - 1) for eps in EPSILONS) > 0.01


def share_of(sessions: Sequence[Sequence[Update]], names: Sequence[str], settings: Settings) -> float:
    """Return what a step multiplies the sum of its passes' gradients by, where ``.grad`` does not show it: 1, or 1/parts."""
    parts = max((update.summed for session in sessions for update in session), default=0)
    if parts < 2:
        return 1.0
    shares = (1 / parts, 1.0)
    found = first_explained([RuleSearch(times(sessions, share), names, settings) for share in shares])
    return shares[found[0]] if found else shares[0]


def times(sessions: Sequence[Sequence[Update]], share: float) -> Sequence[Sequence[Update]]:
    """Return the updates with gradients multiplied by ``share``."""
    if share == 1.0:
        return sessions
    return [[replace(one, gradient=one.gradient.times(share)) for one in session] for session in sessions]
