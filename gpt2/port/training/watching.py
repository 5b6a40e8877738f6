"""Watch one call of a training step: gradients of the logits, each backward pass, and each update of the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from gpt2.errors import InputError
from gpt2.port.recording.dispatch import RANDOM, Call, DeterministicMode, tensors
from gpt2.port.recording.forward import logits_of

SAMPLE = 4096  # entries of each parameter that are kept; all of them in a small model
HALVES = (torch.float16, torch.bfloat16)
LOSSES = {"_log_softmax", "_softmax", "logsumexp", "exp", "nll_loss_forward"}
HANDLED = {"_to_copy", "native_dropout", "bernoulli", "bernoulli_", *RANDOM}
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
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
    """Which entries of each parameter are kept: all, or a fixed sample that includes those with the largest gradient."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        generator = torch.Generator().manual_seed(0)
        self.indices: dict[str, Tensor | None] = {}
        for name, parameter in parameters.items():
            count = parameter.numel()
            self.indices[name] = torch.randint(count, (SAMPLE,), generator=generator) if count > SAMPLE else None

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return the sampled entries of a tensor of this parameter's shape, as a float64 copy."""
        index = self.indices[name]
        flat = tensor.detach().reshape(-1)
        return flat.cpu().double().clone() if index is None else flat[index.to(flat.device)].cpu().double()

    def values(self) -> Samples:
        return {name: self.take(name, parameter) for name, parameter in self.parameters.items()}

    def add(self, gradient: Gradient, name: str, tensor: Tensor) -> None:
        """Write a parameter's gradient into ``gradient``."""
        tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        gradient.samples[name] = self.take(name, tensor)
        gradient.two[name] = float(torch.linalg.vector_norm(tensor, dtype=torch.float64 if tensor.dtype.itemsize < 8 else None))
        gradient.one[name] = float(tensor.abs().sum(dtype=torch.float64))
        gradient.largest[name] = float(tensor.abs().max()) if tensor.numel() else 0.0

    def gradients(self) -> Gradient:
        gradient = Gradient()
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.add(gradient, name, parameter.grad)
        return gradient


class Casts(Enum):
    """Which casts from float64 to narrower dtypes are carried out: a few programs need some of them to run."""

    NONE = "none"
    SCALARS = "scalars"  # of single numbers, as a GradScaler needs
    ALL = "all"


class StepMode(DeterministicMode):
    """As :class:`DeterministicMode`, for a training step; ``probabilities``: of the dropouts that are active.

    ``halved``: the shapes of the float64 tensors that the step casts to half precision.
    """

    def __init__(self, casts: Casts = Casts.NONE, *, keep_random: bool = False) -> None:
        super().__init__(keep_casts=casts is Casts.ALL, keep_random=keep_random)
        self.keeps_scalars = casts is Casts.SCALARS
        self.probabilities: set[float] = set()
        self.halved: list[tuple[int, ...]] = []

    def handle(self, call: Call) -> Any:
        name = call.name
        if name not in HANDLED and self._mask is None:
            return call.run()
        if name == "native_dropout" and call.args[2] is not False and call.args[1] > 0:
            self.probabilities.add(round(float(call.args[1]), 9))
        keep = call.named.get("p") if name in ("bernoulli_", "bernoulli") else None
        if isinstance(keep, float) and 0 < keep < 1:
            self.probabilities.add(round(1 - keep, 9))
        if name == "_to_copy" and call.args[0].dtype == torch.float64:
            if call.named.get("dtype") in HALVES:
                self.halved.append(tuple(call.args[0].shape))
            if self.keeps_scalars and call.args[0].numel() == 1:
                return call.run()
        result = super().handle(call)
        self.dropouts.clear()
        return result


class Watch(StepMode):
    """While entered, notes writes to the module's parameters; with its hooks, all of :class:`Watched`."""

    def __init__(
        self, module: nn.Module, sampler: Sampler, seen: Watched, casts: Casts, vocabulary: int, *, keep_random: bool = False
    ) -> None:
        super().__init__(casts, keep_random=keep_random)
        self.module, self.sampler, self.vocabulary = module, sampler, vocabulary
        self.seen = seen
        self._names = {p.untyped_storage()._cdata: name for name, p in sampler.parameters.items()}
        self._fired: set[str] = set()
        self._open: Update | None = None

    def __enter__(self) -> Watch:
        self._handles: list[RemovableHandle] = [self.module.register_forward_hook(self._forward, with_kwargs=True)]
        for name, parameter in self.sampler.parameters.items():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._arrival(name)))
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._holding(name)))
        self._start = self.sampler.values()
        self.seen.start = self.sampler.gradients()
        self.seen.trains = {name for name, parameter in self.sampler.parameters.items() if parameter.requires_grad}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._close()
        if not self.seen.updates:  # parameters that were exchanged, not written to
            after = self.sampler.values()
            if any(not torch.equal(after[name], value) for name, value in self._start.items()):
                gradient = self.seen.backwards[-1].held if self.seen.backwards else Gradient()
                left = self.sampler.gradients()
                gradient = left if left.total > 0 else gradient
                update = Update(self._start, after, gradient, len(self.seen.backwards))
                self.seen.updates.append(update)

    def handle(self, call: Call) -> Any:
        if call.name == UNSCALE:
            self.seen.unscaled *= float(call.args[2])
        if call.writes:
            names = [name for tensor in _written(call) if (name := self._name(tensor))]
            if names:
                self._note(names)
        if call.name in LOSSES and call.inputs and call.inputs[0].dtype in HALVES and self._is_wide(call.inputs[0]):
            self.seen.half = True
        return super().handle(call)

    def _is_wide(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and any(tensor.shape[-1] == one.logits.shape[-1] for one in self.seen.forwards[-1:])

    def _name(self, tensor: Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage()._cdata)

    def _note(self, names: Iterable[str]) -> None:
        """Note the parameters' values and gradients before their first write since the last backward pass."""
        if self._open is None:
            self._open = Update(backwards=len(self.seen.backwards))
        for name in names:
            if name not in self._open.before:
                parameter = self.sampler.parameters[name]
                self._open.before[name] = self.sampler.take(name, parameter)
                if parameter.grad is not None:
                    self.sampler.add(self._open.gradient, name, parameter.grad)

    def _close(self) -> None:
        if self._open is not None:
            now = self.sampler.values()
            self._open.after = now
            self._open.before = {**now, **self._open.before}
            self.seen.updates.append(self._open)
            self._open = None

    def _backward(self, name: str, kind: str) -> Backward:
        """Return the backward pass that this hook belongs to: a new one if this parameter's hook has been called in the last."""
        updated = self._open is not None
        self._close()
        key = f"{kind} {name}"
        if not self.seen.backwards or updated or (kind == "arrived" and key in self._fired):
            self.seen.backwards.append(Backward())
            self._fired = set()
        self._fired.add(key)
        return self.seen.backwards[-1]

    def _arrival(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            with torch.no_grad():
                self.sampler.add(self._backward(name, "arrived").arrived, name, gradient)

        return hook

    def _holding(self, name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            with torch.no_grad():
                if parameter.grad is not None:
                    self.sampler.add(self._backward(name, "held").held, name, parameter.grad)

        return hook

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = next((t for t in tensors((args, kwargs)) if not t.is_floating_point() and t.ndim == 2), None)
        if ids is None:
            return
        try:
            logits = logits_of(output, ids, self.vocabulary)
        except ValueError:
            return
        if is_functorch_wrapped_tensor(logits):  # its gradients reach no parameter that could be watched
            raise InputError(
                "its step takes gradients with torch.func, which cannot be watched; "
                "for the diagnosis compute them with loss.backward()"
            )
        named = getattr(output, "__dict__", None) or output
        returned = [t for t in tensors(dict(output) if isinstance(output, dict) else named) if t.data_ptr() == logits.data_ptr()]
        raw = next((t for t in returned if t.numel() == logits.numel()), logits)
        if not raw.requires_grad:
            return
        forward = Forward(ids.detach().clone(), logits.detach())
        self.seen.forwards.append(forward)

        def hook(gradient: Tensor) -> None:
            with torch.no_grad():
                kept = gradient.detach().clone().view(logits.shape)
                forward.gradient = kept if forward.gradient is None else forward.gradient + kept

        raw.register_hook(hook)


def _written(call: Call) -> list[Tensor]:
    """Return the tensors that an operator writes into."""
    named = call.named
    schema = call.func._schema.arguments
    changed = [named[a.name] for a in schema if a.alias_info is not None and a.alias_info.is_write and a.name in named]
    return tensors(changed)
