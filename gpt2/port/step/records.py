"""What is seen of training steps: gradients, backward passes and updates, at a sample of the entries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

HALVES = (torch.float16, torch.bfloat16)
SAMPLE = 4096  # entries of each parameter that are kept; all of them in a small model
Samples = dict[str, Tensor]


class Sampled(NamedTuple):
    """One parameter's gradient: entries (n,), and norms of all of it: the Euclidean one, and the largest."""

    values: Tensor
    two: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, tensor: Tensor, values: Tensor | None = None) -> Sampled:
        """Return a tensor with its norms, without a copy of it; ``values``: the entries to keep, in place of all."""
        kept = tensor.reshape(-1) if values is None else values
        dtype = torch.float64 if tensor.dtype.itemsize < 8 else None
        orders = (2, math.inf) if tensor.numel() else ()
        return cls(kept, *(float(torch.linalg.vector_norm(tensor, order, dtype=dtype)) for order in orders))

    def plus(self, other: Sampled) -> Sampled:
        """Return the sum; its norms are those of the sampled entries, which are all in a small model."""
        return Sampled.of(self.values + other.values)

    def times(self, factor: float) -> Sampled:
        """Return the product with a positive number."""
        return Sampled(self.values * factor, factor * self.two, factor * self.largest)


class Gradient(dict[str, Sampled]):
    """A gradient of the parameters at one moment, by parameter."""

    @property
    def total(self) -> float:
        """The Euclidean norm over all parameters."""
        return math.hypot(*(one.two for one in self.values()))

    def plus(self, other: Gradient) -> Gradient:
        """Return the sum."""
        return Gradient({**self, **{n: self[n].plus(one) if n in self else one for n, one in other.items()}})


def total_norm(gradient: Mapping[str, Tensor]) -> float:
    """Return the norm of all gradients together."""
    return math.hypot(*(float(g.norm()) for g in gradient.values()))


class Backward(NamedTuple):
    """One backward pass: what arrived at each parameter, and ``.grad`` after it was added."""

    arrived: Gradient
    held: Gradient


@dataclass(frozen=True)
class Update:
    """One update of the parameters: their values before and after, and the gradient that it used.

    ``held``: the gradient after the last backward pass before it, where that is known too. ``backwards``: how many of this call
    come before it; ``call``: the number of the call in its session.
    """

    before: Samples = field(default_factory=dict)
    after: Samples = field(default_factory=dict)
    gradient: Gradient = field(default_factory=Gradient)
    held: Gradient = field(default_factory=Gradient)
    backwards: int = 0
    call: int = 0

    def moves(self, name: str) -> bool:
        """Whether a parameter changes."""
        return not torch.equal(self.before[name], self.after[name])

    @property
    def changes(self) -> bool:
        """Whether any parameter changes."""
        return any(map(self.moves, self.before))


@dataclass
class Forward:
    """One forward pass of the module: ids (b, T), logits (b, T, V), and the gradient of the logits that training computed."""

    ids: Tensor
    logits: Tensor
    gradient: Tensor | None = None


@dataclass
class Watched:
    """What was seen in one call of a step."""

    loss: float = math.nan
    start: Gradient = field(default_factory=Gradient)  # ``.grad`` as the call before left it
    trains: set[str] = field(default_factory=set)  # the parameters that require gradients
    forwards: list[Forward] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    unscaled: float = 1.0  # what a GradScaler multiplied the gradients by
    by_hand: set[str] = field(default_factory=set)  # ``torch.autograd.Function``s whose backward pass somebody wrote
    rounds: float = 0.0  # the relative rounding of the numbers that are computed, beyond float64's
    half: bool = False  # the loss was computed from logits in half precision
    dropouts: set[float] = field(default_factory=set)

    @property
    def first_backwards(self) -> list[Backward]:
        """The backward passes before the first update: all of them, as a rule."""
        return self.backwards[: self.updates[0].backwards] if len(self.updates) > 1 else self.backwards

    @property
    def changes(self) -> bool:
        """Whether any parameter changes."""
        return any(update.changes for update in self.updates)

    def arrived(self) -> Samples:
        """Return the sum of what arrived at each parameter before the first update."""
        arrived = reduce(Gradient.plus, (one.arrived for one in self.first_backwards), Gradient())
        return {name: one.values for name, one in arrived.items()}


def updates_of(calls: Sequence[Watched]) -> list[Update]:
    """Return all updates of some calls, each with the gradient that it used: ``.grad``, or else the sum of what arrived."""
    found = []
    for number, call in enumerate(calls):
        done = 0
        for one in call.updates:
            passes, done = call.backwards[done : one.backwards], one.backwards
            if passes and not one.gradient:  # .grad is emptied before the update, or never filled
                used = one.held or reduce(Gradient.plus, (backward.arrived for backward in passes))
                one = replace(one, gradient=used, held=Gradient())
            found.append(replace(one, call=number))
    return found


class Sampler:
    """Which entries of each parameter are kept: all, or a fixed sample, which is the same for parameters of one size."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.indices: dict[str, Tensor | slice] = {}
        for name, parameter in parameters.items():
            count = parameter.numel()
            generator = torch.Generator().manual_seed(count)
            self.indices[name] = torch.randint(count, (SAMPLE,), generator=generator) if count > SAMPLE else slice(None)

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return the sampled entries of a tensor of this parameter's shape, as a float64 copy."""
        index, flat = self.indices[name], tensor.detach().reshape(-1)
        taken = flat[index if isinstance(index, slice) else index.to(flat.device)]
        return taken.to("cpu", torch.float64, copy=True)

    def values(self) -> Samples:
        return {name: self.take(name, parameter) for name, parameter in self.parameters.items()}

    def gradient(self, name: str, tensor: Tensor) -> Sampled:
        """Return what is kept of a parameter's gradient."""
        tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        return Sampled.of(tensor, self.take(name, tensor))

    def gradients(self) -> Gradient:
        found = ((name, p.grad) for name, p in self.parameters.items())
        return Gradient({name: self.gradient(name, grad) for name, grad in found if grad is not None})
