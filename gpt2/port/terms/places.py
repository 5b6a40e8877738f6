"""Places in a GPT-2: a block's number and a part of the block, or a part outside the blocks."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from gpt2.measure.tracing import OUTSIDE, layer_of, points

EVERY = -1  # in place of a block's number: all blocks


@dataclass(frozen=True)
class Place:
    """A traced point, a tensor of the checkpoint, or a block or part that contains them.

    ``layer``: a block's number, EVERY, or None outside. ``part``: the rest of the name ("ln_1", "attn.c_attn.weight"), "" for a
    whole block. ``share``: "q", "k" or "v" for a third of c_attn. ``others``: how many places of a long list are not named.
    """

    layer: int | None
    part: str
    share: str = ""
    others: int = 0

    @classmethod
    def at(cls, layer: int | None, part: str, share: str = "") -> "Place":
        """Return a part of a block; parts outside the blocks drop the layer."""
        return cls(None if part in OUTSIDE else layer, part, share)

    @classmethod
    def of(cls, name: str) -> "Place":
        """Return the place with the name of a traced point or of a tensor."""
        layer = layer_of(name)
        return cls(layer, name if layer is None else name.removeprefix(f"h.{layer}").removeprefix("."))

    @property
    def name(self) -> str:
        """The name of a traced point or tensor: ``h.0.ln_1``, ``h.*.attn``, ``wte``."""
        block = "" if self.layer is None else "h.*" if self.layer == EVERY else f"h.{self.layer}"
        return ".".join(filter(None, (block, self.part)))

    def __str__(self) -> str:
        share = f" ({self.share})" if self.share else ""
        return f"{self.name}{share}" + (f" and {self.others} more" if self.others else "")

    @property
    def stem(self) -> str:
        """The part without the leaf: equal for a weight and its bias."""
        return self.part.removesuffix(".weight").removesuffix(".bias")

    @property
    def pattern(self) -> "Place":
        return Place(None if self.layer is None else EVERY, self.part)

    def each(self, layers: int) -> "list[Place]":
        """Return this place in every block, if it stands for all."""
        return [replace(self, layer=layer) for layer in range(layers)] if self.layer == EVERY else [self]

    def contains(self, other: "Place") -> bool:
        """Return whether ``other`` is this place or a part of it, in the same block (EVERY matches all blocks)."""
        if self.layer != other.layer and (None in (self.layer, other.layer) or EVERY not in (self.layer, other.layer)):
            return False
        whole_block = not self.stem and self.layer is not None
        return whole_block or other.stem == self.stem or other.stem.startswith(f"{self.stem}.")

    def holds(self, name: str) -> bool:
        """Return whether the tensor ``name`` is at this place: that tensor alone, if the place is one."""
        tensor = Place.of(name)
        return self.contains(tensor) and (self.part == self.stem or self.part == tensor.part)


LISTED = 6  # places that a sentence names
ALL_WEIGHTS = Place(None, "all weights")


def joined(places: Iterable[Place]) -> str:
    return ", ".join(dict.fromkeys(map(str, places)))


def shortened(places: Iterable[Place], layers: int) -> tuple[Place, ...]:
    """Return places, one for all blocks; of many, the first few, the last of which says how many more there are."""
    found = collapsed(places, layers)
    rest = len(found) - LISTED
    return (*found[: LISTED - 1], replace(found[LISTED - 1], others=rest)) if rest > 0 else found


def listed(places: Iterable[Place], layers: int) -> str:
    """Return places in words, a star for all blocks; the first few, if there are many."""
    return joined(shortened(places, layers))


def collapsed(places: Iterable[Place], layers: int) -> tuple[Place, ...]:
    """Group places by part, in order of appearance; ``EVERY`` for a part that all ``layers`` blocks have."""
    parts: dict[Place, set[Place]] = {}
    for place in places:
        parts.setdefault(replace(place, layer=place.pattern.layer), set()).add(place)
    out: list[Place] = []
    for pattern, same in parts.items():
        every = pattern in same or len(same) == layers > 1
        out += [pattern] if every else sorted(same, key=lambda place: place.layer or 0)
    return tuple(out)


@cache
def forward_rank(place: Place, n_layer: int) -> int:
    """Return the number of the first traced point in or around a place; beyond all points if there is none."""
    place = replace(place, layer=0) if place.layer == EVERY else place
    if place.stem == "attn.c_attn":
        place = replace(place, part=f"attn.{place.share or 'q'}")
    order = [Place.of(point) for point in points(n_layer)]
    return next((number for number, point in enumerate(order) if place.contains(point) or point.contains(place)), len(order))
