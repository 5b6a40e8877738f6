"""Causes in the gradients: what each backward pass gave, and what was added to what."""

from __future__ import annotations

import math
from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from gpt2.port.diagnosis.places import Place, listed
from gpt2.port.diagnosis.report import Cause
from gpt2.port.step.causes import cause
from gpt2.port.step.gradients import Expected, Roles
from gpt2.port.step.records import Backward, Gradient, Samples, Update, Watched
from gpt2.port.step.trained import Stage

EQUAL = 1e-8  # relative error of a parameter's gradient; constants in float32 reach 1e-8
NOISE = 1e-11  # of the whole gradient's norm: a gradient that is zero in exact arithmetic
UNREACHED = "no gradient reaches these parameters"
BACKWARD = "from your own gradient of the logits, our model in float64 gives other gradients"


def places(names: Sequence[str], roles: Roles, layers: int) -> str:
    """Return the checkpoint's names for parameters."""
    return listed((Place.of(where) for name in names for where in roles.where(name)), layers)


def first_backwards(seen: Watched) -> int:
    """Return how many backward passes of a call come before its first update: all of them, as a rule."""
    return seen.updates[0].backwards if len(seen.updates) > 1 else len(seen.backwards)


def summed(seen: Watched) -> Samples:
    """Return the sum of what arrived at each parameter before a call's first update."""
    total: Samples = {}
    for backward in seen.backwards[: first_backwards(seen)]:
        for name, sample in backward.arrived.samples.items():
            total[name] = total[name] + sample if name in total else sample
    return total


def accumulation_stage(calls: Sequence[Watched]) -> Stage:
    """Compare ``.grad`` after each backward pass with what was in it before and what arrived."""
    stage = Stage()
    kept: list[float] = []
    lost: list[float] = []
    others: list[float] = []
    unexplained: list[float] = []
    moving = {name for call in calls for update in call.updates for name in update.before if _moves(update, name)}
    for call in calls:
        updated = {update.backwards for update in call.updates}
        before, fresh = call.start, True
        for number, backward in enumerate(call.backwards):
            if number in updated:
                before, fresh = call.updates[0].gradient, True
            share, error = _share(before, backward, moving)
            if share is not None and error > 1e-6:
                unexplained.append(error)
            elif share is not None and fresh:
                (kept if share > 0.5 else others if abs(share) > 1e-6 else []).append(share)
            elif share is not None and abs(share - 1) > 1e-6:
                (lost if abs(share) < 1e-6 else others).append(share)
            before, fresh = backward.held, False
    if kept:
        detail = f"each backward pass adds to {_times(kept)} of the step before"
        stage.causes.append(
            cause("gradient-not-zeroed", "gradient", detail, ".grad after the backward pass, and what arrived in it")
        )
    if lost:
        detail = "the gradient is zeroed between the parts of a batch"
        stage.causes.append(cause("accumulation-last-only", "gradient", detail, ".grad after each backward pass"))
    if others or unexplained:
        detail = "between the backward passes of a step the gradient is changed"
        detail += f": multiplied by {median(others):.4g}" if others else ""
        stage.causes.append(cause("clip-before-accumulation", "clip", detail, ".grad after each backward pass"))
    stage.error = 1.0 if stage.causes else 0.0
    return stage


def _times(shares: list[float]) -> str:
    share = median(shares)
    return "the gradient" if abs(share - 1) < 1e-3 else f"{share:.3g} times the gradient"


def _moves(update: Update, name: str) -> bool:
    return not torch.equal(update.before[name], update.after[name])


def _share(before: Gradient, backward: Backward, moving: set[str]) -> tuple[float | None, float]:
    """Return how much of the gradient ``before`` is in ``.grad`` after a backward pass, and the relative error of that."""
    held, arrived = backward.held.samples, backward.arrived.samples
    names = [name for name in held if name in moving and name in arrived and name in before.samples and before.two[name] > 0]
    if not names:
        return None, 0.0
    rest = torch.cat([held[name] - arrived[name] for name in names])
    old = torch.cat([before.samples[name] for name in names])
    size = torch.cat([held[name] for name in names])
    share = float(rest @ old / (old @ old)) if bool((old != 0).any()) else 0.0
    if abs(share) * float(old.norm()) < 1e-9 * float(size.norm()):
        share = 0.0
    return share, float((rest - share * old).norm()) / max(float(size.norm()), 1e-300)


def backward_stage(
    seen: Watched, expected: MappingType[str, Expected], roles: Roles, layers: int, untied: Sequence[str]
) -> Stage:
    """Compare the first call's gradients with those that our model gives from the same gradient of the logits."""
    stage = Stage()
    arrived = summed(seen)
    whole = math.sqrt(sum(_norm(one) ** 2 for one in expected.values()))
    wrong: dict[str, tuple[Tensor, Expected]] = {}
    for name, one in expected.items():
        got = arrived.get(name, torch.zeros_like(one.whole))
        if not _equal(got, one.whole, whole):
            wrong[name] = got, one
            stage.error = max(stage.error, _apart(got, one.whole) / max(_norm(one), NOISE * whole))
    frozen = [name for name in wrong if name not in seen.trains]
    dead = [name for name, (got, one) in wrong.items() if name in seen.trains and float(got.norm()) <= NOISE * whole]
    tables = [name for name, (_, one) in wrong.items() if one.head is not None and name not in (*frozen, *dead)]
    rest = [name for name in wrong if name not in (*frozen, *dead, *tables)]
    tables, dead = [n for n in tables if n not in untied], [n for n in dead if n not in untied]
    positions = [name for name in (*dead, *rest) if any(part == "wpe" for _, part in roles.parts.get(name, []))]
    for name in tables:
        got, one = wrong[name]
        assert one.head is not None
        assert one.table is not None
        for id, detail, value in wrong_tables(one.whole, one.head, one.table):
            if _equal(got, value, whole) and not (value is one.head and positions):
                stage.causes.append(cause(id, "wte", detail, BACKWARD))
                break
        else:
            rest.append(name)
    if frozen:
        detail = "requires_grad is False for these parameters"
        stage.causes.append(cause("parameters-frozen", places(frozen, roles, layers), detail, "they get no gradient"))
    if dead:
        stage.causes.append(cause("gradient-detached", places(dead, roles, layers), UNREACHED, BACKWARD))
    if rest and not dead:
        factors = [_factor(*wrong[name], whole) for name in rest]
        stage.causes.append(uneven(factors, places(rest, roles, layers), 1e-6, BACKWARD))
    return stage


def wrong_tables(whole: Tensor, head: Tensor, table: Tensor) -> list[tuple[str, str, Tensor]]:
    """Return wrong gradients of the token embedding, each behind its cause and words; ``whole`` is head and table together."""
    return [
        ("tied-gradient-lost", "it gets the head's gradient only, not that of the rows that the ids choose", head),
        ("tied-gradient-lost", "it gets the gradient of the rows that the ids choose only, not the head's", table),
        ("tied-gradient-doubled", "a gradient of it is counted twice", 2 * whole),
        ("tied-gradient-doubled", "the head's gradient is counted twice", 2 * head + table),
        ("tied-gradient-doubled", "the gradient of the rows is counted twice", head + 2 * table),
    ]


def uneven(factors: Sequence[float | None], where: str, close: float, seen: str) -> Cause:
    """Return the cause in gradients that are ``factors`` of the right ones, None where one is no multiple of it."""
    known = [factor for factor in factors if factor is not None]
    if len(known) == len(factors) and max(known) - min(known) < close * max(map(abs, known)):
        detail = f"the gradient of these parameters is multiplied by {median(known):.6g}"
        return cause("gradient-scaled", where, detail, seen)
    detail = "the gradients of these parameters lack a part, or have one more"
    return cause("gradient-detached", where, detail, seen, 0.8)


def untied_causes(untied: Sequence[str]) -> list[Cause]:
    """Return the cause for a head and a token embedding that are two parameters, each with its own gradient."""
    if len(untied) < 2:
        return []
    detail = f"the head and the token embedding are two parameters ({' and '.join(untied)}); each gets its own gradient"
    return [cause("tied-gradient-lost", "wte", detail, "their values part in the step")]


def _factor(got: Tensor, one: Expected, whole: float) -> float | None:
    """Return what the right gradient is multiplied by; None if the other is no multiple of it."""
    right = one.whole.nan_to_num()
    factor = float(got @ right / (right @ right))
    return factor if _equal(got, factor * one.whole, whole) else None


def _norm(one: Expected) -> float:
    return float(one.whole.nan_to_num().norm())


def _apart(got: Tensor, right: Tensor) -> float:
    known = ~right.isnan()
    return float((got[known] - right[known]).norm())


def _equal(got: Tensor, right: Tensor, whole: float) -> bool:
    return _apart(got, right) <= EQUAL * float(right.nan_to_num().norm()) + NOISE * whole
