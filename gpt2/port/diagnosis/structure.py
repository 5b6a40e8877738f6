"""Find causes in the structure of a port alone, in case the walk through its values does not reach the end."""

from __future__ import annotations

from collections.abc import Iterator

from gpt2.errors import InputError
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.places import EVERY, Place
from gpt2.port.diagnosis.report import LIKELY
from gpt2.port.mapping.departures import Departure, DepartureKind, find_departures
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.mapping.remarks import sentence

SEEN = "seen in the operators of its forward pass, whatever their names"
SIZES = {
    DepartureKind.WIDTH: "width",
    DepartureKind.FEED_FORWARD_WIDTH: "feed-forward width",
    DepartureKind.VOCABULARY: "vocabulary",
}
# The cause's id by departure. A padded vocabulary and weights in a buffer are not faults, and missing here.
CAUSES = {
    DepartureKind.BLOCK_COUNT: "layer-missing",
    DepartureKind.HEAD_COUNT: "head-layout",
    DepartureKind.BRANCH_MISSING: "layer-missing",
    DepartureKind.REPEATED: "layer-repeated",
    DepartureKind.HEADS_MIXED: "head-layout",
    DepartureKind.HEADS_SHARED: "head-layout",
    DepartureKind.POST_NORM: "post-norm",
    DepartureKind.EXTRA_NORM: "extra-norm",
    DepartureKind.POSITIONS_SHIFTED: "position-offset",
    DepartureKind.POSITIONS_MISSING: "position-missing",
    DepartureKind.NORM_MISSING: "norm-missing",
    DepartureKind.FINAL_NORM_MISSING: "final-norm-missing",
}


def require_size(mapping: Mapping, who: str) -> None:
    """Raise InputError if the port has another width or feed-forward, or a smaller vocabulary."""
    for departure in find_departures(mapping):
        if what := SIZES.get(departure.kind):
            sizes = f"{departure.port_size:,}, the checkpoint's {departure.checkpoint_size:,}"
            raise InputError(f"{who}: its {what} is {sizes}; build it with the checkpoint's sizes")


def structural_causes(mapping: Mapping) -> Iterator[PlacedCause]:
    """Yield the faults in a port's connections; less certain than the walk's causes, since nothing was recomputed."""
    for departure in find_departures(mapping):
        kind = departure.kind
        if kind in CAUSES and not (kind is DepartureKind.BLOCK_COUNT and departure.port_size > departure.checkpoint_size):
            fix = (
                f"n_head={departure.checkpoint_size}  # each {mapping.config.head_dim} wide"
                if kind is DepartureKind.HEAD_COUNT
                else None
            )
            same = f"{kind.name} {departure.part}"
            yield PlacedCause(CAUSES[kind], _places(departure), sentence(departure), SEEN, LIKELY, fix, same)


def _places(departure: Departure) -> tuple[Place, ...]:
    if departure.kind is DepartureKind.BLOCK_COUNT:
        return tuple(Place.of(name) for name in departure.names)
    if departure.kind is DepartureKind.EXTRA_NORM:
        return tuple(Place(None, name) for name in departure.names)
    if departure.kind is DepartureKind.HEADS_SHARED:
        return tuple(Place(departure.layer, "attn.c_attn", share) for share in departure.names)
    if departure.kind is DepartureKind.BRANCH_MISSING:
        return tuple(Place(departure.layer, part) for part in (departure.part, {"attn": "ln_1", "mlp": "ln_2"}[departure.part]))
    layer = EVERY if departure.kind in (DepartureKind.POST_NORM, DepartureKind.HEAD_COUNT) else departure.layer
    return (Place.at(layer, "" if departure.kind is DepartureKind.REPEATED else departure.part),)
