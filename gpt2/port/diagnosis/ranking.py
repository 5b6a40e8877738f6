"""Merge the causes that several checks report into one list: the most likely first, no duplicates, no consequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.places import Place, collapsed, forward_rank

# The cause on the left explains those on the right: at the same place, these are dropped.
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
# Causes of wrong behaviour that follow from what is computed, wherever: a token that sees the future sees another with a cache.
IMPLIES = {
    **{id: {"cache-inconsistent", "padding-wrong"} for id in (*FUTURE, "batch-dependent")},
    **{id: {"cache-inconsistent"} for id in ("layer-repeated", "position-sinusoidal", "position-missing")},
    **{id: {"batch-dependent", "cache-inconsistent", "padding-wrong"} for id in RANDOM},
}


def ranked(causes: Iterable[PlacedCause], layers: int) -> list[PlacedCause]:
    """The same fault in several blocks as one cause; sorted by confidence, then by the order of the forward pass."""
    once: dict[tuple[str, tuple[Place, ...]], PlacedCause] = {}
    for cause in causes:
        once.setdefault((cause.id, cause.places), cause)
    merged = merge_blocks(once.values(), layers)
    implied = {id for cause in merged for id in IMPLIES.get(cause.id, ())}
    if any(cause.id in ("not-deterministic", "batch-dependent") for cause in merged):  # a fitted factor may be of this call alone
        merged = [cause for cause in merged if not cause.fitted]
    kept = [
        cause
        for cause in _join_nested(merged)
        if cause.id not in implied and not any(_explains(other, cause) for other in merged)
    ]
    return sorted(kept, key=lambda cause: (-round(cause.confidence, 2), forward_rank(cause.places[0], layers)))


def merge_blocks(causes: Iterable[PlacedCause], layers: int) -> list[PlacedCause]:
    """Causes that differ only in the block as one, with the words of the first and the lowest confidence."""
    groups: dict[tuple[object, ...], list[PlacedCause]] = {}
    for cause in causes:
        parts = frozenset((place.layer is None, place.part, place.share) for place in cause.places)
        groups.setdefault((cause.id, parts, cause.kind or cause.detail), []).append(cause)
    merged = []
    for same in groups.values():
        places = collapsed((place for cause in same for place in cause.places), layers)
        merged.append(replace(same[0], places=places, confidence=min(cause.confidence for cause in same)))
    return merged


def _join_nested(causes: list[PlacedCause]) -> list[PlacedCause]:
    """The same fault at two places, one inside the other (both residuals of a block), as one cause."""
    out: list[PlacedCause] = []
    for cause in causes:
        number = next((i for i, other in enumerate(out) if other.id == cause.id and _nested(other.places, cause.places)), None)
        if number is None:
            out.append(cause)
            continue
        other = out[number]
        detail = "; ".join(dict.fromkeys((other.detail, cause.detail)))
        confidence = min(other.confidence, cause.confidence)
        out[number] = replace(other, places=(*other.places, *cause.places), detail=detail, confidence=confidence)
    return out


def _nested(ours: tuple[Place, ...], theirs: tuple[Place, ...]) -> bool:
    """Whether one place alone is a part of another, in the same block."""
    if len(ours) > 1 or len(theirs) > 1 or ours[0].layer != theirs[0].layer:
        return False
    outer, inner = sorted((ours[0].part, theirs[0].part), key=len)
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _explains(one: PlacedCause, other: PlacedCause) -> bool:
    """Whether ``other`` follows from ``one``: all of its places are about a norm, an attention or a block that ``one`` is in."""
    if other.id not in EXPLAINS.get(one.id, ()):
        return False
    return all(any(x.contains(y) or y.contains(x) for x in one.places) for y in other.places)
