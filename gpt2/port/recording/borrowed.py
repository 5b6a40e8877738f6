"""Borrow somebody else's module: run it in eval mode and in float64, and give it back as it was.

It is the module itself and no copy. A copy misses what lies outside its attributes (a lambda over its own layers still calls the
original's), and many modules cannot be copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor, nn

INNER = ("_parameters", "_buffers", "_modules")  # torch's own dictionaries, whose content changes


class Borrowed:
    """While entered, the module is in eval mode and may be changed. On leaving, all is restored but what :meth:`keep` names.

    Modes, attributes and the content of buffers are restored. Objects that the module merely refers to (a list that grows, for
    example) are not: they stay as the forward pass left them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tensors: dict[str, Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self._kept: set[int] = set()
        self._swapped: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor, and what it held

    def __enter__(self) -> Borrowed:
        self._modes = [(part, part.training) for part in self.module.modules()]
        plain = [part for part in self.module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._attributes = [(part, dict(vars(part)), {name: dict(getattr(part, name)) for name in INNER}) for part in plain]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]
        for part, _ in self._modes:  # not eval(), which some modules override
            part.training = False
        return self

    def to_float64(self) -> None:
        """Give parameters and floating-point buffers float64 copies of their values; the originals are kept aside."""
        self._buffers = [(buffer, before) for buffer, before in self._buffers if not torch.equal(buffer, before)]
        for tensor in self.tensors.values():
            if tensor.is_floating_point() and id(tensor) not in self._swapped:
                self._swapped[id(tensor)] = tensor, tensor.data
                tensor.data = tensor.data.double()

    def to_own_dtype(self) -> None:
        """Round the float64 values to each tensor's own dtype."""
        for tensor, before in self._swapped.values():
            tensor.data = tensor.data.to(before.dtype)

    def keep(self, names: Iterable[str]) -> None:
        """On leaving, let these tensors keep the values that they hold then."""
        self._kept |= {id(self.tensors[name]) for name in names}

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for tensor, before in self._swapped.values():
            if id(tensor) in self._kept:
                before.copy_(tensor.data)
            tensor.data = before
        for buffer, before in self._buffers:
            if id(buffer) not in self._kept:
                buffer.copy_(before)
        for part, attributes, inner in self._attributes:
            vars(part).clear()
            vars(part).update(attributes)
            for name, content in inner.items():
                getattr(part, name).clear()
                getattr(part, name).update(content)
        for part, training in self._modes:
            part.training = training
