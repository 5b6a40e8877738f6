"""Causes in the gradients of a module: what each step adds to what, and where a derivative is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from gpt2.port.step.causes import Findings
from gpt2.port.step.expected import Gradients
from gpt2.port.step.records import Backward, Gradient, Watched, total_norm

DEAD = 1e-9  # of the norm of all gradients: a gradient that is none
ADDED = ".grad after each backward pass, and what arrived in it"


@dataclass
class Comparison:
    """Which gradients are the expected ones, and the causes in the others.

    ``allowed``: each parameter's absolute error of computing its gradient (root mean square). ``relative`` and ``smallest``: the
    relative and absolute error of all; ``close``: the relative difference of factors that are meant to be equal. ``seen``: how
    we know. ``frozen``: parameters that are not trained, for the reason ``still``. ``positions``: those that hold the position
    embedding. ``by_hand``: functions whose backward pass the author wrote.
    """

    findings: Findings
    allowed: Mapping[str, float]
    relative: float
    smallest: float
    close: float
    seen: str
    frozen: Collection[str] = ()
    still: str = ""
    positions: Collection[str] = ()
    by_hand: Collection[str] = ()

    def same(self, name: str, got: Tensor, expected: Tensor, factor: float = 1.0) -> bool:
        """Whether a gradient is ``factor`` times the expected one, up to the rounding of computing and storing it."""
        apart = float((got - factor * expected).square().mean().sqrt())
        size = float(expected.square().mean().sqrt()) * abs(factor)
        return apart <= abs(factor) * self.allowed[name] + self.relative * size + self.smallest

    def wrong(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], factor: float = 1.0) -> list[str]:
        """Return the parameters whose gradients are not ``factor`` times the expected ones."""
        return [name for name, g in got.items() if not self.same(name, g, expected[name], factor)]

    def multiple(self, name: str, got: Tensor, expected: Tensor) -> float | None:
        """Return what the expected gradient is multiplied by; None if the other is no multiple of it."""
        factor = ratio(got, expected)
        return factor if self.same(name, got, expected, factor) else None

    def judge(self, got: Mapping[str, Tensor], wrong: Sequence[str], factor: float, made: Gradients) -> None:
        """Add the causes in the gradients ``wrong``; all others are ``factor`` times those of ``made``."""
        right, add = made.whole, partial(self.findings.add, seen=self.seen)
        dead = [name for name in wrong if float(got[name].norm()) <= DEAD * total_norm(right) * abs(factor)]
        frozen = [name for name in dead if name in self.frozen]
        unreached = [name for name in dead if name not in frozen]
        rest = [name for name in wrong if name not in dead]
        lost = any(name in self.positions for name in (*unreached, *rest))  # both embeddings lack what reaches the stream
        for name in [name for name in rest if name in made.head]:
            head, table, lost_id, doubled = made.head[name], made.table[name], "tied-gradient-lost", "tied-gradient-doubled"
            ways = (
                (lost_id, "it gets the head's gradient only, not that of the rows that the ids choose", head),
                (lost_id, "it gets the gradient of the rows that the ids choose only, not the head's", table),
                (doubled, "a gradient of it is counted twice", 2 * right[name]),
                (doubled, "the head's gradient is counted twice", 2 * head + table),
                (doubled, "the gradient of the rows is counted twice", head + 2 * table),
            )
            for id, detail, value in ways:
                if self.same(name, got[name], value, factor) and not (lost and value is head):
                    add(id, "wte", detail)
                    rest.remove(name)
                    break
        if frozen:
            add("parameters-frozen", frozen, self.still)
        if unreached:
            add("gradient-detached", unreached, "no gradient reaches these parameters")
        elif rest:
            factors = [self.multiple(name, got[name], right[name]) for name in rest]
            known = [one / factor for one in factors if one is not None]
            if len(known) == len(factors) and max(known) - min(known) < self.close * max(map(abs, known)):
                add("gradient-scaled", rest, f"the gradient of these parameters is multiplied by {median(known):.6g}")
            elif self.by_hand:
                words = "the gradients of these parameters are wrong; the backward pass of {} is written by hand"
                self.findings.add("backward-wrong", rest, words.format(" and ".join(sorted(self.by_hand))), self.seen)
            else:
                detail = "the gradients of these parameters lack a part, or have one more"
                add("gradient-detached", rest, detail, confidence=0.8)


def ratio(got: Tensor, expected: Tensor) -> float:
    """Return the factor that brings the expected gradient nearest."""
    return float((got * expected).sum() / expected.square().sum().clamp(min=torch.finfo(torch.float64).tiny))


# What a module adds to its gradients


def judge_accumulation(findings: Findings, calls: Sequence[Watched]) -> None:
    """Compare ``.grad`` after each backward pass with what was in it before and what arrived."""
    kept, lost, other, unknown = list[float](), False, list[float](), False
    moving = {name for call in calls for update in call.updates for name in update.before if update.moves(name)}
    for call in calls:
        updated = {update.backwards for update in call.updates}
        before, fresh = call.start, True
        for number, backward in enumerate(call.backwards):
            if number in updated:
                before, fresh = call.updates[0].gradient, True
            share, error = _share(before, backward, moving) or (float(not fresh), 0.0)
            if error > 1e-6:
                unknown = True
            elif fresh and share > 0.5:
                kept.append(share)
            elif not fresh and abs(share) < 1e-6:
                lost = True
            elif abs(share - (not fresh)) > 1e-6:
                other.append(share)
            before, fresh = backward.held, False
    if kept:
        times = "" if abs(median(kept) - 1) < 1e-3 else f"{median(kept):.3g} times "
        detail = f"each backward pass adds to {times}the gradient of the step before"
        findings.add("gradient-not-zeroed", "gradient", detail, ADDED)
    if lost:
        findings.add("accumulation-last-only", "gradient", "the gradient is zeroed between the parts of a batch", ADDED)
    if kept or lost or other or unknown:
        findings.differ("gradient", 1.0)
    if other or unknown:
        detail = "between the backward passes of a step the gradient is changed"
        detail += f": multiplied by {median(other):.4g}" if other else ""
        findings.add("clip-before-accumulation", "clip", detail, ADDED)


def _share(before: Gradient, backward: Backward, moving: set[str]) -> tuple[float, float] | None:
    """Return how much of the gradient ``before`` is in ``.grad`` after a backward pass, and the relative error of that."""
    held, arrived = backward.held, backward.arrived
    names = [n for n in held if n in moving and n in arrived and n in before and before[n].two > 0]
    if not names:
        return None
    size, came, old = (torch.cat([one[name].values for name in names]) for one in (held, arrived, before))
    rest = size - came
    share = float(rest @ old / (old @ old)) if bool((old != 0).any()) else 0.0
    if abs(share) * float(old.norm()) < 1e-9 * float(size.norm()):
        share = 0.0
    return share, float((rest - share * old).norm()) / max(float(size.norm()), 1e-300)
