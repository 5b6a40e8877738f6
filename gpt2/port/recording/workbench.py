"""Somebody else's module on the bench: run, measured in float64, and given back as it was.

The module itself, and no copy of it: a copy would miss what lives outside its attributes (a lambda over its own layers goes on
calling the original's), and much in the world refuses to be copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor, nn

INNER = ("_parameters", "_buffers", "_modules")  # torch's own dictionaries, which change from within


class Bench:
    """While entered, the module is in eval mode and may be changed; on leaving, all is put back but what :meth:`keep` was told.

    Put back are modes, attributes, and what buffers hold. What a forward pass does to objects that the module merely refers to (a
    list that grows, say) remains, as it does after any call.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tensors = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
        self._kept: set[int] = set()
        self._swapped: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor, and what it held

    def __enter__(self) -> Bench:
        self._modes = [(part, part.training) for part in self.module.modules()]
        plain = [part for part in self.module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._attributes = [(part, dict(vars(part)), {name: dict(getattr(part, name)) for name in INNER}) for part in plain]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]
        for part, _ in self._modes:  # not eval(), which some override
            part.training = False
        return self

    def to_float64(self) -> None:
        """Have parameters and floating-point buffers hold copies of themselves in float64: what they held is now out of reach."""
        self._buffers = [(buffer, before) for buffer, before in self._buffers if not torch.equal(buffer, before)]
        for tensor in self.tensors.values():
            if tensor.is_floating_point() and id(tensor) not in self._swapped:
                self._swapped[id(tensor)] = tensor, tensor.data
                tensor.data = tensor.data.double()

    def to_own(self) -> None:
        """What they hold in float64, back in their own dtype."""
        for tensor, before in self._swapped.values():
            tensor.data = tensor.data.to(before.dtype)

    def keep(self, names: Iterable[str]) -> None:
        """On leaving, fill these with what they hold now."""
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
