"""What the search for an optimizer's rule looks at: the updates of some parameters, with the errors that rounding makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpt2.port.step.clipping import Clip, Norms, clipped
from gpt2.port.step.records import Update
from gpt2.port.step.rules import Track

ENTRIES = 256  # entries of each parameter that are compared, where they are rounded


@dataclass(frozen=True)
class Rounding:
    """The errors of a dump's numbers: of parameters, relative; of gradients, absolute by parameter, and relative."""

    parameters: float
    gradients: Mapping[str, float]
    relative: float

    def doubts(self, name: str, gradient: Tensor) -> Tensor:
        """Return the largest relative errors (n,) of gradients (K, n)."""
        return (self.gradients[name] / gradient.abs().clamp(min=1e-300) + self.relative).amax(0)


@dataclass(frozen=True)
class Run:
    """One session's updates: a track for each parameter, and the norms of the gradients that it used."""

    tracks: Mapping[str, Track]
    norms: Norms

    @classmethod
    def of(cls, updates: Sequence[Update], names: Sequence[str], norms: Norms, rounding: Rounding | None = None) -> Run:
        """Return the tracks of some parameters that have one."""
        tracks = (track_of(updates, name, name in norms.large, rounding) for name in names)
        return cls({track.name: track for track in tracks if track is not None}, norms)

    @property
    def moving(self) -> list[str]:
        """The parameters that change, and have a gradient."""
        return [name for name, one in self.tracks.items() if bool((one.change != 0).any()) and bool(one.seen.any())]

    def clipped(self, clip: Clip | None, names: Sequence[str]) -> list[Track]:
        """Return the tracks of some parameters with gradients as clipping makes them."""
        return [clipped(self.tracks[name], clip, self.norms) for name in names if name in self.tracks]


def track_of(updates: Sequence[Update], name: str, large: bool, rounding: Rounding | None = None) -> Track | None:
    """Return a parameter's track; with ``rounding``, at entries whose gradients are known well enough, None if there are none.

    ``large``: a matrix or an embedding.
    """
    seen = [name in one.gradient for one in updates]
    gradients = (one.gradient[name].values if name in one.gradient else 0.0 * one.before[name].reshape(-1) for one in updates)
    gradient = torch.stack(list(gradients))
    keep: Tensor | slice = slice(None)
    if rounding is not None:
        doubts = rounding.doubts(name, gradient)
        keep = torch.nonzero(doubts < 0.05)[:, 0]
        if not len(keep) or not all(seen):
            return None
        if len(keep) > ENTRIES:
            order = keep[gradient[0, keep].abs().argsort()]
            keep = order[torch.linspace(0, len(order) - 1, ENTRIES).round().long()]
    sides = ([getattr(one, side)[name].reshape(-1)[keep] for one in updates] for side in ("before", "after"))
    before, after = map(torch.stack, sides)
    change, noise = after - before, None
    if rounding is not None:
        size = torch.maximum(change.abs().median(1, keepdim=True).values, change.abs())
        noise = (rounding.parameters * (before.abs() + after.abs()) + (doubts[keep] + 1e-9) * size + 1e-30).numpy()
    values, small = (before.numpy(), gradient[:, keep].numpy(), change.numpy()), rounding is not None and not large
    return Track(name, *values, np.array(seen), noise, small, tuple(one.call for one in updates))
