"""Causes in the update: fit a rule to each parameter's own values and gradients, and compare it with the settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from statistics import median

import numpy as np

from gpt2.port.step.clipping import Clip
from gpt2.port.step.inside import FITS, RuleSearch, share_of, times, tracks
from gpt2.port.step.records import Gradient, Update, Watched
from gpt2.port.step.rules import Array, Correction, Eps, Fit, Kind, Moments, Rule, Track, directions, fit
from gpt2.port.step.settings import Settings
from gpt2.port.step.updates import ROUNDED, Found, Search

STEADY, STEADY_NOISY = 1e-4, 1e-2  # relative spread of rates that are meant to be one; where the parameters are rounded


@dataclass
class Movement:
    """How a step moves each parameter: its rule and the fits by session; what no rule explains is in ``odd``."""

    rules: dict[str, Rule] = field(default_factory=dict)
    fits: dict[str, Fit] = field(default_factory=dict)  # of the first session
    roles: dict[str, str] = field(default_factory=dict)
    clip: Clip | None = None  # clipping that happens inside the update
    kept: bool = False  # moments go on from one session to the next
    share: float = 1.0  # what the sum of the gradients of several passes is multiplied by, where ``.grad`` does not show it
    odd: list[str] = field(default_factory=list)
    error: float = 0.0

    @property
    def rule(self) -> Rule:
        """The rule of most parameters."""
        counts: dict[Rule, int] = {}
        for rule in self.rules.values():
            counts[rule] = counts.get(rule, 0) + 1
        return max(counts, key=lambda rule: counts[rule]) if counts else Rule()


def read_movement(sessions: Sequence[Sequence[Update]], settings: Settings, role: Callable[[str], str]) -> Movement:
    """Find the rule of every parameter that moves in the first session, and test it in the others.

    Gradients of several passes that ``.grad`` does not hold may be summed or averaged: what explains the changes is the answer.
    """
    movement = Movement()
    first = tracks(sessions[0])
    moving = {name: track for name, track in first.items() if bool((track.change != 0).any()) and bool(track.seen.any())}
    movement.roles = {name: role(name) for name in first}
    if not moving:
        return movement
    chosen = _chosen(moving, movement.roles)
    movement.share = share_of(sessions, chosen, settings)
    sessions = times(sessions, movement.share)
    found, movement.clip = RuleSearch(sessions, chosen, settings).found()
    moved = tracks(sessions[0], movement.clip)
    calls = [update.call for update in sessions[0]]
    found = replace(found, rule=plainest(found, [moved[name] for name in chosen], settings, calls))
    known = [found.rule]
    for name in moving:
        rule, best = _rule_of(moved[name], known, settings, found)
        movement.rules[name], movement.fits[name] = rule, best
        movement.error = max(movement.error, best.error)
        if best.error > max(FITS, ROUNDED if found.error > FITS else FITS):
            movement.odd.append(name)
        elif rule not in known:
            known.append(rule)
    _test_others(movement, sessions)
    return movement


def plainest(found: Found, tracks: Sequence[Track], settings: Settings, calls: Sequence[int]) -> Rule:
    """Return the rule whose rates are the expected ones, or steady, among those that differ in each step by a factor only.

    A factor of a step cannot be told from its rate: moments without correction move a parameter as those do whose eps is added
    before the correction, at other rates. Where noise hides eps, all corrections do.
    """
    rule, search = found.rule, Search(tracks, settings)
    if rule.kind is not Kind.ADAM or rule.lost:
        return rule
    expected = np.array([settings.rate(call) for call in calls]) if settings.scheduled else np.ones(len(calls))
    if not bool((expected > 0).all()):
        return rule
    alike = [replace(rule, correction=c, place=p) for p in Eps for c in Correction]
    alike = [one for one in alike if search.error(one) <= max(search.enough, 2 * found.error)]
    steady, spreads = STEADY_NOISY if search.noisy else STEADY, []
    for one in alike:
        shares = np.median(np.stack([fit(track, one).rates for track in tracks]), axis=0) / expected
        spreads.append(float(shares.max() - shares.min()) / float(np.abs(shares).max() or 1))
    return next((one for one, spread in zip(alike, spreads, strict=True) if spread < steady), rule)


def _chosen(moving: dict[str, Track], roles: dict[str, str]) -> list[str]:
    """Return the parameters that the search uses: matrices, where there are some, whose gradients are not all alike."""
    matrices = [name for name in moving if roles[name] == "matrix"] or list(moving)
    return [matrices[len(matrices) // 3], matrices[2 * len(matrices) // 3]] if len(matrices) > 2 else matrices


def _rule_of(track: Track, known: list[Rule], settings: Settings, found: Found) -> tuple[Rule, Fit]:
    """Return the rule of one parameter: one that is known, one without the coupled decay, or a new one."""
    tried: list[tuple[Rule, Fit]] = []
    uncoupled = [replace(rule, coupled=0.0) for rule in known if rule.coupled]
    coupled = [replace(rule, coupled=value) for rule in known if not rule.coupled for value in (settings.weight_decay,) if value]
    for rule in [*known, *uncoupled, *coupled]:
        one = fit(track, rule)
        tried.append((rule, one))
        if one.error <= FITS:
            return rule, one
    best = min(tried, key=lambda pair: pair[1].error)
    if found.error > ROUNDED or best[1].error <= ROUNDED < found.error:
        return best
    new = Search([track], settings).best().rule
    one = fit(track, new)
    return (new, one) if one.error < best[1].error / 30 else best


def _test_others(movement: Movement, sessions: Sequence[Sequence[Update]]) -> None:
    """Test the rules in the other sessions, from moments of zero, or from those that the session before left."""
    for earlier, later in itertools.pairwise(sessions):
        if not earlier or not later:
            continue
        before, after = tracks(earlier, movement.clip), tracks(later, movement.clip)
        fresh, going_on, failed = 0, 0, []
        for name, rule in movement.rules.items():
            if name in movement.odd or not bool((after[name].change != 0).any()):
                continue
            one = fit(after[name], rule)
            if one.error <= 1e-4:
                fresh += 1
                continue
            n = after[name].before.shape[1]
            state = Moments(np.zeros(n), np.zeros(n), np.zeros(n))
            directions(rule, before[name], state)
            again = fit(after[name], rule, state=state)
            if again.error <= 1e-4:
                going_on += 1
            else:
                failed.append(name)
        if going_on > fresh:
            movement.kept = True
        if movement.kept or (failed and earlier is not sessions[0]):
            return
        if len(failed) > len(movement.rules) // 4:
            movement.odd += [name for name in failed if name not in movement.odd]


def rates_of(movement: Movement) -> tuple[Array, dict[str, float]]:
    """Return the rates (K,) of most parameters, and the factor of those that differ from them (without what decay explains)."""
    values = {name: one.rates for name, one in movement.fits.items() if name not in movement.odd}
    if not values:
        return np.zeros(0), {}
    table = np.stack(list(values.values()))
    plain = [name for name in values if not _decays(movement.fits[name])]
    base = np.median(np.stack([values[name] for name in plain]) if plain else table, axis=0)
    factors = {}
    for name, rates in values.items():
        live = np.abs(base) > 100 * movement.fits[name].doubts
        factor = median((rates[live] / base[live]).tolist()) if bool(live.any()) else 1.0
        if abs(factor - 1) > 0.01:
            factors[name] = factor
    return base, factors


def _decays(one: Fit) -> bool:
    known = one.decays[~np.isnan(one.decays)]
    return bool(len(known)) and float(np.abs(known).max()) > 1e-6 * float(np.abs(one.rates).max())


def decay_of(one: Fit) -> float | None:
    """Return a parameter's decay over its rate; None if it cannot be known."""
    known = ~np.isnan(one.decays) & (np.abs(one.rates) > 0)
    if not bool(known.any()):
        return None
    value = float(np.median(one.decays[known] / one.rates[known]))
    return 0.0 if abs(value) < 1e-6 else value


def updates_of(calls: Sequence[Watched]) -> list[Update]:
    """Return all updates of some calls, each with the gradient that it used: ``.grad``, or else the sum of what arrived."""
    found = []
    for number, call in enumerate(calls):
        done = 0
        for update in call.updates:
            update.call = number
            passes = call.backwards[done : update.backwards]
            done = update.backwards
            if not update.gradient.samples and passes:
                held = passes[-1].held
                update.gradient = held if held.samples else reduce(Gradient.plus, (one.arrived for one in passes))
                update.summed = 0 if held.samples else len(passes)
            found.append(update)
    return found
