"""Merge causes that are one fault, drop what follows from another one, and sort the others by their effect."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import EVERY, Place, collapsed, forward_rank

DROPPED = "of a block that drops attention's result: its feed-forward takes the block's input, as in a parallel block"
ONE_FOR_ALL = "of all blocks, which are one: it holds the weights of the last that was loaded"
OTHERS = "of h.1, h.2 and so on, which hold nothing: all blocks are one, called h.0, and what h.0 lacks is a fault of its own"
AFFINE = ("missing-bias", "layernorm-without-affine")
# The cause on the left explains those on the right, which are dropped, at the same place or at the part of it that is named: what
# else is missing there is a fault of its own.
EXPLAINS: dict[str, dict[str, str]] = {
    **{id: dict.fromkeys(AFFINE, "") for id in ("rmsnorm", "norm-missing", "final-norm-missing", "layer-missing")},
    **{id: {"missing-bias": ""} for id in ("layernorm-without-affine", "head-layout")},
    **{id: {"norm-missing": ""} for id in ("post-norm", "residual-from-normed")},
    "output-projection-missing": {"missing-bias": "attn.c_proj"},
    "value-projection-wrong": {"missing-bias": "attn.c_attn v", "wrong-tensor": "attn.c_attn v"},
    "position-sinusoidal": {"position-missing": ""},
    "residual-missing": {"parallel-block": DROPPED},
    "batch-dependent": {"untied-head": ""},  # known by no formula giving the logits, where rows change each other's
    "layer-repeated": {**dict.fromkeys(AFFINE, OTHERS), "wrong-tensor": ONE_FOR_ALL},
}
FUTURE = ("head-layout", "mask-missing", "mask-multiplied", "mask-off-by-one", "mask-strict", "softmax-axis", "softmax-missing")
RANDOM = ("not-deterministic", "dropout-active", "ffn-dropout")
# Faults of behaviour that follow from a fault anywhere: a token that sees the future gives other logits with a cache.
IMPLIES = {
    **{id: {"cache-inconsistent", "padding-wrong"} for id in (*FUTURE, "batch-dependent")},
    **{id: {"cache-inconsistent"} for id in ("layer-repeated", "position-sinusoidal", "position-missing")},
    **{id: {"batch-dependent", "cache-inconsistent", "padding-wrong", "not-deterministic"} - {id} for id in RANDOM},
}


def ranked(causes: Iterable[Cause], layers: int, effect: Callable[[Cause], float | None] = lambda cause: None) -> list[Cause]:
    """Merge the same fault in several blocks; sort by effect, then by the order of the forward pass.

    What changes from call to call comes first: all else was seen in one of them. What has no known effect comes last.
    ``effect``: measures that of a cause which has none yet.
    """
    once: dict[tuple[str, tuple[Place, ...]], Cause] = {}
    for cause in causes:
        once.setdefault((cause.id, cause.places), cause)
    merged = merge_blocks(once.values(), layers)
    implied = {id for cause in merged for id in IMPLIES.get(cause.id, ())}
    inside = {cause.id for cause in merged if cause.place.layer is not None} & {"batch-dependent"}  # named where a block does it
    merged = [cause for cause in merged if cause.id not in inside or cause.place.layer is not None]
    kept = []
    for cause in _join_nested(merged):
        places = _unexplained(cause, merged, layers)
        if cause.id not in implied and places:
            kept.append(replace(cause, places=places))
    kept = [*(cause for cause in kept if cause.id != "missing-bias"), *_one_cause_of_biases(kept, layers)]
    kept = [cause if cause.effect is not None else replace(cause, effect=effect(cause)) for cause in kept]

    def order(cause: Cause) -> tuple[object, ...]:
        return cause.id != "not-deterministic", -(cause.effect or 0.0), forward_rank(cause.place, layers)

    return sorted(kept, key=order)


def _one_cause_of_biases(causes: Iterable[Cause], layers: int) -> list[Cause]:
    """Return all missing biases as one cause with all its places: they are one decision of the port's author."""
    absent = [cause for cause in causes if cause.id == "missing-bias"]
    if len(absent) < 2:
        return absent
    by_tensor = {(place.layer, place.stem, place.share): place for cause in absent for place in cause.places}
    places = tuple(sorted(by_tensor.values(), key=lambda place: forward_rank(place, layers)))
    confidence = min(cause.confidence for cause in absent)
    return [replace(absent[0], places=places, detail="no bias is added in these places", confidence=confidence, kind="")]


def merge_blocks(causes: Iterable[Cause], layers: int) -> list[Cause]:
    """Merge causes that differ only in the block, with the words of the first, the lowest confidence and the largest effect."""
    groups: dict[tuple[object, ...], list[Cause]] = {}
    for cause in causes:
        parts = frozenset((place.layer is None, place.part, place.share) for place in cause.places)
        groups.setdefault((cause.id, parts, cause.kind or cause.detail), []).append(cause)
    merged = []
    for same in groups.values():
        places = collapsed((place for cause in same for place in cause.places), layers)
        effect = max((cause.effect for cause in same if cause.effect is not None), default=None)
        merged.append(replace(same[0], places=places, confidence=min(cause.confidence for cause in same), effect=effect))
    return merged


def _join_nested(causes: list[Cause]) -> list[Cause]:
    """Merge a fault at two places if one place contains the other (both residuals of a block)."""
    out: list[Cause] = []
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


def _nested(one: tuple[Place, ...], other: tuple[Place, ...]) -> bool:
    """Return whether each cause has a single place, and one place is a part of the other, in the same block."""
    if len(one) > 1 or len(other) > 1 or one[0].layer != other[0].layer:
        return False
    outer, inner = sorted((one[0].part, other[0].part), key=len)
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _unexplained(cause: Cause, others: Iterable[Cause], layers: int) -> tuple[Place, ...]:
    """Return the places of ``cause`` that do not follow from another one."""
    explaining = [
        (place, part)
        for other in others
        if (part := EXPLAINS.get(other.id, {}).get(cause.id)) is not None
        for place in other.places
        if other.id != "head-layout" or place.share
    ]
    if not explaining:
        return cause.places
    every = [one for place in cause.places for one in place.each(layers)]
    left = [one for one in every if not any(_follows(one, place, part) for place, part in explaining)]
    return cause.places if left == every else collapsed(left, layers)


def _follows(place: Place, from_place: Place, part: str) -> bool:
    """Return whether a fault at ``place`` follows from one at ``from_place``, or at a part of that."""
    if part == DROPPED:
        return from_place.part == "mid" and Place(from_place.layer, "").contains(place)
    if part in (ONE_FOR_ALL, OTHERS):
        return from_place.layer == EVERY and from_place.contains(place) and (part == ONE_FOR_ALL or place.layer != 0)
    if not part:
        same_share = not from_place.share or place.share == from_place.share
        return same_share and (from_place.contains(place) or (place.contains(from_place) and bool(place.part)))
    part, _, share = part.partition(" ")
    return Place(from_place.layer, part, share).contains(place) and (not share or place.share == share)
