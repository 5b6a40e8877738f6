"""Names of the faults in tests/support/faulty: the expected causes of each, and the point where it first shows.

A port's faults are one line: `gelu-erf rmsnorm@1.ln_2 scale-missing@0,2 eps-1e-6@f`. A word alone applies everywhere; `@1` in
block 1 only, `@1.ln_2` in one norm of it, `@f` in the final norm.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Meaning:
    """The meaning of a fault's name.

    ``ids`` are the causes that describe it, the best first. ``points`` are the places where the port may first differ, each a
    traced point or the beginning of one (`h.{}.attn` is any of `h.1.attn.q`, ...), `=` before it if it is the point itself and
    none of its parts; `{}` is the first block that has the fault. No points: the logits need not differ.
    """

    ids: tuple[str, ...]
    points: tuple[str, ...]
    first_layer: int = 0


def _mean(ids: str, *points: str | int) -> Meaning:
    shown = tuple(point for point in points if isinstance(point, str))
    return Meaning(tuple(ids.split()), shown, next((point for point in points if isinstance(point, int)), 0))


NORM = "norm"  # stands for the first norm that has the fault
_FOUND = tomllib.loads(Path(__file__).with_name("meanings.toml").read_text())
HARMLESS: dict[str, str] = _FOUND.pop("harmless")
MEANINGS = {name: _mean(*row) for name, row in _FOUND.items()}


class Faults:
    """The faults of a line, and their places."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.sites: dict[str, tuple[str, ...]] = {}
        for word in line.split():
            name, _, sites = word.partition("@")
            if name not in MEANINGS and name not in HARMLESS:
                raise KeyError(f"{name!r} is no fault that tests/support/faulty/meanings.toml knows")
            self.sites[name] = tuple(filter(None, sites.split(",")))

    def __contains__(self, name: str) -> bool:
        return name in self.sites

    def at(self, site: object) -> frozenset[str]:
        """The words that apply at a block (`1`), a norm (`1.ln_2`) or the final norm (`f`)."""
        held = (name for name, sites in self.sites.items() if not sites or any(_within(str(site), one) for one in sites))
        return frozenset(held)

    def layers(self, name: str, n_layer: int) -> list[int]:
        """The blocks that have a fault; [] if the line does not have it."""
        if name not in self.sites:
            return []
        sites = self.sites[name]
        return [int(site.split(".")[0]) for site in sites if site != "f"] if sites else list(range(n_layer))

    def points(self, name: str) -> tuple[str, ...]:
        """Points where a fault may first show."""
        sites, meaning = self.sites[name], MEANINGS[name]
        first = sites[0] if sites else str(meaning.first_layer)
        if first == "f":
            return ("ln_f",)
        layer, _, norm = first.partition(".")
        return tuple(f"h.{layer}.{norm or 'ln_1'}" if point == NORM else point.format(layer) for point in meaning.points)

    def first(self) -> tuple[str, ...]:
        """The points of the fault that comes first in the forward pass: the port may first differ there."""
        harmful = [name for name in self.sites if name in MEANINGS]
        shown = [(min(map(_rank, points)), points) for name in harmful if (points := self.points(name))]
        return min(shown)[1] if shown else ()


def matches(point: str, allowed: tuple[str, ...]) -> bool:
    """Whether a traced point is one of the allowed places."""
    return any(point == place[1:] if place[0] == "=" else point == place or point.startswith(place + ".") for place in allowed)


def _within(site: str, given: str) -> bool:
    return site == given or site.startswith(given + ".")


PARTS = ("ln_1", "attn", "attn.q", "attn.k", "attn.v", "attn.c_proj", "mid", "ln_2", "mlp")


def _rank(place: str) -> tuple[int, int]:
    """Order of computation of a place."""
    name = place.removeprefix("=")
    if name in ("wte", "wpe", "embed"):
        return -1, 0
    found = re.match(r"h\.(\d+)\.?(.*)", name)
    if found is None:
        return (0, 0) if name == "h" else (10_000, ["ln_f", "logits"].index(name))
    part = found[2]
    if not part:
        return int(found[1]), 99 if place[0] == "=" else 0
    return int(found[1]), PARTS.index(part)
