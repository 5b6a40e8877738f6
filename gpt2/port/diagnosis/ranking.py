"""Causes from several judges as one list: the most likely first, none twice, and none that another one explains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from gpt2.measure.tracing import points
from gpt2.port.diagnosis.report import Cause, merged

# What is named first explains what follows it: at the same place, the latter is dropped.
EXPLAINS = {
    "rmsnorm": {"missing-bias", "layernorm-without-affine"},
    "norm-missing": {"missing-bias", "layernorm-without-affine"},
    "final-norm-missing": {"missing-bias", "layernorm-without-affine"},
    "layernorm-without-affine": {"missing-bias"},
    "post-norm": {"norm-missing"},
    "residual-from-normed": {"norm-missing"},
    "layer-missing": {"missing-bias", "layernorm-without-affine"},
    "output-projection-missing": {"missing-bias"},
    "value-projection-wrong": {"missing-bias", "wrong-tensor"},
    "position-sinusoidal": {"position-missing"},
}
FUTURE = ("head-layout", "mask-missing", "mask-multiplied", "mask-off-by-one", "mask-strict", "softmax-axis", "softmax-missing")
RANDOM = ("not-deterministic", "dropout-active", "ffn-dropout")
# Of how a port behaves, what follows from what it computes: who sees the future sees another one through a cache.
IMPLIES = {
    **{id: {"cache-inconsistent", "padding-wrong"} for id in FUTURE},
    "layer-repeated": {"cache-inconsistent"},
    "position-sinusoidal": {"cache-inconsistent"},
    "position-missing": {"cache-inconsistent"},
    "batch-dependent": {"cache-inconsistent", "padding-wrong"},
    **{id: {"batch-dependent", "cache-inconsistent", "padding-wrong"} for id in RANDOM},
}


def ranked(causes: Iterable[Cause], layers: int) -> list[Cause]:
    """Blocks' causes together, by confidence, then by what comes first in the forward pass."""
    once: dict[tuple[str, str], Cause] = {}
    for cause in causes:
        once.setdefault((cause.id, cause.where), cause)
    found = merged(once.values(), layers)
    implied = {id for cause in found for id in IMPLIES.get(cause.id, ())}
    if any(cause.id in ("not-deterministic", "batch-dependent") for cause in found):  # then a factor may be of this call alone
        found = [cause for cause in found if cause.id != "embedding-scaled" or "sqrt" in cause.detail]
    kept = [
        cause
        for cause in _joined(found)
        if cause.id not in implied and not any(cause.id in EXPLAINS.get(other.id, ()) and _near(other, cause) for other in found)
    ]
    order = {point: number for number, point in enumerate(points(layers))}
    return sorted(kept, key=lambda cause: (-round(cause.confidence, 2), _first(cause.where, order)))


def _joined(causes: list[Cause]) -> list[Cause]:
    """What is wrong in the same way at two places of the same blocks (both residuals) as one."""
    out: list[Cause] = []
    for cause in causes:
        number = next((i for i, other in enumerate(out) if other.id == cause.id and _nested(other.where, cause.where)), None)
        if number is None:
            out.append(cause)
            continue
        other = out[number]
        detail = other.detail if cause.detail == other.detail else f"{other.detail}; {cause.detail}"
        where, confidence = f"{other.where}, {cause.where}", min(other.confidence, cause.confidence)
        out[number] = replace(other, where=where, detail=detail, confidence=confidence)
    return out


def _nested(one: str, other: str) -> bool:
    return other.startswith(f"{one}.") or one.startswith(f"{other}.")


def _near(one: Cause, other: Cause) -> bool:
    """Whether all of another cause is about a part that the one is about: a norm, an attention, a block; of the same block."""
    return all(any(_overlap(x, y) for x in _parts(one.where)) for y in _parts(other.where))


def _overlap(one: tuple[str, str], other: tuple[str, str]) -> bool:
    (n, x), (m, y) = one, other
    return (x.startswith(y) or y.startswith(x)) and (n == m or not n.isdigit() or not m.isdigit())


def _parts(where: str) -> list[tuple[str, str]]:
    """Places as the block's number and the rest without the leaf: ``h.0.ln_1.bias`` is ``0`` and ``h.ln_1``."""
    found = []
    for place in where.split(", "):
        name = place.partition(" ")[0].removesuffix(".weight").removesuffix(".bias")
        number = re.match(r"h\.(\d+|\*)", name)
        found.append((number[1] if number else "", re.sub(r"^h\.(\d+|\*)", "h", name)))
    return found


def _first(where: str, order: dict[str, int]) -> int:
    place = where.replace("*", "0").partition(",")[0].partition(" ")[0]
    inside = [
        number
        for point, number in order.items()
        if point == place or point.startswith(f"{place}.") or place.startswith(f"{point}.")
    ]
    return min(inside, default=len(order))
