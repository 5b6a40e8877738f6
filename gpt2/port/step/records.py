"""What is seen of one call of a training step: gradients, backward passes and updates, at a sample of the entries."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

SAMPLE = 4096  # entries of each parameter that are kept; all of them in a small model
Samples = dict[str, Tensor]


@dataclass
class Gradient:
    """A gradient of the parameters at one moment: the sampled entries by parameter, and norms of the whole."""

    samples: Samples = field(default_factory=dict)
    two: dict[str, float] = field(default_factory=dict)
    one: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The Euclidean norm over all parameters."""
        return sum(value**2 for value in self.two.values()) ** 0.5

    def plus(self, other: Gradient) -> Gradient:
        """Return the sum; its norms are those of the sampled entries, which are all in a small model."""
        total = Gradient(dict(self.samples), dict(self.two), dict(self.one), dict(self.largest))
        for name, sample in other.samples.items():
            if name not in total.samples:
                total.set(name, sample, other.two[name], other.one[name], other.largest[name])
                continue
            both = total.samples[name] + sample
            total.set(name, both, float(both.norm()), float(both.abs().sum()), float(both.abs().max()))
        return total

    def times(self, factor: float) -> Gradient:
        """Return the gradient multiplied by a positive number."""
        samples = {name: sample * factor for name, sample in self.samples.items()}
        norms = ({name: value * factor for name, value in norm.items()} for norm in (self.two, self.one, self.largest))
        return Gradient(samples, *norms)

    def only(self, name: str) -> Gradient:
        """Return the gradient of one parameter; nothing, if it has none."""
        found = Gradient()
        if name in self.samples:
            found.set(name, self.samples[name], self.two[name], self.one[name], self.largest[name])
        return found

    def remove(self, name: str) -> None:
        """Remove a parameter's gradient, if it has one."""
        for values in (self.samples, self.two, self.one, self.largest):
            values.pop(name, None)

    def set(self, name: str, samples: Tensor, two: float, one: float, largest: float) -> None:
        """Write the samples and norms of one parameter."""
        self.samples[name], self.two[name], self.one[name], self.largest[name] = samples, two, one, largest


@dataclass
class Backward:
    """One backward pass: what arrived at each parameter, and ``.grad`` after it was added."""

    arrived: Gradient = field(default_factory=Gradient)
    held: Gradient = field(default_factory=Gradient)


@dataclass
class Update:
    """One update of the parameters: their values before and after, and ``.grad`` as it was at the first write."""

    before: Samples = field(default_factory=dict)
    after: Samples = field(default_factory=dict)
    gradient: Gradient = field(default_factory=Gradient)
    backwards: int = 0  # backward passes of this call before it
    call: int = 0  # the number of the call in its session
    summed: int = 0  # the backward passes whose gradients were added up here, because ``.grad`` does not hold them


@dataclass
class Forward:
    """One forward pass of the module: ids (b, T), logits (b, T, V), and the gradient of the logits that training computed."""

    ids: Tensor
    logits: Tensor
    gradient: Tensor | None = None


@dataclass
class Watched:
    """What was seen in one call of a step on ``x`` and ``y`` (B, T)."""

    x: Tensor
    y: Tensor
    loss: float = float("nan")
    start: Gradient = field(default_factory=Gradient)  # ``.grad`` as the call before left it
    trains: set[str] = field(default_factory=set)  # the parameters that require gradients
    forwards: list[Forward] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    unscaled: float = 1.0  # what a GradScaler multiplied the gradients by
    half: bool = False  # the loss was computed from logits in half precision
    dropouts: set[float] = field(default_factory=set)


class Sampler:
    """Which entries of each parameter are kept: all, or a fixed sample, which is the same for parameters of one size."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.indices: dict[str, Tensor | None] = {}
        for name, parameter in parameters.items():
            count = parameter.numel()
            generator = torch.Generator().manual_seed(count)
            self.indices[name] = torch.randint(count, (SAMPLE,), generator=generator) if count > SAMPLE else None

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return the sampled entries of a tensor of this parameter's shape, as a float64 copy."""
        index = self.indices[name]
        flat = tensor.detach().reshape(-1)
        return flat.cpu().double().clone() if index is None else flat[index.to(flat.device)].cpu().double()

    def values(self) -> Samples:
        return {name: self.take(name, parameter) for name, parameter in self.parameters.items()}

    def add(self, gradient: Gradient, name: str, tensor: Tensor) -> None:
        """Write a parameter's gradient into ``gradient``; its norms are taken without a copy of it."""
        tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        dtype = torch.float64 if tensor.dtype.itemsize < 8 else None
        two, one = (float(torch.linalg.vector_norm(tensor, order, dtype=dtype)) for order in (2, 1))
        low, high = tensor.aminmax() if tensor.numel() else (0.0, 0.0)
        gradient.set(name, self.take(name, tensor), two, one, max(-float(low), float(high)))

    def gradients(self) -> Gradient:
        gradient = Gradient()
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.add(gradient, name, parameter.grad)
        return gradient
