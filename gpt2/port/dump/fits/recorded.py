"""Find the arrays of a dump that are a stage's value, or that may be."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpt2.port.diagnosis.projecting import HEADS
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.weighing import GRID
from gpt2.port.diagnosis.wiring import STREAM
from gpt2.port.dump.fits.observed import Observed, laid
from gpt2.port.dump.pool import DumpPool
from gpt2.port.dump.simulation import Simulation
from gpt2.port.dump.tolerance import UNITS
from gpt2.port.recording.pool import Match

HEADED = ("attn.q", "attn.k", "attn.v", "attn.heads")  # streams that may be recorded by heads

LIKE = 0.5  # the least cosine of a value and GPT-2's


class Arrays:
    """The arrays of ``pool`` as values of stages; ``used``: the numbers of those that are known."""

    def __init__(self, pool: DumpPool, simulation: Simulation) -> None:
        self.pool, self.simulation, self.config, self.ids = pool, simulation, simulation.config, simulation.ids
        self.used: set[int] = set()
        self.by_heads = (*self.ids.shape, self.config.n_head, self.config.head_dim)

    def set_aside(self) -> None:
        """Note the arrays that hold GPT-2's own values of this run, which are never the result of a wrong operator."""
        for point, value in self.simulation.trace(self.simulation.base).items():
            if point in ("x", "end", "logits") or ".scores" in point:
                continue
            self.recorded(point.split(".", 2)[2] if point.count(".") > 1 else "", value)

    def recorded(self, stage: str, value: Tensor) -> Tensor | None:
        """Return the program's own numbers for a stage's value, if recorded; the arrays are known from then on."""
        match = self._match(stage, value)
        if match is None:
            return None
        self.used.update(*(self.pool.again(number) for number in match.entries))
        split = stage in HEADED
        own = self.pool.adopt(Layout.RIGHT.split(value, self.config.n_head) if split else value, match)
        return Layout.RIGHT.merge(own) if split else own

    def shows(self, stage: str, value: Tensor, but: int | None = None) -> bool:
        """Return whether a stage's value is recorded, in an array other than number ``but``."""
        match = self._match(stage, value)
        return match is not None and set(match.entries) != {but}

    def _match(self, stage: str, value: Tensor) -> Match | None:
        value = Layout.RIGHT.split(value, self.config.n_head) if stage in HEADED else value
        axes = HEADS if stage in HEADED or stage == "attn.mixed" else GRID if stage == "attn.weights" else STREAM
        return self.pool.find_at(stage, value, *axes) if bool(value.any()) else None

    def observed(self, stage: str, right: Tensor) -> Iterator[Observed]:
        """Yield the arrays that may be a stage's value, laid out like it, those most like GPT-2's value first."""
        shape = self.by_heads if right.ndim == 3 and right.shape[-1] == self.config.n_embd else right.shape
        found: list[tuple[float, int, Observed]] = []
        for number, entry in enumerate(self.pool.entries):
            if entry.numel() != right.numel() or number in self.used or not bool(entry.isfinite().all()):
                continue
            if entry.numel() > 1 and float(entry.min()) == float(entry.max()):  # nothing was computed
                continue
            unit, smallest = UNITS[self.pool.dtypes[number]]
            for value in laid(entry, shape):
                value = value.reshape(right.shape)
                likeness = float((value * right).sum() / (value.norm() * right.norm()).clamp(min=1e-300))
                slack = unit * value.abs() + smallest
                found.append((-abs(likeness), number, Observed(value, slack, self.pool.tolerance_at(stage), right, number)))
        found.sort(key=lambda one: one[:2])
        yield from (one for _, _, one in found)

    def likest(self, stage: str, right: Tensor) -> tuple[Tensor, float] | None:
        """Return a later block's value of a stage, if recorded, with its relative rounding; ``right`` is GPT-2's."""
        if (own := self.recorded(stage, right)) is not None:
            return own, 0.0
        seen = next(self.observed(stage, right), None)
        if seen is None or float(torch.cosine_similarity(seen.value.flatten(), right.flatten(), 0)) < LIKE:
            return None
        return seen.value, UNITS[self.pool.dtypes[seen.number]][0]

    def as_keys(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the arrays of the size of a block's keys, laid out as (B, T, D), under their names."""
        for number, entry in enumerate(self.pool.entries):
            for turn, value in enumerate(laid(entry, self.by_heads) if bool(entry.isfinite().all()) else (), 1):
                other = f", its axes in another order ({turn})" if turn > 1 else ""
                yield f"your {self.pool.names[number]}{other}", value.flatten(2)
