"""Causes that the structure of a port alone shows, for a walk through its values that does not get to the end."""

from __future__ import annotations

from collections.abc import Iterator

from gpt2.errors import InputError
from gpt2.port.diagnosis.causes import cause
from gpt2.port.diagnosis.report import LIKELY, Cause
from gpt2.port.mapping.departures import Departure, DepartureKind, find_departures
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.mapping.remarks import sentence

SEEN = "seen in the operators of its forward pass, whatever their names"
SIZES = {
    DepartureKind.WIDTH: "width",
    DepartureKind.FEED_FORWARD_WIDTH: "feed-forward width",
    DepartureKind.VOCABULARY: "vocabulary",
}
# The id of a cause. Departures that are missing here are none: a padded vocabulary, more blocks, weights in a buffer.
CAUSES = {
    DepartureKind.BLOCK_COUNT: "layer-missing",
    DepartureKind.HEAD_COUNT: "head-layout",
    DepartureKind.REPEATED: "layer-repeated",
    DepartureKind.HEADS_MIXED: "head-layout",
    DepartureKind.POST_NORM: "post-norm",
    DepartureKind.EXTRA_NORM: "extra-norm",
    DepartureKind.POSITIONS_SHIFTED: "position-offset",
    DepartureKind.POSITIONS_MISSING: "position-missing",
    DepartureKind.NORM_MISSING: "norm-missing",
    DepartureKind.FINAL_NORM_MISSING: "final-norm-missing",
}


def must_fit(mapping: Mapping, who: str) -> None:
    """Refuse a port of another size.

    Raises:
        InputError: another width, feed-forward, or a smaller vocabulary.
    """
    for departure in find_departures(mapping):
        theirs, ours, what = departure.theirs, departure.ours, SIZES.get(departure.kind)
        if what and (theirs < ours or departure.kind is not DepartureKind.VOCABULARY):
            raise InputError(f"{who}: its {what} is {theirs:,}, the checkpoint's {ours:,}; build it with the checkpoint's sizes")


def structural_causes(mapping: Mapping) -> Iterator[Cause]:
    """Departures that show in how things are connected. Less certain than the walk's causes: nothing was recomputed."""
    for departure in find_departures(mapping):
        kind = departure.kind
        if kind not in CAUSES or (kind is DepartureKind.BLOCK_COUNT and departure.theirs > departure.ours):
            continue
        fix = None
        if kind is DepartureKind.HEAD_COUNT:
            fix = f"n_head={departure.ours}  # each {mapping.config.head_dim} wide"
        yield cause(CAUSES[kind], _where(departure), sentence(departure), SEEN, LIKELY, fix)


def _where(departure: Departure) -> str:
    if departure.kind in (DepartureKind.BLOCK_COUNT, DepartureKind.EXTRA_NORM):
        return ", ".join(departure.names)
    if departure.kind is DepartureKind.REPEATED:
        return f"h.{departure.layer}"
    if departure.kind is DepartureKind.POST_NORM:
        return "h.*"
    if departure.kind is DepartureKind.HEAD_COUNT:
        return "h.*.attn"
    return departure.part if departure.layer is None else f"h.{departure.layer}.{departure.part}"
