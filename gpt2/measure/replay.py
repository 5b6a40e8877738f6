"""Repeat each call of PyTorch that a float64 run makes, forwards and backwards, elsewhere: on another device for example.

Its inputs lie in memory as in this run (transposed, or a part of a larger tensor); of a call in place all of that is the result.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpt2.errors import InputError
from gpt2.model import GPT2

Run = Callable[..., Sequence[Tensor]]
Seen = Callable[[str, str, Run, Sequence[Tensor]], None]


class Replay(TorchFunctionMode):
    """Gives ``seen`` each call within the ``with`` block that computes something, and rounds its result to ``dtype``.

    ``seen`` gets the operator, the module whose parameter it reads (or "after" that module), a function that repeats it, and
    its inputs. Raises InputError: a result of the ``model`` is too large for the dtype.
    """

    def __init__(self, model: GPT2, dtype: torch.dtype, seen: Seen) -> None:
        super().__init__()
        self.dtype, self.seen, self.module = dtype, seen, "the ids"
        self.modules = {_memory(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return self(func, *args, **(kwargs or {}))

    def __call__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``func`` and show it; return its result in float64, rounded."""
        tensors = list(_tensors((args, *kwargs.values())))
        read = [self.modules[_memory(x)] for x in tensors if _memory(x) in self.modules]
        self.module = read[-1] if read else self.module
        where, name = self.module if read else f"after {self.module}", getattr(func, "__name__", "")
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        inputs = {_memory(x): _whole(x).clone() if in_place else _whole(x) for x in tensors}
        result = func(*args, **kwargs)
        output = _whole(args[0]) if in_place else result
        if not isinstance(output, Tensor) or (not in_place and (not tensors or _memory(output) in inputs)):
            return result  # a shape, a constant, or a view

        def run(*wholes: Tensor) -> Sequence[Tensor]:
            """Repeat the call on other memory. One tensor more is the gradient from above: return the gradients of the inputs."""
            own = dict(zip(inputs, map(Tensor.clone, wholes) if in_place else wholes, strict=False))
            leaves, training = list[Tensor](), len(wholes) > len(inputs)

            def view(x: Tensor) -> Tensor:
                same = own[_memory(x)].as_strided(x.size(), x.stride(), x.storage_offset()).detach()
                leaves.extend([same.requires_grad_()] if training and x.requires_grad else [])
                return same

            with torch.set_grad_enabled(training):
                own_args = _changed(args, view)
                again = func(*own_args, **{key: _changed(value, view) for key, value in kwargs.items()})
                if training:
                    return torch.autograd.grad(again, leaves, wholes[-1])
                return [_whole(own_args[0]) if in_place else again]

        operator, wholes = name.strip("_"), list(inputs.values())
        self.seen(operator, where, run, wholes)
        if not output.is_floating_point():
            return result
        rounded = output.to(self.dtype).double()
        if not rounded.isfinite().all() and output.isfinite().all():
            raise InputError(f"the model overflows in {self.dtype}, {where}; choose another dtype, as in MODEL:bf16")
        if in_place:
            output.copy_(rounded)
            return result
        if output.requires_grad:
            output.register_hook(lambda above: self.seen(f"{operator}, backward", where, run, [*wholes, above]))
        return rounded


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of a call's arguments; torch's own trees take a fifth of the time."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a call's argument with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_changed(each, change) for each in value) if type(value) in (list, tuple) else value


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _whole(x: Tensor) -> Tensor:
    """Return all of the memory that a tensor is a view of."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
