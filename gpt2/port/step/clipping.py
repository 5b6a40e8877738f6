"""The clipping of a gradient: its kinds, how it is read from gradients before and after it, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median

import numpy as np
from torch import Tensor

from gpt2.port.step.causes import Stage, cause
from gpt2.port.step.records import Gradient, Sizes, Update
from gpt2.port.step.rules import Array, Track

BITES = 1.01  # a gradient this many times longer than a norm to clip to is clipped
SAME = 1e-6  # relative difference of numbers that are meant to be equal; torch adds 1e-6 to the norm before it divides
LIMITS = (1.0, 0.5, 0.25, 2.0, 5.0, 0.1, 10.0)  # norms that people clip to


class ClipKind(Enum):
    """What must not exceed the limit: a measure of the whole gradient, of each parameter or array, or each entry."""

    NORM = "norm"
    LARGEST = "largest absolute value"
    SUM = "sum of absolute values"
    SQUARES = "sum of squares, without the root,"
    MATRICES = "norm without biases and norms"
    PARAMETER = "norm of each parameter"
    STACK = "norm of each stack of parameters"
    ENTRY = "each entry"


WORDS = {kind: ("clip-norm", f"its {kind.value} is clipped to {{:.6g}}") for kind in ClipKind if kind is not ClipKind.NORM} | {
    ClipKind.ENTRY: ("clip-by-value", "entries beyond {:.6g} are cut"),
    ClipKind.PARAMETER: ("clip-per-tensor", "that of each parameter is clipped to {:.6g}"),
    ClipKind.STACK: ("clip-per-tensor", "that of each stack of parameters is clipped to {:.6g}"),
}


@dataclass(frozen=True)
class Clip:
    """One way of clipping: all that is beyond ``limit`` is scaled down to it, or, of ``ENTRY``, cut off."""

    kind: ClipKind
    limit: float

    @property
    def usual(self) -> bool:
        return any(abs(self.limit / limit - 1) < 1e-3 for limit in LIMITS)


@dataclass(eq=False)
class Norms:
    """What clipping compares with its limit, of K gradients.

    ``large``: matrices and embeddings. ``stacks``: the parameters that are one array of a dump.
    """

    gradients: Sequence[Gradient]
    large: Collection[str] = ()
    stacks: Collection[Sequence[str]] = ()
    known: dict[tuple[ClipKind, tuple[str, ...]], Array] = field(default_factory=dict)

    def of_kind(self, kind: ClipKind, name: str = "") -> Array:
        """Return the measure of all parameters together, or, of some kinds, of one parameter or its stack, (K,)."""
        names: tuple[str, ...] = ()
        if kind in (ClipKind.PARAMETER, ClipKind.STACK):
            stack = next((one for one in self.stacks if name in one), [name])
            names = tuple(stack) if kind is ClipKind.STACK else (name,)
        if (kind, names) not in self.known:
            some = self.large if kind is ClipKind.MATRICES else names
            found = []
            for each in self.gradients:
                own = [size for one, size in each.sizes.items() if one in some or not (names or some)] or [Sizes(0.0, 0.0, 0.0)]
                two, one, largest = zip(*own, strict=True)
                norm = math.hypot(*two)
                found.append({ClipKind.LARGEST: max(largest), ClipKind.SUM: sum(one), ClipKind.SQUARES: norm**2}.get(kind, norm))
            self.known[kind, names] = np.array(found)
        return self.known[kind, names]


def clipped(track: Track, clip: Clip | None, norms: Norms) -> Track:
    """Return a parameter's track with gradients as clipping makes them."""
    if clip is None:
        return track
    if clip.kind is ClipKind.ENTRY:
        return replace(track, gradient=np.clip(track.gradient, -clip.limit, clip.limit))
    factors = np.minimum(1.0, clip.limit / (norms.of_kind(clip.kind, track.name) + 1e-6))
    return replace(track, gradient=track.gradient * factors[:, None])


@dataclass(frozen=True)
class Passage:
    """A gradient after the last backward pass (``held``), and at the update.

    ``ratios`` by parameter, where one is a multiple of the other; ``clamped``: the others, if their entries are cut at one value.
    """

    held: Gradient
    ratios: dict[str, float]
    clamped: dict[str, float]
    odd: tuple[str, ...]  # parameters that are explained by neither


def passage(held: Gradient, used: Gradient, same: float = SAME) -> Passage:
    """Compare two gradients, parameter by parameter, up to a relative difference of ``same``."""

    def near(one: Tensor, other: Tensor) -> bool:
        return float((one - other).norm()) <= same * float(one.norm())

    ratios, clamped, odd = {}, {}, []
    for name, before in held.samples.items():
        after = used.samples.get(name)
        if after is None or held.sizes[name].two == 0:
            continue
        ratio = float(before @ after / (before @ before)) if bool((before != 0).any()) else 1.0
        if near(after, ratio * before):
            ratios[name] = ratio
            continue
        limit = float(after.abs().max())
        inside = (after.abs() < limit * (1 - same)) & (before != 0)
        slope = float((after[inside] / before[inside]).median()) if bool(inside.any()) else 1.0
        if near(after, (slope * before).clamp(-limit, limit)):
            clamped[name] = limit
        else:
            odd.append(name)
    return Passage(held, ratios, clamped, tuple(odd))


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


def read_clipping(sessions: Sequence[Sequence[Update]], factor: float | None = None, same: float = SAME) -> ClipReading:
    """Return what happens to the gradients of several sessions.

    ``factor``: what they are always multiplied by; None: to be read from the last session, whose gradients are so small that no
    clipping bites. ``same``: the relative rounding of the gradients.
    """
    groups = [[passage(one.held, one.gradient, same) for one in session if one.held.samples] for session in sessions]
    passages = [one for group in groups for one in group if one.ratios or one.clamped]
    reading = ClipReading(odd=tuple(dict.fromkeys(name for group in groups for one in group for name in one.odd)))
    if not passages:
        return reading
    outliers = reading.outliers = _outliers(passages)
    norms: dict[int, Norms] = {}  # over all parameters that a ratio is known of, with the outliers' own factors
    shares: dict[int, dict[str, float]] = {}
    for one in passages:
        sizes = {name: one.held.sizes[name].times(abs(outliers.get(name, 1.0))) for name in one.ratios}
        norms[id(one)] = Norms([Gradient(one.held.samples, sizes)])
        shares[id(one)] = {name: ratio / outliers.get(name, 1.0) for name, ratio in one.ratios.items()}
    if factor is None:
        last: list[Passage] = next((group for group in reversed(groups) if group), [])
        small = [median(shares[id(one)].values()) for one in last if one.ratios]
        steady = bool(small) and max(small) - min(small) <= same * max(map(abs, small))
        factor = small[-1] if steady and abs(small[-1] - 1) > same else 1.0
    reading.factor = factor
    reading.largest = max(factor * float(one.of_kind(ClipKind.NORM)[0]) for one in norms.values())
    if limits := [limit for one in passages for limit in one.clamped.values()]:
        reading.clip = Clip(ClipKind.ENTRY, median(limits))
        if spread(limits) > max(1e-3, 2 * same):
            reading.odd += tuple(dict.fromkeys(name for one in passages for name in one.clamped))
        return reading
    grown = [name for share in shares.values() for name, ratio in share.items() if ratio > factor * (1 + same)]
    biting = {one: share for one, share in shares.items() if share and min(share.values()) < factor * (1 - same)}
    if grown or not biting:
        reading.odd += tuple(dict.fromkeys(grown))
        return reading
    uneven = any(spread(share.values()) > same for share in biting.values())
    found = []
    for kind in (ClipKind.PARAMETER,) if uneven else (ClipKind.NORM, ClipKind.LARGEST, ClipKind.SUM, ClipKind.SQUARES):
        bounds = {
            (number, name): ratio * float(norms[number].of_kind(kind, name)[0])
            for number, share in biting.items()
            for name, ratio in share.items()
            if ratio < factor * (1 - same)
        }
        found.append((spread(bounds.values()), Clip(kind, median(bounds.values())), [name for _, name in bounds]))
    least = min(apart for apart, *_ in found)
    steadiest = [(clip, names) for apart, clip, names in found if apart <= max(10 * least, same)]
    clip, names = next((one for one in steadiest if one[0].usual), steadiest[0])
    reading.clip = clip
    if least > max(1e-3, 2 * same):
        reading.odd = tuple(dict.fromkeys(names)) if uneven else ("the gradient",)
    if not uneven:
        free = [factor * float(one.of_kind(clip.kind)[0]) for number, one in norms.items() if number not in biting]
        reading.passed = tuple(norm for norm in free if norm > BITES * clip.limit)
    return reading


def spread(values: Iterable[float]) -> float:
    """Return the difference of the largest and the least value, over the largest."""
    some = list(values)
    return (max(some) - min(some)) / (max(some) or math.inf)


def _outliers(passages: Sequence[Passage]) -> dict[str, float]:
    """Return the few parameters whose factor is always the same multiple of the others'."""
    found: dict[str, float] = {}
    first = passages[0].ratios
    middles = [median(one.ratios.values()) if one.ratios else 0.0 for one in passages]
    for name in first:
        factors = [one.ratios[name] / mid for one, mid in zip(passages, middles, strict=True) if mid and name in one.ratios]
        if factors and abs(factors[0] - 1) > 1e-3 and max(factors) - min(factors) <= SAME * abs(factors[0]):
            found[name] = factors[0]
    return found if len(found) * 2 < len(first) and len(passages) > 1 else {}


def clip_stage(reading: ClipReading, wanted: float | None, odd: str) -> Stage:
    """Return the causes in a reading of the clipping.

    ``wanted``: the norm to clip to; 0 for no clipping, None where nothing is said. ``odd``: words for the parameters whose
    gradients change in an unknown way.
    """
    stage = Stage()
    if reading.odd:
        stage.leave_open(f"the gradient of {odd} is changed before the update in a way that is not known")
        return stage
    clip, factor, largest = reading.clip, reading.factor, max(reading.passed, default=0.0)
    before = Clip(ClipKind.NORM, clip.limit / factor if clip and factor else 0.0)  # of the gradient that a GradScaler has scaled
    apart = abs(clip.limit / wanted - 1) if clip and wanted else math.inf
    left = f"in {len(reading.passed)} of the updates norms up to {largest:.4g} are left as they are"
    found = [("clip-missing", left)] if reading.passed and wanted else []
    if clip is None:
        if wanted and reading.largest > wanted * BITES:
            found.append(("clip-missing", f"norms up to {reading.largest:.4g} are left as they are"))
        elif wanted is None:
            stage.notes.append(f"read off: no clipping (norms up to {reading.largest:.3g})")
    elif wanted == 0:
        found.append(("clip-unwanted", f"it is clipped to {clip.limit:.6g}"))
    elif clip.kind in WORDS:
        id, words = WORDS[clip.kind]
        found.append((id, words.format(clip.limit)))
    elif factor < 0.02 and apart > 1e-3 and (abs(before.limit / wanted - 1) < 1e-3 if wanted else before.usual):
        detail = f"the gradient, still multiplied by {1 / factor:g}, is clipped to {clip.limit / factor:.6g}"
        found.append(("clip-before-unscaling", detail))
    elif wanted is None:
        some = f", but norms up to {largest:.4g} are left as they are" if reading.passed else ""
        stage.notes.append(f"read off: gradients are clipped to a norm of {clip.limit:.4g}{some}")
    elif apart > 1e-3:
        found.append(("clip-threshold", f"the norm is clipped to {clip.limit:.6g}, not {wanted:g}"))
    evidence = f"gradients of norms up to {reading.largest:.3g}, before and after"
    stage.causes = [cause(id, "gradient", detail, evidence) for id, detail in found]
    stage.error = float(bool(found))
    return stage
