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
from typing import Any, Literal, NamedTuple

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


@dataclass(frozen=True)
class Rule:
    """An optimizer's formula, without its rate and its decoupled decay.

    ``correction``: by the factors of the right step, by none, or by those of the step after. ``place``: eps is added to the
    corrected root, inside the root, or to the root before its correction. ``coupled``: a decay that is added to the gradient.
    ``lost``: the moments begin at zero in every step; ``counted``: but the number of the step, for their correction, does not.
    """

    kind: Literal["adam", "sgd"] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    correction: Literal["full", "none", "late"] = "full"
    place: Literal["outside", "inside", "before"] = "outside"
    amsgrad: bool = False
    coupled: float = 0.0
    lost: bool = False
    counted: bool = False


# How a formula departs from AdamW's: a field of the rule and its value, the cause, and words.
DEPARTURES: tuple[tuple[str, Any, str, str], ...] = (
    ("lost", True, "momentum-lost", "the moments are zero at the beginning of each step"),
    ("correction", "none", "bias-correction-missing", "neither moment is divided by 1 - beta**t"),
    ("correction", "late", "bias-correction-step", "the factors 1 - beta**t are those of step t + 1"),
    ("place", "inside", "eps-inside-root", "the divisor is sqrt(v + {eps:.4g})"),
    ("place", "before", "eps-before-correction", "{eps:.4g} is added to sqrt(v) before its correction"),
    ("amsgrad", True, "amsgrad", "the largest second moment so far is used"),
)


class Track(NamedTuple):
    """One parameter over K updates: values before, gradients, and changes, each (K, n); ``seen``: whether it had a gradient."""

    before: Array
    gradient: Array
    change: Array
    seen: NDArray[np.bool_]

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
            out[t] = m = b1 * m + g
        else:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            most = np.maximum(most, v) if rule.amsgrad else v
            at = step + (rule.correction == "late")
            c1, c2 = (1.0, 1.0) if rule.correction == "none" else (1 - b1**at, 1 - b2**at)
            inside, before, outside = ((rule.place == place) * rule.eps for place in ("inside", "before", "outside"))
            root = np.sqrt(most / c2 + inside) + before / math.sqrt(c2) + outside
            out[t] = m / (c1 * np.where(root == 0, 1.0, root))
    return out


@dataclass(frozen=True)
class RuleFit:
    """A rule on one parameter: its rates and decays by step (K,), NaN where unknown, and the error relative to the changes.

    ``doubts``: how much each rate may be off because the parameter is rounded; much, where its gradient is nearly zero.
    """

    rule: Rule
    rates: Array
    decays: Array
    error: float
    doubts: Array

    @property
    def decay(self) -> float | None:
        """The decay over the rate; None if it cannot be known."""
        known = ~np.isnan(self.decays) & (np.abs(self.rates) > 0)
        value = float(np.median(self.decays[known] / self.rates[known])) if bool(known.any()) else None
        return 0.0 if value is not None and abs(value) < 1e-6 else value


def fit(track: Track, rule: Rule, earlier: Track | None = None) -> RuleFit:
    """Fit the rates and decays of each step to ``change = -rate direction - decay before``.

    ``earlier``: the track whose moments go on here.
    """
    change, before = track.change, track.before
    whole = Track(*(np.concatenate(both) for both in zip(earlier, track, strict=True))) if earlier else track
    direction = directions(rule, whole)[-len(change) :]
    uu, up, pp = (direction * direction).sum(-1), (direction * before).sum(-1), (before * before).sum(-1)
    ud, pd = -(direction * change).sum(-1), -(before * change).sum(-1)
    determinant = uu * pp - up * up
    both = determinant > 1e-9 * uu * pp
    safe = np.where(both, determinant, 1.0)
    rates = np.where(both, (pp * ud - up * pd) / safe, ud / np.where(uu > 0, uu, np.inf))
    decays = np.where(both, (uu * pd - up * ud) / safe, np.nan)
    residual = change + rates[:, None] * direction + np.nan_to_num(decays)[:, None] * before
    left = float(np.linalg.norm(residual)) - ROUNDING * math.sqrt(float(pp.sum()))
    error = max(0.0, left) / (float(np.linalg.norm(change)) or math.inf)
    return RuleFit(rule, rates, decays, error, ROUNDING * np.sqrt(pp / np.where(uu > 0, uu, np.inf)))


def variants(settings: StepSettings) -> list[Rule]:
    """Return the table of rules that people write: AdamW first, and the usual mistakes before the rare."""
    adam, sgd = Rule(beta1=settings.beta1 or 0.9, beta2=settings.beta2 or 0.999), Rule("sgd", 0.0)
    momentum = replace(sgd, beta1=0.9)

    def departing(rule: Rule) -> list[Rule]:
        return [replace(rule, **{field: value}) for field, value, *_ in DEPARTURES]

    lost, *others = departing(adam)
    rules = [adam, lost, sgd, replace(lost, counted=True), momentum]
    rules += [replace(adam, coupled=decay) for decay in (settings.weight_decay, *DECAYS) if decay]
    rules += [*others, replace(adam, beta1=0.0, correction="none"), *(two for one in others for two in departing(one)[1:])]
    rules += [replace(one, coupled=settings.weight_decay or 0.01) for one in (*others, momentum)]
    return list(dict.fromkeys(rules))


def constants(rule: Rule, settings: StepSettings) -> Iterator[Rule]:
    """Yield a rule with other usual betas, also swapped, and AdamW with another eps too; then with another eps alone."""
    adam, given = rule.kind == "adam", (settings.beta1, settings.beta2)
    firsts = [*filter(None, given), *BETAS1] if rule.beta1 else [0.0]
    seconds = [*filter(None, given), *BETAS2] if adam else [rule.beta2]
    plain = rule == Rule(beta1=rule.beta1, beta2=rule.beta2)
    for a, b in itertools.product(firsts, seconds) if not rule.lost or rule.counted else ():
        yield from (replace(rule, beta1=a, beta2=b, eps=eps) for eps in (rule.eps, *(EPSILONS if plain else ())))
    yield from (replace(rule, eps=eps) for eps in (EPSILONS if adam else ()))


def error_of(rule: Rule, tracks: Sequence[Track]) -> float:
    """Return the error of a rule on some parameters together, each with its own rates and decays, relative to all changes."""
    sizes = [float((track.change**2).sum()) for track in tracks]
    errors = (fit(track, rule).error ** 2 * size for track, size in zip(tracks, sizes, strict=True))
    return math.sqrt(sum(errors) / max(sum(sizes), 1e-300))


def recognised_rule(tracks: Sequence[Track], settings: StepSettings, expected: Array | None = None) -> tuple[Rule, float]:
    """Return the rule that moved some parameters, and its error: AdamW as the settings say, or the first of the table that does.

    ``expected``: the rates (K,) of the settings. A factor of a step cannot be told from its rate: moments without correction move
    a parameter as those do whose eps is added before the correction, at other rates. So rates that are steady beside the expected
    ones decide between rules that give the same changes.
    """
    tracks, table = [track.sample for track in tracks], variants(settings)
    best, error = table[0], math.inf
    for number, rule in enumerate(itertools.chain(table, *(constants(rule, settings) for rule in table))):
        if error <= (EXACT if number < len(table) else FITS):
            break
        if (own := error_of(rule, tracks)) < error / BETTER or own <= EXACT:
            best, error = rule, own
    if expected is None or best.kind == "sgd" or best.lost or not bool((expected > 0).all()):
        return best, error
    alike = [replace(best, place=p, correction=c) for p in ("outside", "inside", "before") for c in ("full", "none", "late")]
    alike = [one for one in alike if error_of(one, tracks) <= max(EXACT, 2 * error)]
    steady = (one for one in alike if spread(rates_of(tracks, one) / expected) < STEADY)
    return next(steady, best), error


def rates_of(tracks: Sequence[Track], rule: Rule) -> Array:
    """Return the rates of most tracks, (K,)."""
    rates: Array = np.median(np.stack([fit(track, rule).rates for track in tracks]), axis=0)
    return rates


def spread(values: Sequence[float] | Array) -> float:
    """Return the difference of the largest and the least value, over the largest one's size."""
    return float(max(values) - min(values)) / (float(max(map(abs, values))) or math.inf)
