"""How far a right program's numbers may be from ours: by what rounding explains, and by how its dump stores them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.rounding import WORST_RATIO, explained_errors, rounded_weights, rounding_noise
from gpt2.measure.tracing import part_of, point_at, trace
from gpt2.model import GPT2

SLACK = WORST_RATIO  # times what rounding explains
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
    """The allowed errors of values computed in ``dtype``, relative to the root mean square.

    ``points``: at each traced point, all rounding since the embeddings included. ``stages``: within one block, by part of
    a block or point outside. The rounding of storage is in neither: see :func:`excess`. ``explained`` gives the points, which a
    walk through a module seldom needs.
    """

    dtype: torch.dtype
    explained: Callable[[], dict[str, float]]
    stages: dict[str, float]

    @cached_property
    def points(self) -> dict[str, float]:
        return self.explained()


def measured(reference: GPT2, ids: Tensor, exact: dict[str, Tensor], dtype: torch.dtype) -> Tolerance:
    """Compute what rounding to ``dtype`` explains on ``ids`` (B, T); ``exact`` is the trace of ``reference``, in float64."""
    if dtype == torch.float64:
        return Tolerance(dtype, lambda: dict.fromkeys(exact, FLOOR), {part_of(point): FLOOR for point in exact})
    least = 4 * UNITS[dtype][0]

    def allowed() -> dict[str, float]:
        explained = explained_errors(reference, ids, dtype, exact)
        return {point: SLACK * max(error, least) for point, error in explained.items()}

    model, last = rounded_weights(reference, dtype), exact[point_at(len(reference.h) - 1, "")]
    for layer, block in enumerate(model.h):  # from here on, each block takes the exact stream
        stream = exact["embed" if layer == 0 else point_at(layer - 1, "")].to(dtype).double()
        block.register_forward_pre_hook(lambda _, args, stream=stream: (stream, *args[1:]))
    model.ln_f.register_forward_pre_hook(lambda *_: last.to(dtype).double())  # a hook that holds the model would keep it
    with rounding_noise(dtype, seed=1):
        alone = trace(model, ids)
    stages: dict[str, float] = {}
    for point, value in exact.items():
        error = SLACK * max(worst_relative_error(alone[point], value), least)
        stages[part_of(point)] = max(error, stages.get(part_of(point), 0.0))
    return Tolerance(dtype, allowed, stages)


def excess(stored: Tensor, value: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error of ``stored`` beyond rounding to ``dtype``, relative to the root mean square of ``value``.

    Both float64 and of one shape, perhaps sorted: rounding keeps the order. NaN and infinity match themselves.
    """
    unit, smallest = UNITS[dtype]
    if not value.numel():
        return 0.0
    over = ((stored - value).abs() - unit * value.abs() - smallest).max()
    if not over.isfinite():  # some number is not
        kept = value.isfinite() & stored.isfinite()
        same = (value == stored) | (value.isnan() & stored.isnan())
        alike = bool((kept | same).all() & kept.any()) and not bool(kept.all())
        return excess(stored[kept], value[kept], dtype) if alike else float("inf")
    return float(over.clamp(min=0.0) / value.square().mean().sqrt().clamp(min=1e-300))


def stored(value: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error of rounding the finite numbers of a value to ``dtype``, relative to their root mean square."""
    unit, smallest = UNITS[dtype]
    kept = value[value.isfinite()]
    if not kept.numel():
        return 0.0
    return (unit * float(kept.abs().max()) + smallest) / max(float(kept.square().mean().sqrt()), 1e-300)
