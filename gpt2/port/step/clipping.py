"""The clipping of a gradient: a table of ways, each tried on the gradients before it, and what is wrong with it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import torch

from gpt2.port.step.causes import StepFindings
from gpt2.port.step.rules import steady
from gpt2.port.step.watching import Gradient, Update
from gpt2.port.terms.places import joined

BITES = 1.01  # a gradient this many times longer than a norm to clip to is clipped
SAME = 1e-6  # relative difference of numbers that are meant to be equal
SCALED = 0.02  # a smaller share is a GradScaler's; the parts of a batch are fewer
EXACT, FITS = 1e-5, 1e-3  # relative errors of a gradient: as it is; clipped (torch adds 1e-6 to the norm before it divides)


class ClipKind(NamedTuple):
    """A way to clip: what it measures of each gradient, which must not exceed the limit; the id of its cause, and its words."""

    id: str
    words: str
    sizes: Callable[[Gradient], dict[str, float]]


NORM = ClipKind("clip-threshold", "the norm is clipped to {:.6g}", lambda g: dict.fromkeys(g, g.total))
MAX = ClipKind("clip-norm", "its largest entry is cut to {:.6g}", lambda g: dict.fromkeys(g, max(x.largest for x in g.values())))
EACH = ClipKind("clip-per-tensor", "that of each parameter is clipped to {:.6g}", lambda g: {n: one.two for n, one in g.items()})
ENTRY = ClipKind("clip-by-value", "entries beyond {:.6g} are cut", lambda g: {n: one.largest for n, one in g.items()})
WAYS = (NORM, MAX, EACH, ENTRY)  # of two that explain the gradients as well, the first


@dataclass(frozen=True)
class Clip:
    """What an update uses of a gradient: ``share`` times it, and what is beyond ``limit`` scaled down or, of ENTRY, cut off.

    ``share`` is what the number of parts divides by; ``scale``: a GradScaler, at first. ``largest``: the largest norm that went
    through. ``outliers``: parameters with another factor than the rest. ``odd``: those that this does not explain. ``passed``:
    norms beyond the limit that went through as they were.
    """

    kind: ClipKind | None = None
    limit: float = math.inf
    share: float = 1.0
    scale: float = 1.0
    largest: float = 0.0
    outliers: dict[str, float] = field(default_factory=dict)
    odd: tuple[str, ...] = ()
    passed: tuple[float, ...] = ()

    def share_in(self, updates: Sequence[Update]) -> float:
        """Return by what a call multiplies its gradient, with the scale that a scaler has there."""
        return self.share / (updates[0].scale if updates else self.scale)

    def errors(self, held: Gradient, used: Gradient) -> dict[str, float]:
        """Return how far the gradient of each parameter that the update used is from what this clip makes of it, relative."""
        factors = [self.share] * len(used)
        if self.kind and self.kind is not ENTRY:
            sizes = self.kind.sizes(held)
            factors = [self.share * min(1.0, self.limit / (self.share * sizes[name] + 1e-6)) for name in used]
        wanted, made = [one.values for one in used.values()], [*torch._foreach_mul([held[n].values for n in used], factors)]
        if self.kind is ENTRY:
            made = [one.clamp(-self.limit, self.limit) for one in made]
        norms = torch._foreach_norm([*torch._foreach_sub(wanted, made), *wanted])
        left, whole = torch.stack(norms).view(2, -1).tolist()
        return {name: error / max(size, 1e-300) for name, error, size in zip(used, left, whole, strict=True)}


def read_clipping(sessions: Sequence[Sequence[Update]]) -> Clip:
    """Return what happens to gradients, by the way that explains them best; nothing bites in the last session, whose are tiny."""
    groups = [kept for session in sessions if (kept := [pair for pair in map(_both, session) if pair[0]])]
    if not groups:
        return Clip()
    pairs, scales = [one[:2] for group in groups for one in group], [scale for group in groups for *_, scale in group]
    ratios = [_ratios(*pair) for pair in pairs]
    outliers, small = _outliers(ratios), [median(one.values()) for one in ratios[-len(groups[-1]) :]]
    for held, _ in pairs:  # as clipping saw them
        held |= {name: held[name].times(abs(factor)) for name, factor in outliers.items() if name in held}
    share = small[0] if steady(small, SAME) else 1.0  # the second may be clipped
    found = _explained(pairs, share)
    scale = scales[0]
    if found.odd and not steady(scales, SAME):  # clipped, and then divided by a scale that changes
        early = _explained([(held.times(by), used.times(by)) for (held, used), by in zip(pairs, scales, strict=True)], share)
        if not early.odd:
            scale = next((by for by in scales if abs(by - 1) > SAME), scale)  # with 1 alone, the limit would look right
            found = replace(early, limit=early.limit / scale)
    return replace(found, scale=scale, outliers=outliers)


def _explained(pairs: Sequence[tuple[Gradient, Gradient]], share: float) -> Clip:
    """Return the way that explains these gradients best, of which the first are multiplied by ``share``."""
    ways = [Clip(share=share)]
    untouched = [ways[0].errors(*pair) for pair in pairs]
    if cut := [used for (_, used), errors in zip(pairs, untouched, strict=True) if _most(errors) > EXACT]:
        ways += [Clip(kind, max(_most(kind.sizes(used)) for used in cut), share) for kind in WAYS]
    left = [[min(way.errors(*pair), one, key=_most) for pair, one in zip(pairs, untouched, strict=True)] for way in ways]
    best, found = min(zip(ways, left, strict=True), key=lambda one: max(EXACT, *map(_most, one[1])))
    odd = tuple(dict.fromkeys(name for errors in found for name, own in errors.items() if own > FITS))
    best = ways[0] if odd else best
    norms = [share * _most(best.kind.sizes(held)) if best.kind else 0.0 for held, _ in pairs]
    passed = [x for x, one in zip(norms, untouched, strict=True) if x > BITES * best.limit and _most(one) <= EXACT]
    return replace(best, largest=share * max(held.total for held, _ in pairs), odd=odd, passed=tuple(passed))


def _both(update: Update) -> tuple[Gradient, Gradient, float]:
    """Return the gradients after the last backward pass, unscaled, and at the update, where both are; and the scale."""
    names = [n for n, one in update.held.items() if n in update.gradient and one.two != 0]
    held, used = (Gradient({name: own[name] for name in names}) for own in (update.held, update.gradient))
    return held.times(1 / update.scale), used, update.scale


def _ratios(held: Gradient, used: Gradient) -> dict[str, float]:
    """Return by what the gradient of each parameter is multiplied, in the sense of least squares; 1 if it is zero."""
    pairs = {name: (one.values, used[name].values) for name, one in held.items()}
    return {name: float(one @ other) / size if (size := float(one @ one)) else 1.0 for name, (one, other) in pairs.items()}


def _most(found: dict[str, float]) -> float:
    return max(found.values())


def _outliers(ratios: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the few parameters whose factor is always the same multiple of the others'."""
    found: dict[str, float] = {}
    for name in ratios[0]:
        factors = [one[name] / middle for one in ratios if name in one and (middle := median(one.values()))]
        if factors and abs(factors[0] - 1) > 1e-3 and max(factors) - min(factors) <= SAME * abs(factors[0]):
            found[name] = factors[0]
    return found if len(found) * 2 < len(ratios[0]) and len(ratios) > 1 else {}


def judge_clipping(findings: StepFindings, clip: Clip, wanted: float | None) -> None:
    """Add the causes in a clipping; ``wanted``: the norm to clip to, 0 for none, None where nothing is said."""
    if clip.odd:
        words = "is changed before the update in a way that is not known"
        findings.leave_open("clip", f"the gradient of {joined(findings.places(clip.odd))} {words}")
        return

    def add(id: str, detail: str, fix: str = "") -> None:
        findings.add(id, "gradient", detail, f"gradients of norms up to {clip.largest:.3g}, before and after", fix)
        findings.differ("clip", 1.0)

    share, passed = clip.share_in([]), clip.passed
    before = clip.limit / share if share else 0.0  # the norm of the gradient before it is divided
    near, near_before = (wanted is not None and abs(limit - wanted) <= 1e-3 * wanted for limit in (clip.limit, before))
    left = f"norms up to {max(passed, default=clip.largest):.4g} are left as they are"
    if wanted and (passed or (clip.kind is None and clip.largest > wanted * BITES)):
        add("clip-missing", f"in {len(passed)} of the updates {left}" if passed else left)
    if clip.kind is None:
        findings.notes += [f"read off: no clipping (norms up to {clip.largest:.3g})"] if wanted is None else []
    elif wanted == 0:
        add("clip-unwanted", f"it is clipped to {clip.limit:.6g}")
    elif clip.kind is not NORM:
        add(clip.kind.id, clip.kind.words.format(clip.limit))
    elif wanted is None:
        words = f"read off: gradients are clipped to a norm of {clip.limit:.4g}"
        findings.notes.append(f"{words}, but {left}" if passed else words)
    elif near_before and not near and share < SCALED:
        add("clip-before-unscaling", f"the gradient, still multiplied by {1 / share:g}, is clipped to {before:.6g}")
    elif not near:
        early = f": it is clipped to {before:.6g}, and then multiplied by {share:g}" if near_before else ""
        fix = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {wanted:g})" + "  # after that factor" * bool(early)
        add(NORM.id, f"{NORM.words.format(clip.limit)}, not {wanted:g}{early}", fix)
