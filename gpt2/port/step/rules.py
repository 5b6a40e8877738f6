"""Update rules of optimizers: AdamW as it should be and as it is mistaken, SGD; and the direction in which each moves.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2; Kingma and Ba, "Adam" (2015). With
gradients g of step t, m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g^2, the direction is (m / c1) / (sqrt(v / c2) + eps), with
c = 1 - b^t. A parameter p becomes p - rate direction - decay p. Everything is elementwise, so a sample of the entries is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ROUNDING = 2 * 2.0**-52  # of a parameter, when a change is added to it in float64
MAX_SIGMA = 4.0  # a residual counts as so many times its noise at most, so that a few odd ones do not decide


# The step whose factors correct the moments' bias: the right one, none, the one after, or that of one moment only.
Correction = Literal["full", "none", "late", "first", "second"]
# Where eps is added: to the corrected root, inside the root, or to the root before its correction.
Place = Literal["outside", "inside", "before"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True)
class Rule:
    """An optimizer's formula, without its rate and its decoupled decay, which are fitted for each step and parameter.

    ``coupled``: a decay that is added to the gradient. ``lost``: the moments begin at zero in every step; ``counted``: but the
    number of the step, for their correction, does not. Several constants at once are arrays (R, 1).
    """

    kind: Literal["adam", "sgd", "lion"] = "adam"
    beta1: Any = 0.9
    beta2: Any = 0.999
    eps: Any = 1e-8
    correction: Correction = "full"
    place: Place = "outside"
    amsgrad: bool = False
    coupled: float = 0.0
    lost: bool = False
    counted: bool = False
    nesterov: bool = False


@dataclass(frozen=True)
class Track:
    """One parameter over K updates: values before, gradients, and changes, each (K, n); ``seen``: whether it had a gradient.

    ``noise``: the error (K, n) that rounding may make in the changes; None where they are exact. ``small``: a norm or bias, which
    a coupled decay may leave out. ``calls``: the number of the step that each update belongs to.
    """

    name: str
    before: Array
    gradient: Array
    change: Array
    seen: NDArray[np.bool_]
    noise: Array | None = None
    small: bool = False
    calls: tuple[int, ...] = ()

    def part(self, index: NDArray[np.int64]) -> Track:
        """Return some entries."""
        noise = None if self.noise is None else self.noise[:, index]
        before, gradient, change = (one[:, index] for one in (self.before, self.gradient, self.change))
        return replace(self, before=before, gradient=gradient, change=change, noise=noise)

    def then(self, later: Track) -> Track:
        """Return this track, without noise, and then another."""
        pairs = ([getattr(track, one) for track in (self, later)] for one in ("before", "gradient", "change", "seen"))
        before, gradient, change, seen = map(np.concatenate, pairs)
        return replace(later, before=before, gradient=gradient, change=change, seen=seen, noise=None)


def directions(rule: Rule, track: Track) -> Array:
    """Return the directions (K, n) in which ``rule`` moves a parameter, from its own values and gradients.

    They are (R, K, n) for a rule with R values of its constants.
    """
    n = track.before.shape[1]
    m, v, most, step = np.zeros(n), np.zeros(n), np.zeros(n), 0
    b1, b2, eps = rule.beta1, rule.beta2, rule.eps
    out = np.zeros((*np.shape(b1)[:-1], *track.before.shape))
    for t in np.flatnonzero(track.seen):
        g = track.gradient[t] + rule.coupled * track.before[t]
        if rule.lost:
            m, v, most = np.zeros((3, n))
            step *= rule.counted
        step += 1
        if rule.kind == "sgd":
            m = b1 * m + g
            out[..., t, :] = g + b1 * m if rule.nesterov else m
            continue
        if rule.kind == "lion":
            out[..., t, :] = np.sign(b1 * m + (1 - b1) * g)
            m = b2 * m + (1 - b2) * g
            continue
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        most = np.maximum(most, v) if rule.amsgrad else v
        at = step + (rule.correction == "late")
        c1 = np.maximum(1 - b1**at, 1e-300) if rule.correction not in ("none", "second") else 1.0
        c2 = np.maximum(1 - b2**at, 1e-300) if rule.correction not in ("none", "first") else 1.0
        inside, before, outside = ((rule.place == place) * eps for place in ("inside", "before", "outside"))
        root = np.sqrt(most / c2 + inside) + before / np.sqrt(c2) + outside
        out[..., t, :] = m / (c1 * np.where(root == 0, 1.0, root))
    return out


@dataclass(frozen=True)
class Fit:
    """A rule on one parameter: its rates and decays by step (K,), and its error; decay NaN if unknown.

    The error is relative to the changes; of a track with noise, the root mean square of the residuals in units of it; (R,) for a
    rule with R values of its constants. ``doubts``: how much each rate may be off because the parameter is rounded; much, where
    its gradient is nearly zero.
    """

    rates: Array
    decays: Array
    error: Any
    doubts: Array

    @property
    def decay(self) -> float | None:
        """The decay over the rate; None if it cannot be known."""
        known = ~np.isnan(self.decays) & (np.abs(self.rates) > 0)
        if not bool(known.any()):
            return None
        value = float(np.median(self.decays[known] / self.rates[known]))
        return 0.0 if abs(value) < 1e-6 else value


def fit(track: Track, rule: Rule, rates: Array | None = None, decays: Array | None = None, earlier: Track | None = None) -> Fit:
    """Fit the rates and decays of each step to ``change = -rate direction - decay before``; each may be given.

    ``earlier``: the track whose moments go on here.
    """
    change, before, given = track.change, track.before, (rates, decays)
    direction = directions(rule, earlier.then(track) if earlier else track)[..., -len(change) :, :]
    if track.noise is not None:
        direction, change, before = direction / track.noise, change / track.noise, before / track.noise
    uu, up, pp = (direction * direction).sum(-1), (direction * before).sum(-1), (before * before).sum(-1)
    ud, pd = -(direction * change).sum(-1), -(before * change).sum(-1)
    if rates is None:
        determinant = uu * pp - up * up
        both = determinant > 1e-9 * uu * pp
        safe = np.where(both, determinant, 1.0)
        rates = np.where(both, (pp * ud - up * pd) / safe, ud / np.where(uu > 0, uu, np.inf))
        decays = np.where(both, (uu * pd - up * ud) / safe, np.nan)
    elif decays is None:
        decays = np.where(pp > 1e-30, (pd - rates * up) / np.where(pp > 1e-30, pp, 1.0), np.nan)
    residual = change + rates[..., None] * direction + np.nan_to_num(decays)[..., None] * before
    if track.noise is not None:
        error, doubts = np.sqrt((np.minimum(np.abs(residual), MAX_SIGMA) ** 2).mean((-2, -1))), np.zeros_like(uu)
    else:
        doubts = ROUNDING * np.sqrt(pp / np.where(uu > 0, uu, np.inf))
        left = np.sqrt((residual * residual).sum((-2, -1))) - ROUNDING * math.sqrt(float(pp.sum()))
        error = np.maximum(0.0, left) / (math.sqrt(float((change * change).sum())) or np.inf)
    here = Fit(rates, decays, error if error.ndim else float(error), doubts)
    if not track.small or not rule.coupled:
        return here
    bare = fit(track, replace(rule, coupled=0.0), *given)
    return replace(here, error=np.minimum(here.error, bare.error)) if error.ndim else min(here, bare, key=lambda one: one.error)
