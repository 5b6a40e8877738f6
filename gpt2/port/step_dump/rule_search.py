"""Find the rule that gives a dump's parameters from its gradients, up to the rounding of the dump.

The engine of :mod:`gpt2.port.training` fits rules to numbers that are exact. Here each entry of a change has an error that is
known from the dump's dtype, so rules are tried one after another, and the plainest that explains all entries counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gpt2.port.step_dump.recognition import Weights
from gpt2.port.training.clipping import LIMITS
from gpt2.port.training.rules import Array, Correction, Eps, Fit, Kind, Rule, Track, directions, fit
from gpt2.port.training.settings import Settings

ENTRIES = 256  # of each parameter that are compared
TENSORS = 4  # that the search uses
EXPLAINED = 1.0  # root mean square of errors in units of the rounding
MAX_SIGMA = 4.0  # an entry's error counts as so much at most, so that a few odd ones do not decide
BETAS = (
    (0.9, 0.999),
    (0.9, 0.95),
    (0.9, 0.99),
    (0.95, 0.9),
    (0.999, 0.9),
    (0.99, 0.9),
    (0.95, 0.99),
    (0.8, 0.999),
    (0.9, 0.9),
    (0.0, 0.999),
)
EPSILONS = (1e-6, 1e-5, 1e-10, 1e-12, 1e-7, 1e-4, 1e-3)
Clip = tuple[str, float]  # "", "two", "value", "tensor", "largest", "one", and the limit


@dataclass(frozen=True)
class Gauged:
    """A parameter's track over K steps, with the error (K, n) that rounding may make in its changes."""

    track: Track
    error: Array
    role: str

    def fitted(self, rule: Rule, rates: Array | None = None) -> Fit:
        """Fit rates and decays with entries weighed by their errors; ``error`` of the result is in units of the rounding.

        A coupled decay may leave out norms and biases.
        """
        if rule.coupled and self.role in ("norm", "bias"):
            ways = [replace(self, role="").fitted(one, rates) for one in (replace(rule, coupled=0.0), rule)]
            return min(ways, key=lambda one: one.error)
        direction = directions(rule, self.track) / self.error
        track = replace(self.track, before=self.track.before / self.error, change=self.track.change / self.error)
        found = fit(track, direction, rates)
        decays = np.nan_to_num(found.decays)
        error = _rms(track.change + found.rates[:, None] * direction + decays[:, None] * track.before)
        return Fit(found.rates, found.decays, error, np.zeros_like(found.rates))

    def error_of(self, rule: Rule, rates: Array, decays: Array) -> float:
        """Return the error of a rule with given rates and decays."""
        change = self.track.change + rates[:, None] * directions(rule, self.track) + decays[:, None] * self.track.before
        return _rms(change / self.error)


def _rms(errors: Array) -> float:
    return float(np.sqrt(np.mean(np.minimum(np.abs(errors), MAX_SIGMA) ** 2))) if errors.size else 0.0


@dataclass(frozen=True)
class Answer:
    """A rule and clipping; ``as_set``: with the rates that the settings say. ``penalty``: how unusual all this is."""

    rule: Rule
    clip: Clip
    error: float
    as_set: bool
    penalty: float
    cumulated: bool = False


def gauged(
    name: str,
    role: str,
    parameters: Sequence[Weights],
    gradients: Sequence[Tensor],
    storage: float,
    noise: float,
    relative: float,
) -> Gauged | None:
    """Return a parameter's track at entries whose gradient is known well enough; None if there are none.

    ``storage``: the relative rounding of parameters; ``noise`` and ``relative``: the absolute and relative error of gradients.
    """
    before = torch.stack([parameters[step][name].reshape(-1) for step in range(len(gradients))])
    after = torch.stack([parameters[step + 1][name].reshape(-1) for step in range(len(gradients))])
    gradient = torch.stack([g.reshape(-1) for g in gradients])
    doubt = (noise / gradient.abs().clamp(min=1e-300) + relative).amax(0)
    keep = torch.nonzero(doubt < 0.05)[:, 0]
    if not len(keep):
        return None
    if len(keep) > ENTRIES:
        order = keep[gradient[0, keep].abs().argsort()]
        keep = order[torch.linspace(0, len(order) - 1, ENTRIES).round().long()]
    before, after, gradient, doubt = before[:, keep], after[:, keep], gradient[:, keep], doubt[keep]
    change = after - before
    size = change.abs().median(1, keepdim=True).values
    error = storage * (before.abs() + after.abs()) + (doubt + 1e-9) * torch.maximum(size, change.abs()) + 1e-30
    track = Track(name, before.numpy(), gradient.numpy(), change.numpy(), np.ones(len(gradients), dtype=np.bool_))
    return Gauged(track, error.numpy(), role)


class RuleSearch:
    """The search for one rule on a few parameters; ``norms`` are those of the whole gradients, by step."""

    def __init__(
        self,
        tracks: Sequence[Gauged],
        settings: Settings,
        norms: Mapping[str, Array],
        own_norms: Mapping[str, Array],
        *,
        clips: bool = True,
        cumulated: Sequence[Gauged] = (),
        cumulated_norms: Mapping[str, Array] | None = None,
    ) -> None:
        self.settings, self.norms, self.own_norms, self.clips = settings, norms, own_norms, clips
        self.tracks, self.cumulated, self.cumulated_norms = list(tracks), list(cumulated), cumulated_norms or {}
        steps = len(tracks[0].track.before)
        given = settings.lr is not None
        self.rates = np.array([settings.rate(step) for step in range(steps)]) if given else None

    def best(self) -> Answer:
        """Return the plainest answer that explains all changes; else the one with the least error."""
        best: Answer | None = None
        for rules, every in ((self._single(), True), (self._pairs(), False)):
            clips = list(self._clips()) if every else [best.clip] if best else []
            gradients = (False, True) if self.cumulated and every else (best.cumulated if best else False,)
            for cumulated, clip in itertools.product(gradients, clips):
                tracks = self.clipped(clip, cumulated)
                extra = cumulated + (clip != self._expected_clip())
                for penalty, rule in rules:
                    if best is not None and best.error <= EXPLAINED and penalty + extra >= best.penalty:
                        continue
                    found = self._answer(rule, clip, tracks, penalty + extra, cumulated)
                    if best is None or _before(found, best):
                        best = found
            if best is not None and best.error <= EXPLAINED:
                break
        assert best is not None
        return best

    def clipped(self, clip: Clip, cumulated: bool = False) -> list[Gauged]:
        """Return the tracks with gradients as this clipping makes them."""
        tracks, norms = (self.cumulated, self.cumulated_norms) if cumulated else (self.tracks, self.norms)
        return [clipped_track(one, clip, norms, self.own_norms) for one in tracks]

    def _answer(self, rule: Rule, clip: Clip, tracks: list[Gauged], penalty: float, cumulated: bool) -> Answer:
        if self.rates is not None:
            error = _joint([one.fitted(rule, self.rates).error for one in tracks])
            if error <= EXPLAINED:
                return Answer(rule, clip, error, True, penalty, cumulated)
        fits = [one.fitted(rule) for one in tracks]
        error = _joint([one.error for one in fits])
        rates = np.median(np.stack([one.rates for one in fits]), axis=0)
        steady = bool(np.ptp(rates) <= 0.01 * np.abs(rates).max())
        more = 1.5 if not steady else 0.0 if self.rates is None else 0.9
        return Answer(rule, clip, error, False, penalty + more, cumulated)

    def _expected_clip(self) -> Clip:
        return ("two", self.settings.clip) if self.settings.clip and self.clips else ("", math.inf)

    def _clips(self) -> Iterator[Clip]:
        yield self._expected_clip()
        if not self.clips:
            return
        if self.settings.clip:
            yield "", math.inf
        limits = list(dict.fromkeys(limit for limit in (self.settings.clip, *LIMITS) if limit))
        for kind, limit in itertools.product(("two", "value", "tensor", "largest", "one"), limits):
            if (kind, limit) != self._expected_clip():
                yield kind, limit

    def _betas(self) -> list[tuple[float, float]]:
        given = (self.settings.beta1, self.settings.beta2)
        usual = (
            [(given[0] or 0.9, given[1] or b2) for b2 in (0.999, 0.95)] if None in given else [(given[0] or 0.0, given[1] or 0.0)]
        )
        swapped = [(b, a) for a, b in usual]
        return list(dict.fromkeys([*usual, *swapped, *BETAS]))

    def _variants(self) -> list[tuple[float, Rule]]:
        """Return the departures from AdamW with their penalties."""
        decay = self.settings.weight_decay
        decays = [d for d in dict.fromkeys((decay, 0.1, 0.01, 0.001)) if d]
        forms = [(c, e) for c, e in itertools.product(Correction, Eps) if (c, e) != (Correction.FULL, Eps.OUTSIDE)]
        base = Rule()
        return [
            (1.0, replace(base, coupled=decays[0])),
            *(
                (
                    1.0 + 0.1 * (c is not Correction.NONE) + 1.0 * (e is not Eps.OUTSIDE and c is not Correction.FULL),
                    replace(base, correction=c, place=e),
                )
                for c, e in forms
            ),
            *((1.1, replace(base, eps=eps)) for eps in EPSILONS),
            (1.2, replace(base, amsgrad=True)),
            (1.2, replace(base, lost=True)),
            (1.0, Rule(kind=Kind.SGD, beta1=0.0)),
            (1.1, Rule(kind=Kind.SGD, beta1=0.9)),
            (1.3, Rule(kind=Kind.SGD, beta1=0.9, nesterov=True)),
            (1.3, Rule(kind=Kind.SIGN)),
            *((1.3, replace(base, coupled=d)) for d in decays[1:]),
        ]

    def _single(self) -> list[tuple[float, Rule]]:
        betas = self._betas()
        known = len(betas) - len(BETAS) if None in (self.settings.beta1, self.settings.beta2) else 1
        right = [(0.0 if n < max(1, min(known, 2)) else 1.0, Rule(beta1=a, beta2=b)) for n, (a, b) in enumerate(betas)]
        others = []
        for penalty, rule in self._variants():
            for a, b in betas[:1] if self.settings.beta1 is not None else betas[:2]:
                changed = rule if rule.kind is Kind.SGD else replace(rule, beta1=a, beta2=b)
                others.append((penalty, changed))
        return sorted([*right, *dict.fromkeys(others)], key=lambda one: one[0])

    def _pairs(self) -> list[tuple[float, Rule]]:
        found = []
        base = Rule()
        variants = [(p, r) for p, r in self._variants() if r.kind is Kind.ADAM]
        for (p, one), (q, two) in itertools.combinations([(0.0, base), *variants], 2):
            merged = replace(
                one,
                eps=two.eps if two.eps != base.eps else one.eps,
                correction=two.correction if two.correction is not base.correction else one.correction,
                place=two.place if two.place is not base.place else one.place,
                amsgrad=one.amsgrad or two.amsgrad,
                coupled=two.coupled or one.coupled,
                lost=one.lost or two.lost,
            )
            for n, (a, b) in enumerate(self._betas()):
                found.append((p + q + (n > 0), replace(merged, beta1=a, beta2=b)))
        found += [(2.0, replace(r, beta1=b, coupled=d)) for r in (Rule(kind=Kind.SGD),) for b in (0.0, 0.9) for d in (0.1, 0.01)]
        return sorted(dict.fromkeys(found), key=lambda one: one[0])


def _before(found: Answer, best: Answer) -> bool:
    if found.error <= EXPLAINED:
        return best.error > EXPLAINED or (found.penalty, found.error) < (best.penalty, best.error)
    return best.error > EXPLAINED and found.error < best.error


def _joint(errors: Sequence[float]) -> float:
    return max(errors)


def clipped_track(one: Gauged, clip: Clip, norms: Mapping[str, Array], own_norms: Mapping[str, Array]) -> Gauged:
    """Return a track with gradients clipped in one way; ``norms`` by kind, ``own_norms`` by parameter, (K,) each."""
    kind, limit = clip
    if not kind:
        return one
    track = one.track
    if kind == "value":
        changed = replace(track, gradient=np.clip(track.gradient, -limit, limit))
    else:
        size = own_norms[track.name] if kind == "tensor" else norms[kind]
        changed = track.times(np.minimum(1.0, limit / (size + 1e-6)))
    return replace(one, track=changed)
