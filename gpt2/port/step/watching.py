"""Watch a training step: gradients of the logits, each backward pass, and each update, at a sample of the parameters' entries."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gpt2.errors import InputError
from gpt2.measure.metrics import relative_error
from gpt2.measure.user_code import logits_of
from gpt2.port.recording.dispatch import NORMAL, RANDOM, DeterministicMode, OperatorCall, OperatorMode, tensors

HALVES = (torch.float16, torch.bfloat16)
SAMPLE = 4096  # entries of each parameter that are kept; all of them in a small model
LOSSES = {"_log_softmax", "_softmax", "logsumexp", "exp", "nll_loss_forward"}
LOOKED_AT = {*LOSSES, *RANDOM, "native_dropout", "bernoulli", "_to_copy"}  # operators that write nothing, and matter
PADDING = 128  # columns that are added to the vocabulary, at most
Samples = dict[str, Tensor]


class Sampled(NamedTuple):
    """One parameter's gradient: entries (n,), and the Euclidean and the largest norm, of those that are not kept too."""

    values: Tensor
    two: float
    largest: float

    @classmethod
    def of(cls, values: Tensor, whole: Tensor) -> "Sampled":
        dtype = torch.float64 if whole.dtype.itemsize < 8 else None
        norms = (float(torch.linalg.vector_norm(whole, n, dtype=dtype)) if len(values) else 0.0 for n in (2, math.inf))
        return cls(values, *norms)

    def times(self, factor: float) -> "Sampled":
        return Sampled(factor * self.values, factor * self.two, factor * self.largest)


class Gradient(dict[str, Sampled]):
    """A gradient of the parameters at one moment, by parameter."""

    @property
    def total(self) -> float:
        """The Euclidean norm over all parameters."""
        return math.hypot(*(one.two for one in self.values()))

    def times(self, factor: float) -> "Gradient":
        return Gradient({name: one.times(factor) for name, one in self.items()})

    def follows(self, other: "Gradient") -> bool:
        """Return whether each parameter's is a multiple of the other's."""
        pairs = [(one.values, other[name].values) for name, one in self.items() if name in other]
        return bool(pairs) and all(float(a @ b) ** 2 >= (1 - 1e-9) * float(a @ a) * float(b @ b) for a, b in pairs)


def summed(gradients: Iterable[Gradient]) -> Gradient:
    """Return the sum; where several are added, its norms are those of the sampled entries, which are all in a small model."""
    found = Gradient()
    for name, one in (pair for gradient in gradients for pair in gradient.items()):
        found[name] = Sampled.of(*[found[name].values + one.values] * 2) if name in found else one
    return found


@dataclass(frozen=True)
class Update:
    """One update: values before and after, the gradient that it used, and ``held``: ``.grad`` after the last of ``backwards``."""

    before: Samples = field(default_factory=dict)
    after: Samples = field(default_factory=dict)
    gradient: Gradient = field(default_factory=Gradient)
    held: Gradient = field(default_factory=Gradient)
    backwards: int = 0
    scale: float = 1.0  # what a GradScaler divided its gradient by

    def moves(self, name: str) -> bool:
        return not torch.equal(self.before[name], self.after[name])

    def decayed(self, names: Iterable[str]) -> bool:
        """Return whether what is used of a gradient is a sum of multiples of it and of the parameter, as a decay leaves it."""
        known = [name for name in names if name in self.held and name in self.gradient]
        pairs = ((torch.stack([self.held[n].values, self.before[n]], 1), self.gradient[n].values) for n in known)
        return all(relative_error(own @ (torch.linalg.pinv(own) @ used), used) < 1e-6 for own, used in pairs)


@dataclass
class Forward:
    """One forward pass of the module: ids (b, T), logits (b, T, V), and the gradient of the logits that training computed."""

    ids: Tensor
    logits: Tensor
    gradient: Tensor | None = None

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        kept = gradient.detach().clone().view(self.logits.shape)
        self.gradient = kept if self.gradient is None else self.gradient + kept


@dataclass
class Watched:
    """What was seen in one call of a step."""

    loss: float = math.nan
    start: Gradient = field(default_factory=Gradient)  # ``.grad`` as the call before left it
    trains: set[str] = field(default_factory=set)  # the parameters that require gradients
    forwards: list[Forward] = field(default_factory=list)
    backwards: list[Gradient] = field(default_factory=list)  # what arrived at each parameter in each backward pass
    updates: list[Update] = field(default_factory=list)
    by_optimizer: bool = False  # one of torch's updated them
    by_hand: set[str] = field(default_factory=set)  # ``torch.autograd.Function``s whose backward pass somebody wrote
    rounds: float = 0.0  # the relative rounding of the numbers that are computed, beyond float64's
    half: bool = False  # the loss was computed from logits in half precision
    dropouts: set[float] = field(default_factory=set)
    noise: bool = False  # normal noise was drawn, and made zero

    def read_as(self, scale: float, limit: float, arrived: bool) -> "Watched":
        """Return it with another scale; with a limit, as if the step divided and clipped gradients (what ``arrived``) unseen."""
        seen = [replace(one, scale=scale) for one in self.updates]
        given = [one.held if arrived else one.gradient for one in seen]
        used = [one.times(min(1 / scale, limit / (one.total or math.inf))) for one in given]
        hidden = [replace(one, held=had, gradient=has) for one, had, has in zip(seen, given, used, strict=True)]
        return replace(self, updates=hidden if limit else seen)

    @property
    def changes(self) -> bool:
        return any(update.moves(name) for update in self.updates for name in update.before)

    def arrived(self) -> Gradient:
        """Return the sum of what arrived at each parameter, before the first update if there are several."""
        return summed(self.backwards[: self.updates[0].backwards if len(self.updates) > 1 else None])


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
        return tensor.detach().reshape(-1)[self.indices[name]].to("cpu", torch.float64, copy=True)

    def values(self) -> Samples:
        return {name: self.take(name, parameter) for name, parameter in self.parameters.items()}

    def gradient(self, name: str, tensor: Tensor) -> Sampled:
        """Return what is kept of a parameter's gradient, also in a hook, where our operators would come back to a mode."""
        with torch._C._DisableTorchDispatch():
            tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
            return Sampled.of(self.take(name, tensor), tensor)

    def gradients(self) -> Gradient:
        return Gradient({name: self.gradient(name, p.grad) for name, p in self.parameters.items() if p.grad is not None})


class Watch(DeterministicMode):
    """While entered, notes all of :class:`Watched`; casts are carried out of single numbers, and others by ``keep_casts``."""

    def __init__(self, module: nn.Module, sampler: Sampler, vocabulary: int, *, keep_casts: bool, as_written: bool) -> None:
        super().__init__(keep_casts=keep_casts, keep_random=as_written)
        self.module, self.sampler, self.vocabulary, self.keep_noise = module, sampler, vocabulary, False
        self.seen, self._held = Watched(), Gradient()  # .grad after the last backward pass
        self._names: dict[int, list[str]] = {}  # of the parameters in each storage: they may be views of one buffer
        for name, parameter in sampler.parameters.items():
            self._names.setdefault(parameter.untyped_storage()._cdata, []).append(name)
        self._halves: set[int] = set()  # the widths of what is cast to half precision, or goes into a softmax in it
        self._open: Update | None = None
        self._task, self._scale = -1, 1.0  # the autograd engine's number of the backward pass that runs; a GradScaler's scale
        self._head: Tensor | None = None  # the last result of a part of the module that may be the logits

    __torch_dispatch__ = OperatorMode.__torch_dispatch__  # without the short way: all operators come to `handle`

    def __enter__(self) -> "Watch":
        self._handles: list[RemovableHandle] = [self.module.register_forward_hook(self._forward, with_kwargs=True)]
        parts = (part for part in self.module.modules() if part is not self.module)
        self._handles += [part.register_forward_hook(self._part) for part in parts]
        self.seen.trains = {name for name, parameter in self.sampler.parameters.items() if parameter.requires_grad}
        for parameter, name in ((self.sampler.parameters[name], name) for name in self.seen.trains):
            self._handles.append(parameter.register_hook(partial(self._arrived, name)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._holds, name)))
        self._handles.append(register_optimizer_step_pre_hook(self._steps))
        self._start, self.seen.start = self.sampler.values(), self.sampler.gradients()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._close()
        self.seen.half = any(one.logits.shape[-1] in self._halves for one in self.seen.forwards)
        self.seen.dropouts = self.dropped
        self.seen.noise = not self.keep_random and any(name in NORMAL for name in self.draws)
        now, left = self.sampler.values(), self.sampler.gradients()
        if not self.seen.updates and any(not torch.equal(now[n], before) for n, before in self._start.items()):  # exchanged
            self._open = Update(self._start, now, left if left.total > 0 else Gradient(), self._held, len(self.seen.backwards))
            self._close()

    def handle(self, call: OperatorCall) -> Any:
        name, args = call.name, call.args
        if not (call.writes or name in LOOKED_AT or self._mask is not None):
            return call.run()
        if call.writes:
            named = call.named
            places = (tensor.untyped_storage()._cdata for one in call.kind.written for tensor in tensors(named.get(one)))
            written, fused = [name for place in places for name in self._names.get(place, ())], named.get("grad_scale")
            if fused is not None or "inv_scale" in named:  # by a GradScaler's scale a fused optimizer divides, or unscale_ before
                self._scale = float(fused) if fused is not None else 1 / float(named["inv_scale"])
            self._note(written, 1.0 if fused is None else 1 / self._scale)
        cast = call.kwargs.get("dtype") if name == "_to_copy" and args[0].dtype == torch.float64 else None
        read = call.inputs[0].dtype if name in LOSSES and call.inputs else None if self.keep_random else cast
        if read in HALVES and call.inputs[0].ndim:
            self._halves.add(call.inputs[0].shape[-1])
        if cast and self.keep_casts and cast.is_floating_point:
            self.seen.rounds = max(self.seen.rounds, torch.finfo(cast).eps)
        if cast and args[0].numel() == 1:
            return call.run()
        result = call.run() if self.keep_noise and name in NORMAL else super().handle(call)
        self.dropouts.clear()
        return result

    def _note(self, names: Iterable[str], factor: float) -> None:
        """Note the parameters' values, and ``factor`` times their gradients, before their first write after a backward pass."""
        for name in names:
            self._open = self._open or Update(held=self._held, backwards=len(self.seen.backwards))
            if name not in self._open.before:
                parameter = self.sampler.parameters[name]
                self._open.before[name] = self.sampler.take(name, parameter)
                if parameter.grad is not None:
                    self._open.gradient[name] = self.sampler.gradient(name, parameter.grad).times(factor)

    def _close(self) -> None:
        """Note the update that is open. It used what arrived, if ``.grad`` is emptied before it, not filled, or set to a sum."""
        if (one := self._open) is not None:
            now, done = self.sampler.values(), self.seen.updates[-1].backwards if self.seen.updates else 0
            arrived = summed(self.seen.backwards[done : one.backwards])
            used = one.gradient or one.held or arrived
            held = arrived if used.follows(arrived) and not used.follows(one.held) else one.held if one.gradient else used
            self.seen.updates.append(Update({**now, **one.before}, now, used, held, one.backwards, self._scale))
            self._open, self._scale = None, 1.0

    def _arrived(self, name: str, gradient: Tensor) -> None:
        """Note what arrives at a parameter; after an update (unless by a hook), or if it had some, in a new backward pass."""
        task, backwards = torch._C._current_graph_task_id(), self.seen.backwards
        if not backwards or name in backwards[-1] or (self._open is not None and task != self._task):
            self._close()
            self._held = Gradient()
            backwards.append(Gradient())
        self._task = task
        backwards[-1][name] = self.sampler.gradient(name, gradient)

    def _holds(self, name: str, parameter: Tensor) -> None:
        """Note a parameter's ``.grad`` after a backward pass."""
        if parameter.grad is not None:
            self._held[name] = self.sampler.gradient(name, parameter.grad)

    def _steps(self, optimizer: Any, *_: Any) -> None:
        own, known = set(map(id, self.sampler.parameters.values())), type(optimizer).__module__.startswith("torch.optim.")
        self.seen.by_optimizer |= known and any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = next((t for t in tensors((args, kwargs)) if not t.is_floating_point() and t.ndim == 2), None)
        others = any(tensor is not self.sampler.parameters.get(name, tensor) for name, tensor in module.named_parameters())
        if others or any(map(is_functorch_wrapped_tensor, tensors((args, kwargs, output)))):
            words = "its step runs the module on other tensors than its parameters (torch.func, FSDP), where it cannot be watched"
            raise InputError(f"{words}: for the diagnosis call the module itself on the whole batch, and loss.backward()")
        if ids is None:
            return
        head, self._head = self._head, None
        try:
            logits = logits_of(output, ids, self.vocabulary)
        except ValueError:
            logits = ids.new_zeros(1)
        if logits.shape[-1] < self.vocabulary and head is not None:  # it returns the loss alone: what its head gave
            output, logits = head, logits_of(head, ids, self.vocabulary)
        named = dict(output) if isinstance(output, dict) else getattr(output, "__dict__", None) or output
        place, size = logits.data_ptr(), logits.numel()
        raw = next((t for t in tensors(named) if t.numel() == size and t.data_ptr() == place), logits)
        if not raw.requires_grad:
            return
        self.seen.by_hand |= _by_hand(raw)
        forward = Forward(ids.detach().clone(), logits.detach())
        self.seen.forwards.append(forward)
        raw.register_hook(forward.add)

    def _part(self, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep what a part of the module returns, if its rows are as wide as the vocabulary, or padded."""
        if isinstance(output, Tensor) and output.ndim > 1 and 0 <= output.shape[-1] - self.vocabulary < PADDING:
            self._head = output


def _by_hand(tensor: Tensor) -> set[str]:
    """Return the names of the functions behind a tensor whose backward pass is not torch's."""
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen.add(node)
            waiting += [one for one, _ in node.next_functions]
    names = {type(node).__name__ for node in seen if isinstance(node, BackwardCFunction)}
    return {name.removesuffix("Backward") for name in names if not name.startswith("Compiled")}
