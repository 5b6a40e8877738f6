"""How a step moves each parameter: the rule of most, and the rates and decays of each, from its own values and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from gpt2.port.step.rules import Array, Fit, Rule, Track, fit
from gpt2.port.step.search import EXPLAINED, FITS, LATER, ROUNDED, Answer, Search
from gpt2.port.step.settings import Settings
from gpt2.port.step.tracks import Run

ALLOWED = 1.25 * EXPLAINED  # the error of one parameter with noise: it has fewer entries than the search


class Movement:
    """The rule and the fit of each parameter that moves in the first run; what no rule explains is in ``odd``.

    ``rates`` (K,) and ``decays`` are those that parameters with noise have likely; exact ones tell their own. ``kept``: moments
    go on from one session to the next.
    """

    def __init__(self, answer: Answer, runs: Sequence[Run], settings: Settings, roles: Mapping[str, str]) -> None:
        self.answer, self.settings, self.roles = answer, settings, roles
        self.rules: dict[str, Rule] = {}
        self.fits: dict[str, Fit] = {}
        self.odd: list[str] = []
        self.kept = False
        self.rates: Array | None = None
        self.decays: Sequence[float] = ()
        tracks, *later = (run.clipped(answer.clip, runs[0].moving) for run in runs)
        self.noisy = any(track.noise is not None for track in tracks)
        if self.noisy:
            self._find_likely(tracks)
        for track in tracks:
            self.add(track)
        for number, (before, after) in enumerate(itertools.pairwise([tracks, *later])):
            if not self._goes_on(before, after, number > 0):
                break

    @property
    def rule(self) -> Rule:
        """The rule of most parameters."""
        rules = list(self.rules.values())
        return max(dict.fromkeys(rules), key=rules.count) if rules else Rule()

    @property
    def known(self) -> list[str]:
        return [name for name in self.rules if name not in self.odd]

    def add(self, track: Track) -> bool:
        """Fit a parameter; return whether a rule explains it."""
        enough, tried = EXPLAINED if self.noisy else FITS, list[tuple[Rule, Fit]]()
        for pair in self._tries(track):
            tried.append(pair)
            if pair[1].error <= enough:
                break
        least = min(one.error for _, one in tried)
        rule, found = next(pair for pair in tried if pair[1].error <= max(1.1 * least, enough))
        if not self.noisy and found.error > FITS and not self.answer.error > ROUNDED:
            new = Search([track], self.settings).best().rule
            own = fit(track, new)
            rule, found = (new, own) if own.error < found.error / 30 else (rule, found)
        self.rules[track.name], self.fits[track.name] = rule, found
        good = found.error <= (ALLOWED if self.noisy else ROUNDED if self.answer.error > FITS else FITS)
        self.odd = [name for name in self.odd if name != track.name] + [track.name] * (not good)
        return good

    def _tries(self, track: Track) -> Iterator[tuple[Rule, Fit]]:
        """Yield rules with their fits: with likely rates and decays, and with any; those that are known come first."""
        rule, decay, small = self.answer.rule, self.settings.weight_decay, track.small
        if self.rates is None:
            known = list(dict.fromkeys([rule, *(self.rules[name] for name in self.known)]))
            uncoupled = [replace(one, coupled=0.0) for one in known if one.coupled]
            coupled = [replace(one, coupled=decay) for one in known if decay and not one.coupled]
            yield from ((one, fit(track, one)) for one in [*known, *uncoupled, *coupled])
            return
        rates, track = self.rates, replace(track, small=False)
        rules = [rule, replace(rule, coupled=0.0)] if rule.coupled else [rule]
        order = [0.0, *self.decays] if small or rule.coupled else self.decays
        for each, decay in itertools.product(rules[::-1] if small else rules, order):
            yield each, fit(track, each, rates, decay * rates)
        for each in rules:
            free = fit(track, each)
            own = [fit(track, each, free.rates, decay * free.rates) for decay in order]
            yield from ((each, one) for one in (fit(track, each, rates), *own, free))

    def _find_likely(self, tracks: Sequence[Track]) -> None:
        """Find the rates of most parameters, those expected if these are, and the decays that they may have."""
        rule, settings = self.answer.rule, self.settings
        matrices = [one for one in tracks if self.roles[one.name] == "matrix"] or tracks
        fits = [fit(one, rule) for one in matrices]
        rates = np.median(np.stack([one.rates for one in fits]), axis=0)
        if (expected := self.answer.rates) is not None:
            good = sum(fit(one, rule, expected).error <= ALLOWED for one in matrices)
            rates = expected if good > len(matrices) / 2 else rates
        decay = float(np.median([np.median(one.decays / np.where(rates == 0, 1, rates)) for one in fits]))
        likely = (settings.weight_decay, 0.0, 0.1, 0.01, float(f"{decay:.3g}"))
        self.rates, self.decays = rates, list(dict.fromkeys(d for d in likely if d is not None and d >= 0))

    def _goes_on(self, before: Sequence[Track], after: Sequence[Track], failed_once: bool) -> bool:
        """Test the rules in a later session, from moments of zero or those that the one before left; return whether to go on."""
        fresh, going_on, failed = 0, 0, []
        for earlier, track in zip(before, after, strict=True):
            rule = self.rules[track.name]
            if track.name in self.odd or not bool((track.change != 0).any()):
                continue
            if fit(track, rule).error <= LATER:
                fresh += 1
            elif fit(track, rule, earlier=earlier).error <= LATER:
                going_on += 1
            else:
                failed.append(track.name)
        self.kept = self.kept or going_on > fresh
        if self.kept or (failed and failed_once):
            return False
        self.odd += failed if len(failed) > len(self.rules) // 4 else []
        return True

    def common(self) -> tuple[Array, dict[str, float]]:
        """Return the rates (K,) of most parameters, and the factor of those that differ, without what decay explains."""
        values = {name: self.fits[name] for name in self.known}
        if not values:
            return np.zeros(0), {}

        def most(one: Fit) -> float:
            return float(np.abs(np.nan_to_num(one.decays)).max()) / (float(np.abs(one.rates).max()) or 1e-300)

        plain = [one for one in values.values() if most(one) <= 1e-6] or list(values.values())
        base = np.median(np.stack([one.rates for one in plain]), axis=0)
        factors = {}
        for name, one in values.items():
            live = np.abs(base) > 100 * one.doubts
            factor = median((one.rates[live] / base[live]).tolist()) if bool(live.any()) else 1.0
            if abs(factor - 1) > 0.01:
                factors[name] = factor
        return base, factors
