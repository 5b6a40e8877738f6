"""The trail of a walk: traced points with the port's own values, the faults met on the way, and where it was lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.tracing import point_at
from gpt2.port.diagnosis.hypotheses import Fault
from gpt2.port.diagnosis.places import OUTSIDE, Place
from gpt2.port.diagnosis.search import Choice, Kind, Option


class PlacedFault(NamedTuple):
    """A fault of the block that runs as number ``layer`` (None: outside the blocks), and the error of the match that shows it."""

    layer: int | None
    fault: Fault
    error: float | None

    @property
    def place(self) -> Place:
        return Place.at(self.layer, self.fault.part)


@dataclass
class Trail:
    """What a walk has met so far. ``own`` are the port's weights, ``narrow`` whether it computes in less than float64.

    ``values`` and ``errors`` are by traced point, the errors where the value is recorded. ``blocks`` are the numbers of the
    blocks whose weights were used, as they ran; ``factors`` what the scores of each are multiplied by. ``missed`` are the errors
    of GPT-2's formula where the port follows another. ``lost`` are points where the port computes something unknown.
    ``reached``: the walk arrived at the port's logits.
    """

    config: GPT2Config
    ids: Tensor
    own: dict[str, Tensor]
    narrow: bool
    values: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    faults: list[PlacedFault] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    factors: dict[int, float] = field(default_factory=dict)
    missed: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    reached: bool = False

    def keep(self, point: str, value: Tensor, error: float | None) -> None:
        self.values[point] = value
        if error is not None:
            self.errors[point] = error

    def blame(self, layer: int | None, faults: tuple[Fault, ...] | list[Fault], error: float | None) -> None:
        self.faults += [PlacedFault(layer, fault, error) for fault in faults]

    def settle(self, layer: int | None, choice: Choice[Any], part: str) -> None:
        """Take a choice at ``part`` of a block, and all options that it is computed from, as what the port does."""
        point = point_at(layer, part)
        self.keep(point, choice.value, choice.error)
        if choice.missed is not None:
            self.missed[point] = choice.missed
        self._settle_option(layer, choice.option, choice.error)
        option = choice.option.base
        if option is None:
            return
        before = layer
        if part == "ln_1":  # the stream that enters was made by the block before
            before = layer - 1 if layer else None
        source = "mid" if part == "ln_2" else "embed" if before is None else ""
        point = point_at(before, source)
        if option.kind is not Kind.PARALLEL:
            self.keep(point, option.value, None)
        while option is not None:
            self._settle_option(before, option, None)
            option = option.base

    def _settle_option(self, layer: int | None, option: Option, error: float | None) -> None:
        self.blame(layer, option.faults, error)
        for part, value in option.values.items():
            whole = value.expand(len(self.ids), *value.shape[1:]) if part in OUTSIDE else value
            self.keep(point_at(layer, part), whole, error)
