"""Measure how far a right program's numbers may be from ours: by computing in float32, and by how its dump stores them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.checkpoint.checkpoint import model_with
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import trace
from gpt2.model import GPT2

SLACK = 16  # a program's sums in float32 may round this many times as much as torch's
FLOOR = 1e-9  # for programs that compute in float64: their constants, and their softmax
# The largest relative error of rounding to a dtype, and the absolute one near zero (half of the smallest number).
UNITS = {
    torch.float64: (2.0**-53, 0.0),
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-134),
}
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Tolerance:
    """The allowed error of values computed in ``dtype``, by traced point, relative to the root mean square there.

    The rounding of storage is not in it: see :func:`excess`.
    """

    dtype: torch.dtype
    points: dict[str, float]

    @property
    def worst(self) -> float:
        """The allowed error where nothing is known about the place."""
        return max(self.points.values())


def measured(reference: GPT2, ids: Tensor, exact: dict[str, Tensor], dtype: torch.dtype) -> Tolerance:
    """Measure our model's rounding in ``dtype`` on ``ids`` (B, T); ``exact`` is the trace of ``reference``, in float64."""
    if dtype == torch.float64:
        return Tolerance(dtype, dict.fromkeys(exact, FLOOR))
    model = model_with(reference.config, ((name, value.to(dtype)) for name, value in reference.state_dict().items()))
    rounded = trace(model.eval(), ids)
    errors = {point: worst_relative_error(rounded[point], value) for point, value in exact.items()}
    least = 4 * UNITS[dtype][0]
    running, allowed = least, {}
    for point, error in errors.items():  # what one place rounds away, the next ones inherit
        running = max(running, error)
        allowed[point] = SLACK * max(error, least, running / 4)
    return Tolerance(dtype, allowed)


def excess(stored: Tensor, value: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error of ``stored`` beyond rounding to ``dtype``, relative to the root mean square of ``value``.

    Both float64 and of one shape, perhaps sorted: rounding keeps the order, so the same bound holds. NaN and infinity match
    themselves.
    """
    unit, smallest = UNITS[dtype]
    kept = value.isfinite() & stored.isfinite()
    if not bool(kept.all()):
        same = (value == stored) | (value.isnan() & stored.isnan())
        if not bool((kept | same).all()) or not bool(kept.any()):
            return float("inf")
        stored, value = stored[kept], value[kept]
    if not value.numel():
        return 0.0
    over = ((stored - value).abs() - unit * value.abs() - smallest).max().clamp(min=0.0)
    return float(over / value.square().mean().sqrt().clamp(min=1e-300))
