"""The clipping of a gradient: how it is read from gradients before and after it, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

from torch import Tensor

from gpt2.port.step.causes import StepFindings
from gpt2.port.step.records import Gradient, Update
from gpt2.port.step.rules import spread

BITES = 1.01  # a gradient this many times longer than a norm to clip to is clipped
SAME = 1e-6  # relative difference of numbers that are meant to be equal; torch adds 1e-6 to the norm before it divides
LIMITS = (1.0, 0.5, 0.25, 2.0, 5.0, 0.1, 10.0, 0.01, 0.05, 0.001, 0.005)  # that people clip to


class ClipKind(Enum):
    """What must not exceed the limit: a measure of the whole gradient, of each parameter, or each entry."""

    NORM = "norm"
    LARGEST = "largest absolute value"
    SUM = "sum of absolute values"
    PARAMETER = "norm of each parameter"
    ENTRY = "each entry"


WORDS = {kind: ("clip-norm", f"its {kind.value} is clipped to {{:.6g}}") for kind in ClipKind if kind is not ClipKind.NORM} | {
    ClipKind.ENTRY: ("clip-by-value", "entries beyond {:.6g} are cut"),
    ClipKind.PARAMETER: ("clip-per-tensor", "that of each parameter is clipped to {:.6g}"),
}


@dataclass(frozen=True)
class Clip:
    """One way of clipping: all that is beyond ``limit`` is scaled down to it, or, of ``ENTRY``, cut off."""

    kind: ClipKind
    limit: float

    @property
    def usual(self) -> bool:
        return any(abs(self.limit / limit - 1) < 1e-3 for limit in LIMITS)


def measure(kind: ClipKind, gradient: Gradient, name: str) -> float:
    """Return what clipping compares with its limit: of all parameters together, or of one."""
    if kind is ClipKind.LARGEST:
        return max((one.largest for one in gradient.values()), default=0.0)
    if kind is ClipKind.SUM:
        return sum(one.one for one in gradient.values())
    return gradient[name].two if kind is ClipKind.PARAMETER else gradient.total


@dataclass
class GradientPassage:
    """A gradient after the last backward pass (``held``), and at the update.

    ``ratios`` by parameter, where one is a multiple of the other; ``clamped``: the others, if their entries are cut at one value;
    ``odd``: those that are explained by neither.
    """

    held: Gradient
    ratios: dict[str, float] = field(default_factory=dict)
    clamped: dict[str, float] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, held: Gradient, used: Gradient) -> GradientPassage:
        """Compare two gradients, parameter by parameter."""
        found = cls(held)
        for name in [name for name, one in held.items() if name in used and one.two != 0]:
            before, after = held[name].values, used[name].values
            limit = float(after.abs().max())
            inside = (after.abs() < limit * (1 - SAME)) & (before != 0)
            slope = float((after[inside] / before[inside]).median()) if bool(inside.any()) else 1.0
            ratio = float(before @ after / (before @ before)) if bool((before != 0).any()) else 1.0
            if _near(before, after, ratio * before):
                found.ratios[name] = ratio
            elif _near(before, after, (slope * before).clamp(-limit, limit)):
                found.clamped[name] = limit
            else:
                found.odd.append(name)
        return found


def _near(before: Tensor, after: Tensor, made: Tensor) -> bool:
    return float((after - made).norm()) <= SAME * float(after.norm())


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
    odd: list[str] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)


def read_clipping(sessions: Sequence[Sequence[Update]], factor: float | None = None) -> ClipReading:
    """Return what happens to the gradients of several sessions.

    ``factor``: what they are always multiplied by; None: to be read from the last session, whose gradients are so small that no
    clipping bites.
    """
    groups = [[GradientPassage.of(one.held, one.gradient) for one in session if one.held] for session in sessions]
    passages = [one for group in groups for one in group if one.ratios or one.clamped]
    reading = ClipReading(odd=list(dict.fromkeys(name for group in groups for one in group for name in one.odd)))
    if not passages:
        return reading
    reading.outliers = _outliers(passages)
    for one in passages:  # ``held`` is what the ratios are to, without the outliers' own factors
        own = {name: reading.outliers.get(name, 1.0) for name in one.ratios}
        one.held = Gradient({name: one.held[name].times(abs(times)) for name, times in own.items()})
        one.ratios = {name: ratio / own[name] for name, ratio in one.ratios.items()}
    if factor is None:
        last = next((group for group in reversed(groups) if group), [])
        small = [median(one.ratios.values()) for one in last if one.ratios]
        factor = small[-1] if small and spread(small) <= SAME < abs(small[-1] - 1) else 1.0
    reading.factor, reading.largest = factor, max(factor * one.held.total for one in passages)
    if limits := [limit for one in passages for limit in one.clamped.values()]:
        reading.clip = Clip(ClipKind.ENTRY, median(limits))
        reading.odd += [name for one in passages for name in one.clamped] if spread(limits) > 1e-3 else []
        return reading
    least = factor * (1 - SAME)
    cut = [(one, name, ratio) for one in passages for name, ratio in one.ratios.items() if ratio < least]
    grown = [name for one in passages for name, ratio in one.ratios.items() if ratio > factor * (1 + SAME)]
    if grown or not cut:
        reading.odd += dict.fromkeys(grown)
        return reading
    uneven = any(spread(list(one.ratios.values())) > SAME for one, _, _ in cut)
    whole = (ClipKind.NORM, ClipKind.LARGEST, ClipKind.SUM)
    found = []
    for kind in (ClipKind.PARAMETER,) if uneven else whole:  # what every gradient that is cut comes down to is the limit
        bounds = [ratio * measure(kind, one.held, name) for one, name, ratio in cut]
        found.append((spread(bounds), Clip(kind, median(bounds))))
    apart = min(apart for apart, _ in found)
    steadiest = [clip for own, clip in found if own <= max(10 * apart, SAME)]
    reading.clip = clip = next((one for one in steadiest if one.usual), steadiest[0])
    if apart > 1e-3:
        reading.odd = list(dict.fromkeys(name for _, name, _ in cut))
    if not uneven:
        free = [factor * measure(clip.kind, one.held, "") for one in passages if one.ratios and min(one.ratios.values()) >= least]
        reading.passed = [norm for norm in free if norm > BITES * clip.limit]
    return reading


def _outliers(passages: Sequence[GradientPassage]) -> dict[str, float]:
    """Return the few parameters whose factor is always the same multiple of the others'."""
    found: dict[str, float] = {}
    first = passages[0].ratios
    middles = [median(one.ratios.values()) if one.ratios else 0.0 for one in passages]
    for name in first:
        factors = [one.ratios[name] / mid for one, mid in zip(passages, middles, strict=True) if mid and name in one.ratios]
        if factors and abs(factors[0] - 1) > 1e-3 and max(factors) - min(factors) <= SAME * abs(factors[0]):
            found[name] = factors[0]
    return found if len(found) * 2 < len(first) and len(passages) > 1 else {}


def judge_clipping(findings: StepFindings, reading: ClipReading, wanted: float | None) -> None:
    """Add the causes in a reading of the clipping; ``wanted``: the norm to clip to, 0 for none, None where nothing is said."""
    if reading.odd:
        words = "is changed before the update in a way that is not known"
        findings.leave_open("clip", f"the gradient of {findings.places(reading.odd)} {words}")
        return

    def add(id: str, detail: str) -> None:
        findings.add(id, "gradient", detail, f"gradients of norms up to {reading.largest:.3g}, before and after")
        findings.differ("clip", 1.0)

    clip, factor, passed = reading.clip, reading.factor, reading.passed
    before = Clip(ClipKind.NORM, clip.limit / factor if clip and factor else 0.0)  # of the gradient that a GradScaler has scaled
    apart = abs(clip.limit / wanted - 1) if clip and wanted else math.inf
    left = f"norms up to {max(passed, default=reading.largest):.4g} are left as they are"
    if passed and wanted:
        add("clip-missing", f"in {len(passed)} of the updates {left}")
    if clip is None:
        if wanted and reading.largest > wanted * BITES:
            add("clip-missing", left)
        elif wanted is None:
            findings.notes.append(f"read off: no clipping (norms up to {reading.largest:.3g})")
    elif wanted == 0:
        add("clip-unwanted", f"it is clipped to {clip.limit:.6g}")
    elif clip.kind in WORDS:
        id, words = WORDS[clip.kind]
        add(id, words.format(clip.limit))
    elif factor < 0.02 and apart > 1e-3 and (abs(before.limit / wanted - 1) < 1e-3 if wanted else before.usual):
        add("clip-before-unscaling", f"the gradient, still multiplied by {1 / factor:g}, is clipped to {before.limit:.6g}")
    elif wanted is None:
        words = f"read off: gradients are clipped to a norm of {clip.limit:.4g}" + (f", but {left}" if passed else "")
        findings.notes.append(words)
    elif apart > 1e-3:
        add("clip-threshold", f"the norm is clipped to {clip.limit:.6g}, not {wanted:g}")
