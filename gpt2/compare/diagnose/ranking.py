"""Causes from several judges as one list: the most likely first, none twice, and none that another one explains."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..trace import points
from .report import Cause, merged

# What is named first explains what follows it: at the same place, the latter is dropped.
EXPLAINS = {
    "rmsnorm": {"missing-bias", "layernorm-without-affine"},
    "norm-missing": {"missing-bias", "layernorm-without-affine"},
    "final-norm-missing": {"missing-bias", "layernorm-without-affine"},
    "layernorm-without-affine": {"missing-bias"},
    "post-norm": {"norm-missing"},
    "residual-from-normed": {"norm-missing"},
    "layer-missing": {"missing-bias"},
    "output-projection-missing": {"missing-bias"},
    "value-projection-wrong": {"missing-bias", "wrong-tensor"},
    "dropout-active": {"not-deterministic"},
    "ffn-dropout": {"not-deterministic", "dropout-active"},
}


def ranked(causes: Iterable[Cause], layers: int) -> list[Cause]:
    """Blocks' causes together, by confidence, then by what comes first in the forward pass."""
    found = merged(dict.fromkeys(causes), layers)
    dropped = {id for cause in found for id in EXPLAINS.get(cause.id, ())}
    kept = [
        cause
        for cause in found
        if cause.id not in dropped or not any(cause.id in EXPLAINS.get(other.id, ()) and _near(other, cause) for other in found)
    ]
    order = {point: number for number, point in enumerate(points(layers))}
    return sorted(kept, key=lambda cause: (-round(cause.confidence, 2), _first(cause.where, order)))


def _near(one: Cause, other: Cause) -> bool:
    """Whether two causes are about the same part: a norm, an attention, a block."""
    a, b = (set(_parts(cause.where)) for cause in (one, other))
    return any(x.startswith(y) or y.startswith(x) for x in a for y in b)


def _parts(where: str) -> list[str]:
    """Places without blocks' numbers and without the leaf: ``h.0.ln_1.bias`` is ``h.ln_1``."""
    places = (re.sub(r"\bh\.(\d+|\*)", "h", place).removesuffix(".weight").removesuffix(".bias") for place in where.split(", "))
    return [place.partition(" ")[0] for place in places]


def _first(where: str, order: dict[str, int]) -> int:
    place = where.replace("*", "0").partition(",")[0].partition(" ")[0]
    inside = [
        number
        for point, number in order.items()
        if point == place or point.startswith(f"{place}.") or place.startswith(f"{point}.")
    ]
    return min(inside, default=len(order))
