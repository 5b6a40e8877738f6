"""The rules by which an optimizer moves a parameter: AdamW, a table of what is written in its place, and how one is recognised.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2; Kingma and Ba, "Adam" (2015). With
gradients g of step t, m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g^2, the direction is (m / c1) / (sqrt(v / c2) + eps), with
c = 1 - b^t. A parameter p becomes p - rate direction - decay p; rate and decay of each step are solved by least squares.
Everything is elementwise, so a sample of the entries is enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gpt2.port.step.settings import StepSettings

Array = NDArray[np.float64]
ROUNDING = 2 * 2.0**-52  # of a parameter, when a change is added to it in float64
EXACT = 1e-8  # relative error of changes that a rule explains
FITS = 1e-6  # the same, of a rule that is known
ROUNDED = 1e-4  # the same, where the author keeps moments or constants in float32; also in later sessions
STEADY = 1e-4  # relative spread of rates that are meant to be one
BETTER = 30  # times smaller is the error of a rarer rule that is preferred
PART = 192  # entries of each parameter that the search uses
BETAS1 = (0.9, 0.95, 0.8, 0.99, 0.0, 0.999, 0.98, 0.5)
BETAS2 = (0.999, 0.95, 0.99, 0.9, 0.98, 0.995, 0.8)
EPSILONS = (1e-8, 1e-6, 1e-5, 1e-7, 1e-10, 1e-12, 1e-4, 1e-3)
DECAYS = (0.1, 0.01, 0.001, 0.05, 1e-4, 0.5)
MAX_BETA2, MAX_EPS = 0.99999, 1e-2  # beyond them, Adam is what SGD is

# The step whose factors correct the moments' bias: the right one, none, the one after, or that of one moment only.
Correction = Literal["full", "none", "late", "first", "second"]
# Where eps is added: to the corrected root, inside the root, or to the root before its correction.
DecayPlace = Literal["outside", "inside", "before"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
PLACES: tuple[DecayPlace, ...] = get_args(DecayPlace)


@dataclass(frozen=True)
class Rule:
    """An optimizer's formula, without its rate and its decoupled decay.

    ``coupled``: a decay that is added to the gradient. ``lost``: the moments begin at zero in every step; ``counted``: but the
    number of the step, for their correction, does not.
    """

    kind: Literal["adam", "sgd"] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    correction: Correction = "full"
    place: DecayPlace = "outside"
    amsgrad: bool = False
    coupled: float = 0.0
    lost: bool = False
    counted: bool = False


@dataclass(frozen=True)
class Track:
    """One parameter over K updates: values before, gradients, and changes, each (K, n); ``seen``: whether it had a gradient."""

    before: Array
    gradient: Array
    change: Array
    seen: NDArray[np.bool_]

    def then(self, later: Track) -> Track:
        """Return this track, and then another."""
        return Track(*(np.concatenate([vars(one)[name] for one in (self, later)]) for name in vars(self)))

    @property
    def sample(self) -> Track:
        """Entries whose gradients differ in size, with small ones, where eps shows."""
        size = np.abs(self.gradient).sum(0)
        order = np.argsort(size)
        order = order[size[order] > 0] if bool((size > 0).any()) else order
        index = order[np.unique(np.linspace(0, len(order) - 1, PART).astype(np.int64))]
        return Track(self.before[:, index], self.gradient[:, index], self.change[:, index], self.seen)


def directions(rule: Rule, track: Track) -> Array:
    """Return the directions (K, n) in which a rule moves a parameter, from its own values and gradients."""
    m, v, most = np.zeros((3, track.before.shape[1]))
    b1, b2, step, out = rule.beta1, rule.beta2, 0, np.zeros(track.before.shape)
    for t in np.flatnonzero(track.seen):
        g = track.gradient[t] + rule.coupled * track.before[t]
        if rule.lost:
            m, v, most = np.zeros((3, len(g)))
            step *= rule.counted
        step += 1
        if rule.kind == "sgd":
            m = b1 * m + g
            out[t] = m
        else:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            most = np.maximum(most, v) if rule.amsgrad else v
            at = step + (rule.correction == "late")
            c1 = max(1 - b1**at, 1e-300) if rule.correction not in ("none", "second") else 1.0
            c2 = max(1 - b2**at, 1e-300) if rule.correction not in ("none", "first") else 1.0
            inside, before, outside = ((rule.place == place) * rule.eps for place in ("inside", "before", "outside"))
            root = np.sqrt(most / c2 + inside) + before / math.sqrt(c2) + outside
            out[t] = m / (c1 * np.where(root == 0, 1.0, root))
    return out


@dataclass(frozen=True)
class RuleFit:
    """A rule on one parameter: its rates and decays by step (K,), NaN where unknown, and the error relative to the changes.

    ``doubts``: how much each rate may be off because the parameter is rounded; much, where its gradient is nearly zero.
    ``residual`` (K, n): what is left of the changes.
    """

    rule: Rule
    rates: Array
    decays: Array
    error: float
    doubts: Array
    residual: Array

    @property
    def decay(self) -> float | None:
        """The decay over the rate; None if it cannot be known."""
        known = ~np.isnan(self.decays) & (np.abs(self.rates) > 0)
        if not bool(known.any()):
            return None
        value = float(np.median(self.decays[known] / self.rates[known]))
        return 0.0 if abs(value) < 1e-6 else value


def fit(track: Track, rule: Rule, earlier: Track | None = None) -> RuleFit:
    """Fit the rates and decays of each step to ``change = -rate direction - decay before``.

    ``earlier``: the track whose moments go on here.
    """
    change, before = track.change, track.before
    direction = directions(rule, earlier.then(track) if earlier else track)[-len(change) :]
    uu, up, pp = (direction * direction).sum(-1), (direction * before).sum(-1), (before * before).sum(-1)
    ud, pd = -(direction * change).sum(-1), -(before * change).sum(-1)
    determinant = uu * pp - up * up
    both = determinant > 1e-9 * uu * pp
    safe = np.where(both, determinant, 1.0)
    rates = np.where(both, (pp * ud - up * pd) / safe, ud / np.where(uu > 0, uu, np.inf))
    decays = np.where(both, (uu * pd - up * ud) / safe, np.nan)
    residual = change + rates[:, None] * direction + np.nan_to_num(decays)[:, None] * before
    left = math.sqrt(float((residual * residual).sum())) - ROUNDING * math.sqrt(float(pp.sum()))
    error = max(0.0, left) / (math.sqrt(float((change * change).sum())) or math.inf)
    doubts = ROUNDING * np.sqrt(pp / np.where(uu > 0, uu, np.inf))
    return RuleFit(rule, rates, decays, error, doubts, residual)


def error_of(rule: Rule, tracks: Sequence[Track]) -> float:
    """Return the error of a rule on some parameters together, each with its own rates and decays, relative to all changes."""
    if rule.beta2 > MAX_BETA2 or rule.eps > MAX_EPS:
        return math.inf
    sizes = [float((track.change**2).sum()) for track in tracks]
    errors = (fit(track, rule).error ** 2 * size for track, size in zip(tracks, sizes, strict=True))
    return math.sqrt(sum(errors) / max(sum(sizes), 1e-300))


def rule_table(settings: StepSettings) -> Iterator[Rule]:
    """Yield the rules that people write, AdamW and the usual mistakes before the rare."""
    adam = Rule(beta1=settings.beta1 or 0.9, beta2=settings.beta2 or 0.999)
    momentum, lost, largest = Rule("sgd", 0.9), replace(adam, lost=True), replace(adam, amsgrad=True)
    decays = dict.fromkeys(decay for decay in (settings.weight_decay, *DECAYS) if decay)
    coupled = [replace(adam, coupled=decay) for decay in decays]
    yield from (adam, lost, Rule("sgd", 0.0), replace(lost, counted=True), momentum, *coupled[:2])
    yield from (replace(adam, correction=c, place=p) for c, p in itertools.product(CORRECTIONS, PLACES))
    yield from (largest, replace(adam, beta1=0.0, correction="none"))
    yield from (replace(largest, place="inside"), replace(largest, correction="none"))
    for one in coupled:
        yield from (one, replace(one, correction="none"), replace(one, correction="late"), replace(one, place="inside"))
        yield from (replace(one, amsgrad=True), replace(momentum, coupled=one.coupled))


def constants(rule: Rule, settings: StepSettings) -> Iterator[Rule]:
    """Yield a rule with other usual constants: betas, also swapped, then an eps."""
    one, two = settings.beta1, settings.beta2
    firsts, seconds = ([b for b in dict.fromkeys(row) if b is not None] for row in ((one, *BETAS1, two), (two, *BETAS2, one)))
    if (rule.beta1 or rule.kind == "adam") and not (rule.lost and not rule.counted):
        pairs = itertools.product(firsts if rule.beta1 else [0.0], seconds if rule.kind != "sgd" else [rule.beta2])
        yield from (replace(rule, beta1=a, beta2=b) for a, b in pairs)
    if rule.kind == "adam":
        yield from (replace(rule, eps=eps) for eps in EPSILONS)


def recognised_rule(tracks: Sequence[Track], settings: StepSettings, quick: bool = False) -> tuple[Rule, float]:
    """Return the rule that moved some parameters, and its error: AdamW as the settings say, or the first of the table that does.

    ``quick``: with the constants of the settings alone.
    """
    tracks = [track.sample for track in tracks]
    best, error = Rule(), math.inf
    rules = list(dict.fromkeys(rule_table(settings)))
    others = itertools.chain(*(constants(rule, settings) for rule in ([] if quick else rules)))
    for enough, some in ((EXACT, rules), (FITS, others)):
        for rule in some if error > enough else ():
            if (own := error_of(rule, tracks)) < error / BETTER or own <= EXACT:
                best, error = rule, own
            if error <= EXACT:
                break
    if error > FITS and not quick:  # another eps beside other betas
        near = min(constants(rules[0], settings), key=lambda rule: error_of(rule, tracks))
        own, rule = min(((error_of(one, tracks), one) for one in constants(near, settings)), key=lambda one: one[0])
        best, error = (rule, own) if own < error / BETTER else (best, error)
    if best.kind == "adam" and max(best.beta1, best.beta2) < 1e-3:  # moments that hold one step: they are lost
        lost = Rule(eps=best.eps, place=best.place, coupled=best.coupled, lost=True)
        best = lost if error_of(lost, tracks) <= max(EXACT, 2 * error) else best
    return best, error


def plainest(rule: Rule, tracks: Sequence[Track], expected: Array) -> Rule:
    """Return the rule whose rates (K,) are steady beside the ``expected`` ones, of those that give the same changes.

    A factor of a step cannot be told from its rate: moments without correction move a parameter as those do whose eps is added
    before the correction, at other rates.
    """
    if rule.kind != "adam" or rule.lost or not bool((expected > 0).all()):
        return rule
    tracks = [track.sample for track in tracks]
    most = max(EXACT, 2 * error_of(rule, tracks))
    alike = (replace(rule, correction=c, place=p) for p in PLACES for c in CORRECTIONS)
    alike = (one for one in alike if error_of(one, tracks) <= most)
    return next((one for one in alike if spread(rates_of(tracks, one) / expected) < STEADY), rule)


def rates_of(tracks: Sequence[Track], rule: Rule) -> Array:
    """Return the rates of most tracks, (K,)."""
    rates: Array = np.median(np.stack([fit(track, rule).rates for track in tracks]), axis=0)
    return rates


def spread(values: Sequence[float] | Array) -> float:
    """Return the difference of the largest and the least value, over the largest one's size."""
    return float(max(values) - min(values)) / (float(max(map(abs, values))) or math.inf)
