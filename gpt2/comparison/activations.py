"""Compare two models' activations on one text, at every recorded point, with one block of each in memory at a time."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from gpt2.errors import InputError
from gpt2.measure.metrics import Progress, cosine, max_abs, relative_error, silent
from gpt2.measure.tracing import Recorded, layer_of

Blocks = Callable[[Tensor], Iterator[Recorded]]  # ids (1, T) -> activations, one block at a time


@dataclass(frozen=True)
class ActivationChange:
    """The difference of b from a at one recorded point.

    ``error`` is the Frobenius norm of the difference over that of a; ``sqnr`` is the same in decibels (-20 log10), infinite if
    nothing differs. ``cosine`` is of the flattened activations.
    """

    point: str
    layer: int | None
    error: float
    max_abs: float
    sqnr: float
    cosine: float


@dataclass(frozen=True)
class Activations:
    """Every point in the order of computation, on ``tokens`` tokens of the text."""

    tokens: int
    threshold: float
    points: tuple[ActivationChange, ...]

    @property
    def first_past(self) -> ActivationChange | None:
        """The first point whose error is above the threshold."""
        return next((point for point in self.points if not point.error <= self.threshold), None)


def compare_activations(a: Blocks, b: Blocks, ids: Tensor, threshold: float, progress: Progress = silent) -> Activations:
    """Compare two models of one shape, given by the functions that trace them, over (1, T) ``ids``, block by block."""
    points, nothing = [], Recorded()
    for block_a, block_b in zip_longest(a(ids), b(ids), fillvalue=nothing):
        if not (block_a and block_b):
            raise InputError("activations: one model has more blocks than the other; compare two with the same number of layers")
        progress(f"activations: {next(reversed(block_a))}")
        points += [_change(name, block_a[name], block_b[name]) for name in block_a if name in block_b]
    return Activations(ids.numel(), threshold, tuple(points))


def _change(name: str, a: Tensor, b: Tensor) -> ActivationChange:
    if name == "logits":
        width = min(a.size(-1), b.size(-1))  # the vocabularies may be padded to different lengths
        a, b = a[..., :width], b[..., :width]
    if a.shape != b.shape:
        raise InputError(f"activations: {name} is {tuple(a.shape)} in one and {tuple(b.shape)} in the other; save it again")
    error = relative_error(b, a)
    sqnr = math.inf if error == 0 else -20 * math.log10(error) if math.isfinite(error) else -math.inf
    x, y = a.double().flatten(), b.double().flatten()
    angle = cosine(float(x @ y), float(x @ x), float(y @ y))
    return ActivationChange(name, layer_of(name), error, max_abs(a, b), sqnr, angle)
