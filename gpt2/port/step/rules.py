"""Update rules of optimizers: AdamW as it should be and as it is mistaken, SGD; and the direction in which each moves.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2; Kingma and Ba, "Adam" (2015). With
gradients g of step t, m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g^2, the direction is (m / c1) / (sqrt(v / c2) + eps), with
c = 1 - b^t. A parameter p becomes p - rate direction - decay p. Everything is elementwise, so a sample of the entries is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Constants = tuple[Array, Array, Array]
ROUNDING = 2 * 2.0**-52  # of a parameter, when a change is added to it in float64
MAX_SIGMA = 4.0  # a residual counts as so many times its noise at most, so that a few odd ones do not decide


class Correction(Enum):
    """The step whose factors correct the moments' bias: the right one, none, the one after, or the moments are lost."""

    FULL = "full"
    NONE = "none"
    LATE = "late"
    FIRST = "first moment only"
    SECOND = "second moment only"


class Eps(Enum):
    """Where eps is added: to the corrected root, inside the root, or to the root before its correction."""

    OUTSIDE = "outside"
    INSIDE = "inside"
    BEFORE = "before correction"


class Kind(Enum):
    ADAM = "adam"
    SGD = "sgd"
    SIGN = "lion"


@dataclass(frozen=True)
class Rule:
    """An optimizer's formula, without its rate and its decoupled decay, which are fitted for each step and parameter.

    ``coupled``: a decay that is added to the gradient. ``lost``: the moments begin at zero in every step; ``counted``: but the
    number of the step, for their correction, does not.
    """

    kind: Kind = Kind.ADAM
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    correction: Correction = Correction.FULL
    place: Eps = Eps.OUTSIDE
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
        noise = None if self.noise is None else self.noise[:, index]
        return replace(
            self, before=self.before[:, index], gradient=self.gradient[:, index], change=self.change[:, index], noise=noise
        )


@dataclass
class Moments:
    """The state of one parameter."""

    m: Array
    v: Array
    most: Array
    step: int = 0

    @classmethod
    def none(cls, n: int) -> Moments:
        """Return the moments (n,) before the first step."""
        return cls(np.zeros(n), np.zeros(n), np.zeros(n))


def directions(rule: Rule, track: Track, state: Moments | None = None, constants: Constants | None = None) -> Array:
    """Return the directions (K, n) in which ``rule`` moves a parameter, from its own values and gradients; ``state`` goes on.

    ``constants``: R values each, (R, 1), of beta1, beta2 and eps in place of the rule's; the directions are (R, K, n) then.
    """
    n = track.before.shape[1]
    state = Moments.none(n) if state is None else state
    b1, b2, eps = (rule.beta1, rule.beta2, rule.eps) if constants is None else constants
    out = np.zeros((*np.shape(b1)[:-1], *track.before.shape))
    for t in range(len(track.before)):
        if not track.seen[t]:
            continue
        g = track.gradient[t]
        if rule.coupled:
            g = g + rule.coupled * track.before[t]
        if rule.lost:
            state.m, state.v, state.most = np.zeros(n), np.zeros(n), np.zeros(n)
            state.step *= rule.counted
        state.step += 1
        if rule.kind is Kind.SGD:
            state.m = b1 * state.m + g
            out[..., t, :] = g + b1 * state.m if rule.nesterov else state.m
            continue
        if rule.kind is Kind.SIGN:
            out[..., t, :] = np.sign(b1 * state.m + (1 - b1) * g)
            state.m = b2 * state.m + (1 - b2) * g
            continue
        state.m = b1 * state.m + (1 - b1) * g
        state.v = b2 * state.v + (1 - b2) * g * g
        state.most = np.maximum(state.most, state.v) if rule.amsgrad else state.most
        at = state.step + (rule.correction is Correction.LATE)
        c1 = 1 - b1**at if rule.correction not in (Correction.NONE, Correction.SECOND) else 1.0
        c2 = 1 - b2**at if rule.correction not in (Correction.NONE, Correction.FIRST) else 1.0
        c1, c2 = np.maximum(c1, 1e-300), np.maximum(c2, 1e-300)
        v = state.most if rule.amsgrad else state.v
        if rule.place is Eps.INSIDE:
            root = np.sqrt(v / c2 + eps)
        elif rule.place is Eps.BEFORE:
            root = (np.sqrt(v) + eps) / np.sqrt(c2)
        else:
            root = np.sqrt(v / c2) + eps
        out[..., t, :] = state.m / (c1 * np.where(root == 0, 1.0, root))
    return out


@dataclass(frozen=True)
class Fit:
    """A rule on one parameter: its rates and decays by step (K,), and its error; decay NaN if unknown.

    The error is relative to the changes; of a track with noise, the root mean square of the residuals in units of it.
    ``doubts``: how much each rate may be off because the parameter is rounded; much, where its gradient is nearly zero.
    """

    rates: Array
    decays: Array
    error: float
    doubts: Array

    @property
    def decays_much(self) -> bool:
        """Whether the parameter decays by more than a rounding of its rate."""
        known = self.decays[~np.isnan(self.decays)]
        return len(known) > 0 and float(np.abs(known).max()) > 1e-6 * float(np.abs(self.rates).max())

    @property
    def decay(self) -> float | None:
        """The decay over the rate; None if it cannot be known."""
        known = ~np.isnan(self.decays) & (np.abs(self.rates) > 0)
        if not bool(known.any()):
            return None
        value = float(np.median(self.decays[known] / self.rates[known]))
        return 0.0 if abs(value) < 1e-6 else value


def fit(track: Track, rule: Rule, rates: Array | None = None, decays: Array | None = None, state: Moments | None = None) -> Fit:
    """Fit the rates and decays of each step to ``change = -rate direction - decay before``; each may be given."""
    found, taken, error, doubts = _fitted(track, directions(rule, track, state), rates, decays)
    here = Fit(found, taken, float(error), doubts)
    if track.small and rule.coupled:
        bare = fit(track, replace(rule, coupled=0.0), rates, decays)
        return min(here, bare, key=lambda one: one.error)
    return here


def errors_of(track: Track, rule: Rule, constants: Constants) -> Array:
    """Return the errors (R,) of a rule with R values of its constants, as for :func:`directions`."""
    errors = _fitted(track, directions(rule, track, constants=constants))[2]
    if track.small and rule.coupled:
        errors = np.minimum(errors, errors_of(track, replace(rule, coupled=0.0), constants))
    return errors


def _fitted(
    track: Track, direction: Array, rates: Array | None = None, decays: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    change, before = track.change, track.before
    if track.noise is not None:
        direction, change, before = direction / track.noise, change / track.noise, before / track.noise
    uu, up, pp = (direction * direction).sum(-1), (direction * before).sum(-1), (before * before).sum(-1)
    ud, pd = -(direction * change).sum(-1), -(before * change).sum(-1)
    if rates is None:
        determinant = uu * pp - up * up
        both = determinant > 1e-9 * uu * pp
        safe = np.where(both, determinant, 1.0)
        alone = ud / np.where(uu > 0, uu, np.inf)
        found = np.where(both, (pp * ud - up * pd) / safe, alone)
        taken = np.where(both, (uu * pd - up * ud) / safe, np.nan)
    else:
        found = rates
        taken = np.where(pp > 1e-30, (pd - rates * up) / np.where(pp > 1e-30, pp, 1.0), np.nan) if decays is None else decays
    residual = change + found[..., None] * direction + np.where(np.isnan(taken), 0.0, taken)[..., None] * before
    doubts = ROUNDING * np.sqrt(pp / np.where(uu > 0, uu, np.inf))
    if track.noise is not None:
        error = np.sqrt((np.minimum(np.abs(residual), MAX_SIGMA) ** 2).mean((-2, -1)))
        return found, taken, error, np.zeros_like(doubts)
    size = math.sqrt(float((change * change).sum()))
    rounding = ROUNDING * math.sqrt(float(pp.sum()))
    left = np.maximum(0.0, np.sqrt((residual * residual).sum((-2, -1))) - rounding)
    return found, taken, left / size if size > 0 else 0.0 * left, doubts
