"""The rules by which an optimizer moves a parameter, and the search for the one that gives its changes.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2; Kingma and Ba, "Adam" (2015); for Lion
Chen et al. (2023), algorithm 2. With gradients g of step t, m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g^2, the direction is
(m / c1) / (sqrt(v / c2) + eps), with c = 1 - b^t. A parameter p becomes p - rate direction - decay p; rate and decay of each step
are solved by least squares.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpt2.port.step.settings import StepSettings
from gpt2.port.step.watching import Update

Array = NDArray[np.float64]
ROUNDING = 2 * 2.0**-52  # of a parameter, when a change is added to it in float64
EXACT = 1e-8  # relative error of changes that a rule explains
FITS = 1e-6  # the same, of a rule that is known
ROUNDED = 1e-4  # the same, where the author keeps moments or constants in float32; also in later sessions
CLOSE = 1e-4  # relative difference of constants, or of rates, that are meant to be equal
BETTER = 30  # times smaller is the error of a rarer rule that is preferred
NOISE = 8  # standard errors of a decay, of which a smaller one is none
PART = 192  # entries of each parameter that the search uses
BETAS1 = (0.9, 0.95, 0.8, 0.99, 0.0, 0.999, 0.98, 0.5)
BETAS2 = (0.999, 0.95, 0.99, 0.9, 0.98, 0.995, 0.8)
EPSILON = 1e-8
EPSILONS = (EPSILON, 1e-6, 1e-5, 1e-7, 1e-10, 1e-12, 1e-4, 1e-3)
DECAYS = (0.1, 0.01, 0.001, 0.05, 1e-4, 0.5)


@dataclass(frozen=True)
class Rule:
    """An optimizer's formula, without its rate and its decoupled decay.

    ``correction``: the beta whose power corrects each moment, 0 for none; ``late``: the power of the step after. ``place``: eps
    is added to the corrected root, inside the root, or to the root before its correction. ``coupled``: a decay that is added to
    the gradient. ``lost``: the moments begin at zero in every step; ``counted``: but the number of the step, which corrects them,
    does not. Lion's direction is the sign of a first moment, whose average goes on with beta2. SGD that is late is Nesterov's.
    """

    kind: Literal["adam", "sgd", "lion"] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = EPSILON
    correction: tuple[int, int] = (1, 2)
    late: bool = False
    place: Literal["outside", "inside", "before"] = "outside"
    amsgrad: bool = False
    coupled: float = 0.0
    lost: bool = False
    counted: bool = False


# How a formula departs from AdamW's: a field of the rule and its value, the cause, and words.
DEPARTURES: tuple[tuple[str, Any, str, str], ...] = (
    ("lost", True, "momentum-lost", "the moments are zero at the beginning of each step"),
    ("correction", (0, 0), "bias-correction-missing", "neither moment is divided by 1 - beta**t"),
    ("correction", (1, 0), "bias-correction-missing", "the second moment is not divided by 1 - beta**t"),
    ("correction", (0, 2), "bias-correction-missing", "the first moment is not divided by 1 - beta**t"),
    ("late", True, "bias-correction-step", "the factors 1 - beta**t are those of step t + 1"),
    ("correction", (2, 1), "bias-correction-step", "the factor 1 - beta**t of each moment is the other's"),
    ("correction", (1, 1), "bias-correction-step", "the factor 1 - beta**t of the second moment is that of the first"),
    ("correction", (2, 2), "bias-correction-step", "the factor 1 - beta**t of the first moment is that of the second"),
    ("place", "inside", "eps-inside-root", "the divisor is sqrt(v + {eps:.4g})"),
    ("place", "before", "eps-before-correction", "{eps:.4g} is added to sqrt(v) before its correction"),
    ("amsgrad", True, "amsgrad", "the largest second moment so far is used"),
)
FACTORS = ((1, 0), (0, 2), (2, 1), (2, 2))  # corrections that differ from another one by a factor of each step alone


class Track(NamedTuple):
    """One parameter over K updates: values before, gradients, and changes, each (K, n); ``seen``: whether it had a gradient."""

    before: Array
    gradient: Array
    change: Array
    seen: NDArray[np.bool_]

    @classmethod
    def of(cls, updates: Sequence[Update], name: str) -> "Track":
        """Return the track of a parameter over a session."""
        before, after = (torch.stack([getattr(one, side)[name] for one in updates]).numpy() for side in ("before", "after"))
        gradients = [one.gradient[name].values if name in one.gradient else 0 * one.before[name] for one in updates]
        seen = np.array([name in one.gradient for one in updates])
        return cls(before, torch.stack(gradients).numpy(), after - before, seen)

    @property
    def sample(self) -> "Track":
        """Entries whose gradients differ in size, with small ones, where eps shows."""
        size = np.abs(self.gradient).sum(0)
        order = np.argsort(size)[(size == 0).sum() if size.any() else 0 :]
        index = order[np.unique(np.linspace(0, len(order) - 1, PART).astype(np.int64))]
        return Track(self.before[:, index], self.gradient[:, index], self.change[:, index], self.seen)


def directions(rule: Rule, track: Track) -> Array:
    """Return the directions (K, n) in which a rule moves a parameter, from its own values and gradients."""
    out, kept = np.zeros(track.before.shape), rule.counted or not rule.lost
    g = track.gradient[track.seen] + rule.coupled * track.before[track.seen]
    m = _averaged((1 - rule.beta1 * (rule.kind != "sgd")) * g, rule.beta1, rule.lost)
    m = g + rule.beta1 * m if rule.kind == "sgd" and rule.late else m
    if rule.kind == "adam":
        v = _averaged((1 - rule.beta2) * g * g, rule.beta2, rule.lost)
        most = np.maximum.accumulate(v) if rule.amsgrad and not rule.lost else v
        betas = [(0.0, rule.beta1, rule.beta2)[one] for one in rule.correction]
        c1, c2 = (np.array([1 - beta ** (1 + rule.late + n * kept) for n in range(len(g))])[:, None] for beta in betas)
        inside, before, outside = ((rule.place == place) * rule.eps for place in ("inside", "before", "outside"))
        root = np.sqrt(most / c2 + inside) + before / np.sqrt(c2) + outside
        m = m / (c1 * np.where(root == 0, 1.0, root))
    elif rule.kind == "lion":
        slow = _averaged((1 - rule.beta2) * g, rule.beta2, rule.lost)
        m = np.sign((1 - rule.beta1) * g + rule.beta1 * np.concatenate([0 * g[:1], slow[:-1]]))
    out[track.seen] = m
    return out


def _averaged(moments: Array, beta: float, lost: bool) -> Array:
    """Add to new moments (K, n), in place, those of the step before times beta, if they are not ``lost``."""
    for t in range(1, 1 if lost else len(moments)):
        moments[t] += beta * moments[t - 1]
    return moments


@dataclass(frozen=True)
class RuleFit:
    """A rule on one parameter: rates and decays (K,), NaN if unknown, relative error; ``doubts``: of each rate, by rounding."""

    rule: Rule
    rates: Array
    decays: Array
    error: float
    doubts: Array

    @property
    def decay(self) -> float | None:
        """The decay over the rate, or that of the gradient; None if it cannot be known."""
        known = ~np.isnan(self.decays) & (np.abs(self.rates) > 0)
        if self.rule.coupled or not known.any():
            return self.rule.coupled or None
        values = self.decays[known] / self.rates[known]
        value = float(np.median(np.where(self.rates[known] < 0, abs(values), values)))  # a step that climbs may decay or grow
        return 0.0 if abs(value) < 1e-6 else value


def fit(track: Track, rule: Rule) -> RuleFit:
    """Fit the rates and decays of each step to ``change = -rate direction - decay before``."""
    change, before, direction = track.change, track.before, directions(rule, track)
    uu, up, pp = (direction * direction).sum(-1), (direction * before).sum(-1), (before * before).sum(-1)
    ud, pd = -(direction * change).sum(-1), -(before * change).sum(-1)
    determinant = uu * pp - up * up
    both = determinant > 1e-9 * uu * pp
    safe = np.where(both, determinant, 1.0)
    rates = np.where(both, (pp * ud - up * pd) / safe, ud / np.where(uu > 0, uu, np.inf))
    decays = np.where(both, (uu * pd - up * ud) / safe, np.nan)
    residual = change + rates[:, None] * direction + np.nan_to_num(decays)[:, None] * before
    sigma = np.linalg.norm(residual, axis=1) / np.sqrt(len(before[0]) * np.where(pp > 0, pp, np.inf))
    decays = np.where(np.abs(decays) < NOISE * sigma, 0.0, decays)
    left = float(np.linalg.norm(residual)) - ROUNDING * float(pp.sum()) ** 0.5
    error = max(0.0, left) / (float(np.linalg.norm(change)) or np.inf)
    return RuleFit(rule, rates, decays, error, ROUNDING * np.sqrt(pp / np.where(uu > 0, uu, np.inf)))


def variants(settings: StepSettings) -> list[Rule]:
    """Return the table of rules that people write: AdamW first, and the usual mistakes before the rare."""
    adam, sgd = Rule(beta1=settings.beta1 or 0.9, beta2=settings.beta2 or 0.999), Rule("sgd", 0.0)
    momentum = replace(sgd, beta1=0.9)
    departures: list[dict[str, Any]] = [{field: value} for field, value, *_ in DEPARTURES if value not in FACTORS]
    lost, *others = (replace(adam, **one) for one in departures)
    rules = [adam, lost, sgd, replace(lost, counted=True), momentum, replace(momentum, late=True)]
    rules += [replace(adam, coupled=decay) for decay in (settings.weight_decay, *DECAYS) if decay]
    rules += [*others, replace(adam, beta1=0.0, correction=(0, 0))]
    rules += [replace(one, **two) for one in others for two in departures[1:]]
    rules += [*(replace(one, coupled=settings.weight_decay or 0.01) for one in (*others, momentum)), Rule("lion", beta2=0.99)]
    return list(dict.fromkeys(rules))


def constants(rule: Rule, settings: StepSettings) -> Iterator[Rule]:
    """Yield a rule with other usual betas, also swapped, and AdamW with another eps too; then with another eps alone."""
    adam, given = rule.kind == "adam", (settings.beta1, settings.beta2)
    firsts = [*filter(None, given), *BETAS1] if rule.beta1 else [0.0]
    seconds = [rule.beta2] if rule.kind == "sgd" else [*filter(None, given), *BETAS2]
    plain = rule == Rule(beta1=rule.beta1, beta2=rule.beta2)
    for a, b in itertools.product(firsts, seconds) if not rule.lost or rule.counted else ():
        yield from (replace(rule, beta1=a, beta2=b, eps=eps) for eps in (rule.eps, *(EPSILONS if plain else ())))
    yield from (replace(rule, eps=eps) for eps in (EPSILONS if adam else ()))


def find_rule(tracks: Sequence[Track], settings: StepSettings, expected: Array | None = None) -> tuple[Rule, float]:
    """Return the rule that moved some parameters, and its error: AdamW as the settings say, or the first of the table that does.

    ``expected``: the rates (K,) of the settings. A factor of a step cannot be told from its rate: moments without correction move
    a parameter as those do whose eps is added before the correction, at other rates. So rates that are steady beside the expected
    ones decide between rules that give the same changes; or beside the decays, where nothing is said.
    """
    tracks, table = [track.sample for track in tracks], variants(settings)
    best, error = table[0], np.inf
    for number, rule in enumerate(itertools.chain(table, *(constants(rule, settings) for rule in table))):
        if error <= (EXACT if number < len(table) else FITS):
            break
        errors = (fit(track, rule).error for track in tracks)
        if len(own := [*itertools.takewhile(lambda one: one < error / BETTER or one <= EXACT, errors)]) == len(tracks):  # noqa: B023
            best, error = rule, max(own)
    decays: Array = np.median([fit(track, best).decays for track in tracks], axis=0)
    expected = expected if expected is not None else decays if bool((decays > 0).all()) else np.ones_like(decays)
    if best.kind != "adam" or best.lost or not bool((expected > 0).all()):
        return best, error
    plain = replace(best, correction=(1, 2), late=False)
    rows: list[dict[str, Any]] = [{}, *({name: value} for name, value, *_ in DEPARTURES if name in ("correction", "late"))]
    alike = [replace(plain, place=place, **row) for place in ("outside", "inside", "before") for row in rows]
    for one in (one for one in alike if max(fit(track, one).error for track in tracks) <= max(EXACT, 2 * error)):
        if steady(np.median([fit(track, one).rates for track in tracks], axis=0) / expected):
            return one, error
    return best, error


def steady(values: Sequence[float] | Array, near: float = CLOSE) -> bool:
    """Return whether numbers are meant to be equal, such as rates: they differ by a small share of the largest one's size."""
    return float(max(values) - min(values)) <= near * float(max(map(abs, values)))
