"""How a step moves each parameter: the rule of most, and the rates and decays of each, from its own values and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import torch

from gpt2.port.step.clipping import Norms
from gpt2.port.step.fitting import EXPLAINED, ROUNDED, Search
from gpt2.port.step.records import Update
from gpt2.port.step.rules import Array, Fit, Moments, Rule, Track, directions, fit
from gpt2.port.step.search import FITS, LATER, Answer, RuleSearch, Run
from gpt2.port.step.settings import Settings

ALLOWED = 1.25 * EXPLAINED  # the error of one parameter with noise: it has fewer entries than the search


@dataclass
class Movement:
    """The rule and the fit of each parameter in the first session; what no rule explains is in ``odd``."""

    answer: Answer | None = None
    rules: dict[str, Rule] = field(default_factory=dict)
    fits: dict[str, Fit] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    kept: bool = False  # moments go on from one session to the next
    odd: list[str] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The largest error of a parameter."""
        return max((one.error for one in self.fits.values()), default=0.0)

    @property
    def rule(self) -> Rule:
        """The rule of most parameters."""
        rules = list(self.rules.values())
        return max(dict.fromkeys(rules), key=rules.count) if rules else Rule()

    @property
    def known(self) -> list[str]:
        return [name for name in self.rules if name not in self.odd]

    def rates(self) -> tuple[Array, dict[str, float]]:
        """Return the rates (K,) of most parameters, and the factor of those that differ, without what decay explains."""
        values = {name: self.fits[name] for name in self.known}
        if not values:
            return np.zeros(0), {}
        plain = [one for one in values.values() if not one.decays_much] or list(values.values())
        base = np.median(np.stack([one.rates for one in plain]), axis=0)
        factors = {}
        for name, one in values.items():
            live = np.abs(base) > 100 * one.doubts
            factor = median((one.rates[live] / base[live]).tolist()) if bool(live.any()) else 1.0
            if abs(factor - 1) > 0.01:
                factors[name] = factor
        return base, factors


def runs_of(sessions: Sequence[Sequence[Update]], large: Sequence[str]) -> list[Run]:
    """Return the exact tracks of each session; ``large``: matrices and embeddings."""
    runs = []
    for session in sessions:
        tracks = {}
        for name in session[0].before:
            before, after = (torch.stack([getattr(one, side)[name] for one in session]).numpy() for side in ("before", "after"))
            blank = torch.zeros(before.shape[1], dtype=torch.float64)
            gradient = torch.stack([one.gradient.samples.get(name, blank) for one in session]).numpy()
            seen = np.array([name in one.gradient.samples for one in session])
            calls = tuple(one.call for one in session)
            tracks[name] = Track(name, before, gradient, after - before, seen, calls=calls)
        runs.append(Run(tracks, Norms.of([one.gradient for one in session], large)))
    return runs


def exact_movement(variants: Sequence[Sequence[Run]], settings: Settings, roles: Mapping[str, str], hidden: bool) -> Movement:
    """Find the rule of every parameter that moves in the first session, and test it in the others."""
    movement = Movement(roles=roles)
    first = variants[0][0].tracks
    moving = [name for name, track in first.items() if bool((track.change != 0).any()) and bool(track.seen.any())]
    if not moving:
        return movement
    large = [name for name in moving if roles[name] == "matrix"] or moving
    chosen = [large[len(large) // 3], large[2 * len(large) // 3]] if len(large) > 2 else large
    answer = movement.answer = RuleSearch(variants, chosen, settings, hidden).best()
    runs, known = variants[answer.variant], [answer.rule]
    for track in runs[0].clipped(answer.clip, moving):
        rule, one = _rule_of(track, known, settings, answer.error)
        movement.rules[track.name], movement.fits[track.name] = rule, one
        if one.error > (ROUNDED if answer.error > FITS else FITS):
            movement.odd.append(track.name)
        elif rule not in known:
            known.append(rule)
    _test_later(movement, [{one.name: one for one in run.clipped(answer.clip, moving)} for run in runs])
    return movement


def _rule_of(track: Track, known: list[Rule], settings: Settings, error: float) -> tuple[Rule, Fit]:
    """Return the rule of one parameter: one that is known, one without the coupled decay, or a new one."""
    uncoupled = [replace(rule, coupled=0.0) for rule in known if rule.coupled]
    coupled = [replace(rule, coupled=settings.weight_decay) for rule in known if settings.weight_decay and not rule.coupled]
    tried: list[tuple[Rule, Fit]] = []
    for rule in [*known, *uncoupled, *coupled]:
        tried.append((rule, fit(track, rule)))
        if tried[-1][1].error <= FITS:
            return tried[-1]
    best = min(tried, key=lambda pair: pair[1].error)
    if error > ROUNDED or best[1].error <= ROUNDED < error:
        return best
    new = Search([track], settings).best().rule
    one = fit(track, new)
    return (new, one) if one.error < best[1].error / 30 else best


def _test_later(movement: Movement, sessions: Sequence[Mapping[str, Track]]) -> None:
    """Test the rules in the later sessions, from moments of zero, or from those that the session before left."""
    for number, (before, after) in enumerate(itertools.pairwise(sessions)):
        fresh, going_on, failed = 0, 0, []
        for name in movement.known:
            rule, track = movement.rules[name], after[name]
            if not bool((track.change != 0).any()):
                continue
            if fit(track, rule).error <= LATER:
                fresh += 1
                continue
            state = Moments.none(track.before.shape[1])
            directions(rule, before[name], state)
            if fit(track, rule, state=state).error <= LATER:
                going_on += 1
            else:
                failed.append(name)
        movement.kept = movement.kept or going_on > fresh
        if movement.kept or (failed and number):
            return
        if len(failed) > len(movement.rules) // 4:
            movement.odd += failed


def noisy_movement(
    answer: Answer, tracks: Sequence[Track], settings: Settings, roles: Mapping[str, str]
) -> tuple[Movement, Callable[[Track], tuple[Rule, Fit]]]:
    """Fit each parameter, whose changes are rounded: with the rates of most, those expected if these are, and a usual decay.

    Beside the movement: the function that fits one more track.
    """
    movement = Movement(answer, roles=roles)
    matrices = [one for one in tracks if roles[one.name] == "matrix"] or list(tracks)
    fits = [fit(one, answer.rule) for one in matrices]
    rates = np.median(np.stack([one.rates for one in fits]), axis=0)
    if answer.as_set:
        expected = np.array([settings.rate(step) for step in range(len(rates))])
        good = sum(fit(one, answer.rule, expected).error <= ALLOWED for one in matrices)
        rates = expected if good > len(matrices) / 2 else rates
    decay = float(np.median([np.median(one.decays / np.where(rates == 0, 1, rates)) for one in fits]))
    likely = (settings.weight_decay, 0.0, 0.1, 0.01, float(f"{decay:.3g}"))
    choices = list(dict.fromkeys(d for d in likely if d is not None and d >= 0))

    def fitted(track: Track) -> tuple[Rule, Fit]:
        return _fit_rounded(track, answer.rule, rates, choices)

    for track in tracks:
        movement.rules[track.name], movement.fits[track.name] = fitted(track)
    movement.odd = [name for name, one in movement.fits.items() if one.error > ALLOWED]
    return movement, fitted


def _fit_rounded(one: Track, rule: Rule, rates: Array, choices: Sequence[float]) -> tuple[Rule, Fit]:
    """Fit a parameter: with the rates of most and the expected decay, with another one, or with rates of its own."""
    small, one = one.small, replace(one, small=False)
    rules = [rule, replace(rule, coupled=0.0)] if rule.coupled else [rule]
    rules = rules[::-1] if small else rules
    order = [0.0, *choices] if small or rule.coupled else list(choices)
    tried: list[tuple[Rule, Fit]] = []
    for each, decay in itertools.product(rules, order):
        tried.append((each, fit(one, each, rates, decay * rates)))
        if tried[-1][1].error <= EXPLAINED:
            return tried[-1]
    for each in rules:
        free = fit(one, each)
        own = [fit(one, each, free.rates, decay * free.rates) for decay in order]
        tried += [(each, found) for found in (fit(one, each, rates), *own, free)]
    best = min(found.error for _, found in tried)
    return next(pair for pair in tried if pair[1].error <= max(1.1 * best, EXPLAINED))
