"""Causes in the gradients: what each backward pass gave, what was added to what, and where a derivative is wrong."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from gpt2.port.diagnosis.report import Cause
from gpt2.port.step.causes import Places, Stage, cause
from gpt2.port.step.expected import Gradients
from gpt2.port.step.records import Backward, Gradient, Watched

DEAD = 1e-9  # of the norm of all gradients: a gradient that is none
LETTERS = "qkv"
# The parts of a block in the order of the backward pass, and what its gradient has passed since the part before.
PASSED = {
    "mlp.c_proj": ("ln_1 of the next block, or the residual before it", "{next}.ln_1"),
    "mlp.c_fc": ("the derivative of GELU", "h.{layer}.mlp.act"),
    "ln_2": ("the product with the weight of mlp.c_fc", "h.{layer}.mlp.c_fc"),
    "attn.c_proj": ("ln_2, or the residual before it", "h.{layer}.ln_2"),
    "attn.c_attn": ("attention: its weights, softmax and scale", "h.{layer}.attn"),
    "ln_1": ("the product with the weight of attn.c_attn", "h.{layer}.attn.c_attn"),
}


@dataclass
class Comparison:
    """Which gradients are the expected ones, and the causes in the others.

    ``allowed``: each parameter's absolute error of computing its gradient (root mean square). ``relative`` and ``smallest``: the
    relative and absolute error of all; ``close``: the relative difference of factors that are meant to be equal. ``seen``: how
    we know. ``frozen``: parameters that are not trained, for the reason ``still``. ``positions``: those that hold the position
    embedding. ``derivatives``: whether derivatives may be wrong, which those of torch are not.
    """

    allowed: Mapping[str, float]
    relative: float
    smallest: float
    close: float
    seen: str
    places: Places
    frozen: Collection[str] = ()
    still: str = ""
    positions: Collection[str] = ()
    derivatives: bool = False

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

    def causes(self, got: Mapping[str, Tensor], wrong: Sequence[str], factor: float, made: Gradients) -> list[Cause]:
        """Return the causes in the gradients ``wrong``; all others are ``factor`` times those of ``made``."""
        right = made.whole
        dead = [name for name in wrong if float(got[name].norm()) <= DEAD * total_norm(right) * abs(factor)]
        frozen = [name for name in dead if name in self.frozen]
        unreached = [name for name in dead if name not in frozen]
        rest, found = [name for name in wrong if name not in dead], list[Cause]()

        def add(id: str, where: str, detail: str, confidence: float = 1.0) -> None:
            found.append(cause(id, where, detail, self.seen, confidence))

        if self.derivatives and not dead and (backward := self._backward(got, rest, factor, right)) is not None:
            where, detail, rest = backward
            add("backward-wrong", where, detail)
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
            add("parameters-frozen", self.places(frozen), self.still)
        if unreached:
            add("gradient-detached", self.places(unreached), "no gradient reaches these parameters")
        elif rest:
            factors = [self.multiple(name, got[name], right[name]) for name in rest]
            known = [one / factor for one in factors if one is not None]
            if len(known) == len(factors) and max(known) - min(known) < self.close * max(map(abs, known)):
                detail = f"the gradient of these parameters is multiplied by {median(known):.6g}"
                add("gradient-scaled", self.places(rest), detail)
            else:
                detail = "the gradients of these parameters lack a part, or have one more"
                add("gradient-detached", self.places(rest), detail, 0.8)
        return found

    def _backward(
        self, got: Mapping[str, Tensor], wrong: Sequence[str], factor: float, right: Mapping[str, Tensor]
    ) -> tuple[str, str, list[str]] | None:
        """Return where a backward pass goes wrong: parts are right down to one, and wrong from there to the embeddings.

        Beside the place and the words: the wrong gradients of the parts before, which this does not explain.
        """
        layers = 1 + max((int(name.split(".")[1]) for name in right if name.startswith("h.")), default=0)
        order = ["ln_f", *(f"h.{layer}.{part}" for layer in reversed(range(layers)) for part in PASSED), "wpe"]
        parts = {one: names for one in order if (names := [n for n in got if n.startswith(f"{one}.")])}
        known, bad = list(parts), [one for one, names in parts.items() if all(name in wrong for name in names)]
        first = known.index(bad[0]) if bad else 0
        if not 0 < first < len(known) - 1 or bad != known[first:]:
            return None
        last, here = known[first - 1], bad[0]
        layer, part = int(here.split(".")[1]), here.split(".", 2)[2]
        words, where = ("ln_f", "ln_f") if here == f"h.{layers - 1}.mlp.c_proj" else PASSED[part]
        detail = f"going backward, the gradients are right down to {last} and wrong from {here} on: look at {words}"
        name = f"{here}.bias"
        thirds = zip(got[name].chunk(3), right[name].chunk(3), strict=True) if part == "attn.c_attn" and name in got else ()
        shares = dict(zip(LETTERS, thirds, strict=False))
        if [x for x, (a, b) in shares.items() if x != "k" and self.same(name, a, b, factor)] == ["v"]:
            detail = (
                f"going backward, the gradients are right down to {here} (v) and wrong at q and k: look at softmax and its scale"
            )
            of_q = self.multiple(name, *shares["q"])
            detail += f"; that of q is {of_q / factor:.5g} times the right one" if of_q is not None else ""
        before = [name for one in known[:first] for name in parts[one] if name in wrong]
        return where.format(layer=layer, next=f"h.{layer + 1}"), detail, before


def ratio(got: Tensor, expected: Tensor) -> float:
    """Return the factor that brings the expected gradient nearest."""
    return float((got * expected).sum() / expected.square().sum().clamp(min=torch.finfo(torch.float64).tiny))


def total_norm(gradient: Mapping[str, Tensor]) -> float:
    """Return the norm of all gradients together."""
    return math.hypot(*(float(g.norm()) for g in gradient.values()))


def accumulation_stage(calls: Sequence[Watched]) -> Stage:
    """Compare ``.grad`` after each backward pass with what was in it before and what arrived."""
    kept, lost, other, stage = list[float](), False, list[float](), Stage()
    unknown, seen = False, ".grad after each backward pass, and what arrived in it"
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
        stage.causes.append(cause("gradient-not-zeroed", "gradient", detail, seen))
    if lost:
        detail = "the gradient is zeroed between the parts of a batch"
        stage.causes.append(cause("accumulation-last-only", "gradient", detail, seen))
    if other or unknown:
        detail = "between the backward passes of a step the gradient is changed"
        detail += f": multiplied by {median(other):.4g}" if other else ""
        stage.causes.append(cause("clip-before-accumulation", "clip", detail, seen))
    stage.error = float(bool(stage.causes))
    return stage


def _share(before: Gradient, backward: Backward, moving: set[str]) -> tuple[float, float] | None:
    """Return how much of the gradient ``before`` is in ``.grad`` after a backward pass, and the relative error of that."""
    held, arrived = backward.held.samples, backward.arrived.samples
    names = [n for n in held if n in moving and n in arrived and n in before.samples and before.sizes[n].two > 0]
    if not names:
        return None
    rest, old, size = (
        torch.cat([one(name) for name in names])
        for one in (lambda n: held[n] - arrived[n], before.samples.__getitem__, held.__getitem__)
    )
    share = float(rest @ old / (old @ old)) if bool((old != 0).any()) else 0.0
    if abs(share) * float(old.norm()) < 1e-9 * float(size.norm()):
        share = 0.0
    return share, float((rest - share * old).norm()) / max(float(size.norm()), 1e-300)
