"""What is seen of training steps: gradients, backward passes and updates, at a sample of the entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

SAMPLE = 4096  # entries of each parameter that are kept; all of them in a small model
Samples = dict[str, Tensor]


class Sizes(NamedTuple):
    """Norms of one parameter's gradient: the Euclidean one, the sum of absolute values, and the largest of them."""

    two: float
    one: float
    largest: float

    @classmethod
    def of(cls, tensor: Tensor) -> Sizes:
        """Return the norms of a tensor, without a copy of it."""
        if not tensor.numel():
            return cls(0.0, 0.0, 0.0)
        dtype = torch.float64 if tensor.dtype.itemsize < 8 else None
        two, one = (float(torch.linalg.vector_norm(tensor, order, dtype=dtype)) for order in (2, 1))
        low, high = tensor.aminmax()
        return cls(two, one, max(-float(low), float(high)))

    def times(self, factor: float) -> Sizes:
        return Sizes(*(factor * size for size in self))


@dataclass
class Gradient:
    """A gradient of the parameters at one moment: by parameter, the sampled entries, and the norms of all of them."""

    samples: Samples = field(default_factory=dict)
    sizes: dict[str, Sizes] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Gradient:
        """Return a gradient of which every entry is kept."""
        return cls({name: t.reshape(-1) for name, t in tensors.items()}, {name: Sizes.of(t) for name, t in tensors.items()})

    @property
    def total(self) -> float:
        """The Euclidean norm over all parameters."""
        return sum(size.two**2 for size in self.sizes.values()) ** 0.5

    def add(self, name: str, sample: Tensor, sizes: Sizes) -> None:
        """Add to one parameter's gradient; a sum's norms are those of the sampled entries, which are all in a small model."""
        if name in self.samples:
            sample = self.samples[name] + sample
            sizes = Sizes.of(sample)
        self.samples[name], self.sizes[name] = sample, sizes

    def plus(self, other: Gradient) -> Gradient:
        """Return the sum."""
        total = Gradient(dict(self.samples), dict(self.sizes))
        for name, sample in other.samples.items():
            total.add(name, sample, other.sizes[name])
        return total

    def times(self, factor: float) -> Gradient:
        """Return the gradient multiplied by a positive number."""
        sizes = {name: size.times(factor) for name, size in self.sizes.items()}
        return Gradient({name: sample * factor for name, sample in self.samples.items()}, sizes)

    def remove(self, name: str) -> None:
        """Remove a parameter's gradient, if it has one."""
        self.samples.pop(name, None)
        self.sizes.pop(name, None)


@dataclass
class Backward:
    """One backward pass: what arrived at each parameter, and ``.grad`` after it was added."""

    arrived: Gradient = field(default_factory=Gradient)
    held: Gradient = field(default_factory=Gradient)


@dataclass
class Update:
    """One update of the parameters: their values before and after, and the gradient that it used.

    ``held``: the gradient after the last backward pass before it, where that is known too. ``backwards``: how many of this call
    come before it; ``call``: the number of the call in its session. ``summed``: the backward passes whose gradients were added up
    here, because ``.grad`` does not hold them.
    """

    before: Samples = field(default_factory=dict)
    after: Samples = field(default_factory=dict)
    gradient: Gradient = field(default_factory=Gradient)
    held: Gradient = field(default_factory=Gradient)
    backwards: int = 0
    call: int = 0
    summed: int = 0

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

    loss: float = float("nan")
    start: Gradient = field(default_factory=Gradient)  # ``.grad`` as the call before left it
    trains: set[str] = field(default_factory=set)  # the parameters that require gradients
    forwards: list[Forward] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    unscaled: float = 1.0  # what a GradScaler multiplied the gradients by
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
        return reduce(Gradient.plus, (one.arrived for one in self.first_backwards), Gradient()).samples


def updates_of(calls: Sequence[Watched]) -> list[Update]:
    """Return all updates of some calls, each with the gradient that it used: ``.grad``, or else the sum of what arrived."""
    for number, call in enumerate(calls):
        done = 0
        for update in call.updates:
            update.call, passes, done = number, call.backwards[done : update.backwards], update.backwards
            if not update.gradient.samples and passes:
                update.gradient, update.held = update.held, Gradient()
                if not update.gradient.samples:
                    update.summed = len(passes)
                    update.gradient = reduce(Gradient.plus, (one.arrived for one in passes))
    return [update for call in calls for update in call.updates]


class Sampler:
    """Which entries of each parameter are kept: all, or a fixed sample, which is the same for parameters of one size."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.indices: dict[str, Tensor | slice] = {}
        for name, parameter in parameters.items():
            count = parameter.numel()
            generator = torch.Generator().manual_seed(count)
            self.indices[name] = torch.randint(count, (SAMPLE,), generator=generator) if count > SAMPLE else slice(None)

    def whole(self, name: str) -> bool:
        """Whether every entry of a parameter is kept."""
        return isinstance(self.indices[name], slice)

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return the sampled entries of a tensor of this parameter's shape, as a float64 copy."""
        index, flat = self.indices[name], tensor.detach().reshape(-1)
        taken = flat[index if isinstance(index, slice) else index.to(flat.device)]
        return taken.to("cpu", torch.float64, copy=True)

    def values(self) -> Samples:
        return {name: self.take(name, parameter) for name, parameter in self.parameters.items()}

    def write(self, gradient: Gradient, name: str, tensor: Tensor) -> None:
        """Write a parameter's gradient into ``gradient``."""
        tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        gradient.samples[name], gradient.sizes[name] = self.take(name, tensor), Sizes.of(tensor)

    def gradients(self) -> Gradient:
        gradient = Gradient()
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.write(gradient, name, parameter.grad)
        return gradient
