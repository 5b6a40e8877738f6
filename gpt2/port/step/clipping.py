"""Read how a step changes the gradient between its last backward pass and the update: clipping, unscaling, other factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median

import numpy as np
from torch import Tensor

from gpt2.port.step.records import Gradient, Watched
from gpt2.port.step.rules import Array, Track

BITES = 1.01  # a gradient this many times longer than a norm to clip to is clipped
SAME = 1e-6  # relative difference of numbers that are meant to be equal; torch adds 1e-6 to the norm before it divides
LIMITS = (1.0, 0.5, 0.25, 2.0, 5.0, 0.1, 10.0)  # norms that people clip to


class ClipKind(Enum):
    """What must not exceed the limit: a measure of the whole gradient, of each parameter or array, or each entry."""

    NORM = "norm"
    SUM = "sum of absolute values"
    LARGEST = "largest absolute value"
    SQUARES = "sum of squares, without the root,"
    MATRICES = "norm without biases and norms"
    PARAMETER = "norm of each parameter"
    STACK = "norm of each stack of parameters"
    ENTRY = "each entry"


@dataclass(frozen=True)
class Clip:
    """One way of clipping: all that is beyond ``limit`` is scaled down to it, or, of ``ENTRY``, cut off."""

    kind: ClipKind
    limit: float


NORMS = (ClipKind.NORM, ClipKind.LARGEST, ClipKind.SUM)


@dataclass(frozen=True)
class Passage:
    """A gradient after the last backward pass (``held``), and at the update (``used``).

    ``ratios`` by parameter, where one is a multiple of the other; ``clamped``: the others, if their entries are cut at one value.
    """

    held: Gradient
    used: Gradient
    ratios: dict[str, float]
    clamped: dict[str, float]
    odd: tuple[str, ...]  # parameters that are explained by neither


def passage(held: Gradient, used: Gradient) -> Passage:
    """Compare two gradients, parameter by parameter."""
    ratios, clamped, odd = {}, {}, []
    for name, before in held.samples.items():
        after = used.samples.get(name)
        if after is None or held.two[name] == 0:
            continue
        ratio = float(before @ after / (before @ before)) if bool((before != 0).any()) else 1.0
        if _near(after, ratio * before):
            ratios[name] = ratio
            continue
        limit = float(after.abs().max())
        inside = (after.abs() < limit * (1 - SAME)) & (before != 0)
        slope = float((after[inside] / before[inside]).median()) if bool(inside.any()) else 1.0
        if _near(after, (slope * before).clamp(-limit, limit)):
            clamped[name] = limit
        else:
            odd.append(name)
    return Passage(held, used, ratios, clamped, tuple(odd))


def passages(calls: Sequence[Watched]) -> list[Passage]:
    """Compare the gradient after the last backward pass before each update with the gradient at the update."""
    found = []
    for call in calls:
        for update in call.updates:
            if update.gradient.samples and 0 < update.backwards <= len(call.backwards):
                held = call.backwards[update.backwards - 1].held
                if held.samples:
                    found.append(passage(held, update.gradient))
    return found


def _near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= SAME * float(one.norm())


@dataclass
class ClipReading:
    """What happens to the gradient before the update.

    ``factor``: what it is always multiplied by (1/scale of a GradScaler, 1/parts). ``clip``: how it is clipped, in units of the
    gradient after ``factor``; None where nothing is. ``largest``: the largest norm that went through. ``outliers``: parameters
    with another factor than the rest. ``odd``: what this does not explain. ``passed``: longer norms than the limit that went
    through as they were.
    """

    factor: float = 1.0
    clip: Clip | None = None
    largest: float = 0.0
    outliers: dict[str, float] = field(default_factory=dict)
    odd: tuple[str, ...] = ()
    passed: tuple[float, ...] = ()


def read_clipping(groups: Sequence[Sequence[Passage]], unscaled: float) -> ClipReading:
    """Return what happens to the gradients of several sessions; in the last, gradients are so small that no clipping bites.

    ``unscaled`` is what a GradScaler multiplied them by, if one was seen.
    """
    reading = ClipReading(odd=tuple(dict.fromkeys(name for group in groups for one in group for name in one.odd)))
    passages = [one for group in groups for one in group if one.ratios or one.clamped]
    if not passages:
        return reading
    reading.outliers = _outliers(passages)
    reading.factor = unscaled if unscaled != 1 else _factor(groups, reading.outliers)
    u = reading.factor
    reading.largest = max(u * _norm(one, ClipKind.NORM, reading.outliers) for one in passages)
    limits = [limit for one in passages for limit in one.clamped.values()]
    if limits:
        reading.clip = Clip(ClipKind.ENTRY, median(limits))
        return reading
    shares = [_shares(one, reading.outliers) for one in passages]
    biting = [(one, share) for one, share in zip(passages, shares, strict=True) if share and min(share.values()) < u * (1 - SAME)]
    if not biting:
        return reading
    scalar = all(max(share.values()) - min(share.values()) <= SAME * max(share.values()) for _, share in biting)
    if not scalar:
        bounds = [r * one.held.two[n] for one, share in biting for n, r in share.items() if r < u * (1 - SAME)]
        reading.clip = Clip(ClipKind.PARAMETER, median(bounds))
        if max(bounds) - min(bounds) > 1e-3 * max(bounds):
            reading.odd = tuple(dict.fromkeys(n for _, share in biting for n, r in share.items() if r < u * (1 - SAME)))
        return reading
    best = (math.inf, ClipKind.NORM, math.inf)
    for kind in NORMS:
        limits = [median(share.values()) * _norm(one, kind, reading.outliers) for one, share in biting]
        spread = (max(limits) - min(limits)) / max(limits)
        if spread < best[0] / 10:
            best = (spread, kind, max(limits))
    spread, kind, limit = best
    reading.clip = Clip(kind, limit)
    norms = [_norm(one, kind, reading.outliers) * u for one, share in zip(passages, shares, strict=True)]
    bitten = [any(one is other for other, _ in biting) for one in passages]
    reading.passed = tuple(norm for norm, bit in zip(norms, bitten, strict=True) if not bit and norm > BITES * limit)
    if spread > 1e-3:
        reading.odd = ("the gradient",)
    return reading


def _outliers(passages: Sequence[Passage]) -> dict[str, float]:
    """Return the few parameters whose factor is always the same multiple of the others'."""
    found: dict[str, float] = {}
    first = passages[0].ratios
    for name in first:
        factors = [one.ratios[name] / median(one.ratios.values()) for one in passages if name in one.ratios and _middle(one)]
        if factors and abs(factors[0] - 1) > 1e-3 and max(factors) - min(factors) <= SAME * abs(factors[0]):
            found[name] = factors[0]
    return found if len(found) * 2 < len(first) and len(passages) > 1 else {}


def _middle(one: Passage) -> bool:
    return bool(one.ratios) and median(one.ratios.values()) != 0


def _shares(one: Passage, outliers: dict[str, float]) -> dict[str, float]:
    return {name: ratio / outliers.get(name, 1.0) for name, ratio in one.ratios.items()}


def _norm(one: Passage, kind: ClipKind, outliers: dict[str, float]) -> float:
    """Return a norm of the gradient over all parameters that a ratio is known of, with the outliers' own factors."""
    held = {ClipKind.NORM: one.held.two, ClipKind.LARGEST: one.held.largest, ClipKind.SUM: one.held.one}[kind]
    values = [held[name] * outliers.get(name, 1.0) for name in one.ratios]
    return math.hypot(*values) if kind is ClipKind.NORM else max(values) if kind is ClipKind.LARGEST else sum(values)


def _factor(groups: Sequence[Sequence[Passage]], outliers: dict[str, float]) -> float:
    """Return the factor that is no clipping: that of the smallest gradients, unless these are clipped too."""
    last = [one for one in groups[-1] if one.ratios]
    if not last:
        return 1.0
    ratios = [median(_shares(one, outliers).values()) for one in last]
    if max(ratios) - min(ratios) <= SAME * max(map(abs, ratios)):
        return ratios[-1] if abs(ratios[-1] - 1) > SAME else 1.0
    return 1.0


@dataclass(frozen=True)
class Norms:
    """The norms of K gradients, (K,) each: of all parameters together by kind, of each parameter's own, and of its stack."""

    whole: dict[ClipKind, Array]
    own: dict[str, Array]
    stack: dict[str, Array] = field(default_factory=dict)  # where several parameters are one array

    @classmethod
    def of(cls, gradients: Sequence[Gradient]) -> Norms:
        two, one, largest = (np.zeros(len(gradients)) for _ in range(3))
        for k, each in enumerate(gradients):
            two[k], one[k], largest[k] = each.total, sum(each.one.values()), max(each.largest.values(), default=0.0)
        names = {name for each in gradients for name in each.two}
        own = {name: np.array([each.two.get(name, 0.0) for each in gradients]) for name in names}
        return cls({ClipKind.NORM: two, ClipKind.SUM: one, ClipKind.LARGEST: largest}, own)


def clipped(track: Track, clip: Clip | None, norms: Norms) -> Track:
    """Return a parameter's track with gradients as clipping makes them."""
    if clip is None:
        return track
    if clip.kind is ClipKind.ENTRY:
        return replace(track, gradient=np.clip(track.gradient, -clip.limit, clip.limit))
    apart = {ClipKind.PARAMETER: norms.own, ClipKind.STACK: norms.stack}
    size = apart[clip.kind][track.name] if clip.kind in apart else norms.whole[clip.kind]
    return track.times(np.minimum(1.0, clip.limit / (size + 1e-6)))
