"""Search the rule by which an optimizer moved a few parameters, from their values and gradients alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpt2.port.step.clipping import Clip
from gpt2.port.step.rules import CORRECTIONS, PLACES, Array, Rule, Track, directions, fit
from gpt2.port.step.settings import Settings

EXACT = 1e-8  # relative error of changes that a rule explains
FITS = 1e-6  # the same, of a rule that is known
ROUNDED = 1e-4  # the same, where the author keeps moments or constants in float32
EXPLAINED = 1.0  # the same of changes with noise, in units of it
LATER = 1e-4  # the same in the sessions after the first
PART = 192  # entries of each parameter that the search uses
BETAS1 = (0.9, 0.95, 0.8, 0.99, 0.0, 0.999, 0.98, 0.5)
BETAS2 = (0.999, 0.95, 0.99, 0.9, 0.98, 0.995, 0.8)
EPSILONS = (1e-8, 1e-6, 1e-5, 1e-7, 1e-10, 1e-12, 1e-4, 1e-3)
MAX_BETA2, MAX_EPS = 0.99999, 1e-2
DECAYS = (0.1, 0.01, 0.001, 0.05, 1e-4, 0.5)


@dataclass(frozen=True)
class Answer:
    """A rule, and its error relative to the changes, or in units of their noise.

    ``clip``: the clipping before it; ``variant``: the number of the variant of the gradients. ``rates``: those that the settings
    say, if these explain the changes too.
    """

    rule: Rule
    error: float
    clip: Clip | None = None
    variant: int = 0
    rates: Array | None = None


NOTHING = Answer(Rule(), math.inf)


class Search:
    """The search for a rule that explains ``tracks``, a few parameters together; each keeps its own rates and decays."""

    def __init__(self, tracks: Sequence[Track], settings: Settings) -> None:
        self.noisy = any(track.noise is not None for track in tracks)
        self.enough = EXPLAINED if self.noisy else EXACT
        self.tracks = list(tracks) if self.noisy else [_chosen(track) for track in tracks]
        one, two = settings.beta1, settings.beta2
        self.betas1, self.betas2 = (
            tuple(dict.fromkeys(beta for beta in betas if beta is not None))
            for betas in ((one, *BETAS1, two), (two, *BETAS2, one))
        )
        self.decays = tuple(dict.fromkeys(d for d in (settings.weight_decay, *DECAYS) if d))
        self.sizes = np.array([float((track.change**2).sum()) for track in self.tracks])
        self.size = max(float(self.sizes.sum()), 1e-300)

    def error(self, rule: Rule) -> float:
        if rule.beta2 > MAX_BETA2 or rule.eps > MAX_EPS:  # these make Adam what SGD is
            return math.inf
        return float(self._errors(rule))

    def _errors(self, rule: Rule) -> Array:
        """Return the error of all tracks: the largest where they have noise, else that of all changes together."""
        errors = np.stack([fit(track, rule).error for track in self.tracks])
        found: Array = errors.max(0) if self.noisy else np.sqrt(np.tensordot(self.sizes, errors**2, axes=1) / self.size)
        return found

    def best(self, most: int | None = None) -> Answer:
        """Return the first of ``most`` structures that explains the changes, else the rule with the least error."""
        *_, best = itertools.islice(self.improving(), most)
        return best

    def improving(self) -> Iterator[Answer]:
        """Yield the best rule so far after each structure, the usual before the rare, until one explains the changes."""
        best = NOTHING
        for structure in self._structures():
            found = self._refined(self._from_grid(structure))
            if found.error < best.error / 30 or found.error <= self.enough < best.error:
                best = found
            if best.error <= self.enough:
                break
            yield best
        rule = best.rule
        if rule.kind == "adam" and max(rule.beta1, rule.beta2) < 1e-3:  # moments that hold one step: they are lost
            lost = self._tried(Rule(eps=rule.eps, place=rule.place, coupled=rule.coupled, lost=True))
            best = lost if lost.error <= max(self.enough, 2 * best.error) else best
        yield best

    def _structures(self) -> Iterator[Rule]:
        adam, momentum = Rule(), Rule(kind="sgd", beta1=0.9)
        lost, largest = replace(adam, lost=True), replace(adam, amsgrad=True)
        coupled = [replace(adam, coupled=decay) for decay in self.decays]
        yield from (adam, lost, replace(momentum, beta1=0.0), replace(lost, counted=True), momentum, *coupled[:2])
        departures = [replace(adam, correction=c, place=p) for c, p in itertools.product(CORRECTIONS, PLACES)]
        yield from (one for one in departures if one != adam)
        yield from (largest, replace(momentum, nesterov=True), Rule(kind="lion"))
        yield from (replace(largest, place="inside"), replace(largest, correction="none"))
        for one in coupled:
            yield from (one, replace(one, correction="none"), replace(one, correction="late"))
            yield from (replace(one, place="inside"), replace(one, amsgrad=True))
            yield replace(momentum, coupled=one.coupled)  # with momentum, decay is in the gradient

    def _from_grid(self, rule: Rule) -> Answer:
        """Return the best of the usual constants for a structure."""
        betas1 = self.betas1 if rule.beta1 and not (rule.lost and not rule.counted) else [rule.beta1]
        betas2 = self.betas2 if rule.kind != "sgd" and len(betas1) > 1 else [rule.beta2]
        choices = [replace(rule, beta1=a, beta2=b) for a, b in itertools.product(betas1, betas2)]
        best = self._least(choices)
        if best.error > self.enough and rule.kind == "adam":
            best = min(best, self._least([replace(best.rule, eps=eps) for eps in EPSILONS]), key=lambda one: one.error)
            if best.rule.eps != rule.eps:
                near = [replace(one, eps=best.rule.eps) for one in choices]
                best = min(best, self._least(near), key=lambda one: one.error)
        return best

    def _least(self, rules: list[Rule]) -> Answer:
        """Return the first rule that explains the changes, else the one with the least error; they differ in constants only."""
        first = self._tried(rules[0])
        if first.error <= self.enough or len(rules) == 1:
            return first
        beta1, beta2, eps = np.array([[[rule.beta1], [rule.beta2], [rule.eps]] for rule in rules]).transpose(1, 0, 2)
        errors = self._errors(replace(rules[0], beta1=beta1, beta2=beta2, eps=eps))
        good = np.flatnonzero(errors <= self.enough)
        at = int(good[0]) if len(good) else int(errors.argmin())
        return Answer(rules[at], float(errors[at]))

    def _refined(self, found: Answer) -> Answer:
        """Return the rule with its constants fitted, rounded to the digits that people write where that explains as much.

        Not under noise: of two steps, other betas do what another clipping does.
        """
        if self.noisy or found.error <= EXACT or found.error > 0.5 or found.rule.kind != "adam":
            return found
        found = self._descended(found)
        for eps in (found.rule.eps, *sorted(EPSILONS, key=lambda eps: abs(math.log(eps / (found.rule.eps or 1e-30))))[:3]):
            if found.error <= EXACT:
                break
            tidy = self._tried(_tidy(replace(found.rule, eps=eps)))
            if tidy.error < 10 * found.error:
                again = self._descended(tidy, with_eps=False)
                found = min(found, tidy, again, key=lambda one: one.error)
        tidy = self._tried(_tidy(found.rule))
        return tidy if tidy.error <= max(2 * found.error, EXACT / 10) else found

    def _tried(self, rule: Rule) -> Answer:
        return Answer(rule, self.error(rule))

    def _descended(self, found: Answer, with_eps: bool = True) -> Answer:
        """Return the rule with constants fitted by Gauss and Newton's method, on their logarithms."""
        axes = np.eye(4)[[True, True, with_eps, found.rule.coupled > 0]]
        for _ in range(12):
            x, residual = _numbers(found.rule), self._residual(found.rule)
            columns = [(self._residual(_rule(found.rule, x + 1e-6 * axis)) - residual) / 1e-6 for axis in axes]
            move, *_ = np.linalg.lstsq(np.stack(columns, 1), -residual, rcond=1e-12)
            move = np.clip(move, -2, 2) @ axes
            tries = (self._tried(_rule(found.rule, x + scale * move)) for scale in (1.0, 0.3, 0.1, 0.01))
            better = next((one for one in tries if one.error < found.error), found)
            done = better.error > found.error * 0.99 or better.error <= EXACT / 100
            found = better
            if done:
                break
        return found

    def _residual(self, rule: Rule) -> Array:
        parts = []
        for track in self.tracks:
            one = fit(track, rule)
            moved = one.rates[:, None] * directions(rule, track) + np.nan_to_num(one.decays)[:, None] * track.before
            parts.append((track.change + moved).ravel())
        return np.concatenate(parts) / math.sqrt(self.size)


def _numbers(rule: Rule) -> Array:
    """Return the logarithms of what may be fitted: 1 - beta1, 1 - beta2, eps, and a coupled decay."""
    return np.log(np.maximum([1 - rule.beta1, 1 - rule.beta2, rule.eps, rule.coupled], 1e-30))


def _rule(rule: Rule, x: Array) -> Rule:
    """Return the rule with constants of these logarithms."""
    one, two, eps, coupled = np.exp(np.minimum(x, [0.0, 0.0, 0.0, 5.0])).tolist()
    return replace(rule, beta1=1 - one, beta2=1 - two, eps=eps, coupled=coupled if rule.coupled else 0.0)


def _tidy(rule: Rule) -> Rule:
    """Return the rule with its constants rounded to the digits that people write."""
    eps, coupled = float(f"{rule.eps:.2g}") if rule.eps > 1e-20 else 0.0, float(f"{rule.coupled:.4g}")
    return replace(rule, beta1=round(rule.beta1, 5), beta2=round(rule.beta2, 6), eps=eps, coupled=coupled)


def _chosen(track: Track) -> Track:
    """Return a part of a track: entries whose gradients differ in size, with small ones, where eps shows."""
    if track.before.shape[1] <= PART:
        return track
    size = np.abs(track.gradient).sum(0)
    order = np.argsort(size)
    order = order[size[order] > 0] if bool((size > 0).any()) else order
    return track.part(order[np.unique(np.linspace(0, len(order) - 1, PART).astype(np.int64))])
