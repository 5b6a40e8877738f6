"""Watch one call of a training step: gradients of the logits, each backward pass, and each update of the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from gpt2.errors import InputError
from gpt2.measure.user_code import logits_of
from gpt2.port.recording.dispatch import RANDOM, DeterministicMode, OperatorCall, tensors
from gpt2.port.step.records import HALVES, Backward, Forward, Gradient, Sampler, Update, Watched

LOSSES = {"_log_softmax", "_softmax", "logsumexp", "exp", "nll_loss_forward"}
HANDLED = {"_to_copy", "native_dropout", "bernoulli", "bernoulli_", *RANDOM}
PADDING = 128  # columns that are added to the vocabulary, at most
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class Watch(DeterministicMode):
    """While entered, notes writes to the module's parameters; with its hooks, all of :class:`Watched`.

    Casts of single numbers are always carried out, as a GradScaler needs them; others from float64 only with ``keep_casts``.
    """

    def __init__(self, module: nn.Module, sampler: Sampler, vocabulary: int, *, keep_casts: bool, as_written: bool) -> None:
        super().__init__(keep_casts=keep_casts, keep_random=as_written)
        self.module, self.sampler, self.vocabulary = module, sampler, vocabulary
        self.seen = Watched()
        self._names = {p.untyped_storage()._cdata: name for name, p in sampler.parameters.items()}
        self._halves: set[int] = set()  # the widths of what is cast to half precision
        self._fired: set[str] = set()
        self._open: Update | None = None
        self._task = -1  # the autograd engine's number of the backward pass that runs
        self._head: Tensor | None = None  # the last result of a part of the module that may be the logits

    def __enter__(self) -> Watch:
        self._handles: list[RemovableHandle] = [self.module.register_forward_hook(self._forward, with_kwargs=True)]
        parts = (part for part in self.module.modules() if part is not self.module)
        self._handles += [part.register_forward_hook(self._part) for part in parts]
        self.seen.trains = {name for name, parameter in self.sampler.parameters.items() if parameter.requires_grad}
        for parameter, name in ((self.sampler.parameters[name], name) for name in self.seen.trains):
            self._handles.append(parameter.register_hook(self._hook(name, "arrived")))
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(name, "held")))
        self._start, self.seen.start = self.sampler.values(), self.sampler.gradients()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._close()
        self.seen.half = self.seen.half or any(one.logits.shape[-1] in self._halves for one in self.seen.forwards)
        exchanged, left = replace(self._update(), before=self._start, after=self.sampler.values()), self.sampler.gradients()
        if not self.seen.updates and exchanged.changes:  # parameters that were exchanged, not written to
            self.seen.updates.append(replace(exchanged, gradient=left if left.total > 0 else exchanged.held))

    def handle(self, call: OperatorCall) -> Any:
        if call.name == UNSCALE:
            self.seen.unscaled *= float(call.args[2])
        if call.writes:
            places = (tensor.untyped_storage()._cdata for tensor in _written(call))
            self._note([self._names[place] for place in places if place in self._names])
        if call.name in LOSSES and call.inputs and call.inputs[0].dtype in HALVES and call.inputs[0].ndim:
            width = call.inputs[0].shape[-1]
            self.seen.half = self.seen.half or any(width == one.logits.shape[-1] for one in self.seen.forwards[-1:])
        if call.name not in HANDLED and self._mask is None:
            return call.run()
        drops = call.name == "native_dropout" and call.args[2] is not False
        keep = 1 - call.args[1] if drops else call.named.get("p") if call.name in ("bernoulli_", "bernoulli") else None
        if isinstance(keep, float) and 0 < keep < 1:
            self.seen.dropouts.add(round(1 - keep, 9))
        if call.name == "_to_copy" and call.args[0].dtype == torch.float64 and (dtype := call.named.get("dtype")):
            if dtype in HALVES and not self.keep_random and call.args[0].ndim:
                self._halves.add(call.args[0].shape[-1])
            if self.keep_casts and dtype.is_floating_point:
                self.seen.rounds = max(self.seen.rounds, torch.finfo(dtype).eps)
            if call.args[0].numel() == 1:
                return call.run()
        result = super().handle(call)
        self.dropouts.clear()
        return result

    def _note(self, names: Iterable[str]) -> None:
        """Note the parameters' values and gradients before their first write since the last backward pass."""
        for name in names:
            self._open = self._open or self._update()
            if name not in self._open.before:
                parameter = self.sampler.parameters[name]
                self._open.before[name] = self.sampler.take(name, parameter)
                if parameter.grad is not None:
                    self._open.gradient[name] = self.sampler.gradient(name, parameter.grad)

    def _update(self) -> Update:
        """Return an update after the last backward pass."""
        backwards = self.seen.backwards
        return Update(held=backwards[-1].held if backwards else Gradient(), backwards=len(backwards))

    def _close(self) -> None:
        if self._open is not None:
            now = self.sampler.values()
            self.seen.updates.append(replace(self._open, before={**now, **self._open.before}, after=now))
            self._open = None

    def _backward(self, name: str, kind: str) -> Backward:
        """Return the backward pass that this hook belongs to.

        It is a new one if this parameter's hook has been called in the last, or if parameters were updated since then; but hooks
        of the author's may update them within a backward pass.
        """
        key, task = f"{kind} {name}", torch._C._current_graph_task_id()
        updated = self._open is not None and task != self._task
        if not self.seen.backwards or updated or (kind == "arrived" and key in self._fired):
            self._close()
            self.seen.backwards.append(Backward(Gradient(), Gradient()))
            self._fired = set()
        self._fired.add(key)
        self._task = task
        return self.seen.backwards[-1]

    def _hook(self, name: str, kind: str) -> Any:
        """Return a hook that notes what has "arrived" at a parameter, or what its ``.grad`` has "held" since."""

        @torch.no_grad()
        def hook(tensor: Tensor) -> None:
            gradient = tensor.grad if kind == "held" else tensor
            if gradient is not None:
                getattr(self._backward(name, kind), kind)[name] = self.sampler.gradient(name, gradient)

        return hook

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = next((t for t in tensors((args, kwargs)) if not t.is_floating_point() and t.ndim == 2), None)
        own = self.sampler.parameters
        others = any(tensor is not own.get(name, tensor) for name, tensor in module.named_parameters())
        if others or any(map(is_functorch_wrapped_tensor, tensors((args, kwargs, output)))):
            raise InputError(
                "its step calls the module within torch.func, where it cannot be watched; for the diagnosis call the module "
                "itself on the whole batch, and loss.backward() or torch.autograd.grad"
            )
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

        @torch.no_grad()
        def hook(gradient: Tensor) -> None:
            kept = gradient.detach().clone().view(forward.logits.shape)
            forward.gradient = kept if forward.gradient is None else forward.gradient + kept

        raw.register_hook(hook)

    def _part(self, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep what a part of the module returns, if its rows are as wide as the vocabulary, or padded."""
        if isinstance(output, Tensor) and output.ndim > 1 and 0 <= output.shape[-1] - self.vocabulary < PADDING:
            self._head = output


def _by_hand(tensor: Tensor) -> set[str]:
    """Return the names of the functions behind a tensor whose backward pass is not torch's."""
    found, waiting, seen = set[str](), [tensor.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [one for one, _ in node.next_functions]
            if isinstance(node, BackwardCFunction) and not type(node).__name__.startswith("Compiled"):
                found.add(type(node).__name__.removesuffix("Backward"))
    return found


def _written(call: OperatorCall) -> list[Tensor]:
    """Return the tensors that an operator writes into."""
    named = call.named
    schema = call.func._schema.arguments
    changed = [named[a.name] for a in schema if a.alias_info is not None and a.alias_info.is_write and a.name in named]
    return tensors(changed)
