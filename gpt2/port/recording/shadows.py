"""Shadow memory: beside each storage, where its elements come from.

As memory debuggers keep it: for every storage that parameters or token ids reach there is a tensor of ids, one per element.
Views share their storage's shadow, so transposing, slicing, splitting and writing in place need no code at all. Parameters, which
nobody writes to, need not even the shadow: their ids follow from strides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpt2.port.recording.dataflow import NOWHERE, Region, Source, Use


class Shadows:
    """Ids of everything: those of sources lie below ``tokens``, those of the token ids below ``computed``."""

    def __init__(self, module: nn.Module, ids: Tensor) -> None:
        self.next = 0
        self.sources: list[Source] = []
        self.uses: dict[int, set[Use]] = {}
        self._made: dict[int, tuple[frozenset[int], Use]] = {}  # storage of copies -> the sources' storages, and what was done
        self._parameters: dict[int, int] = {}  # storage -> its first id
        self._shadows: dict[int, tuple[Tensor, int]] = {}  # storage -> ids of its elements, and their size in bytes
        self._alive: list[torch.UntypedStorage] = []  # lest the memory of one becomes another's
        self._add_sources(module)
        self.tokens = self.next
        self.write(ids, self.fresh(ids.shape))
        self.computed = self.next

    def _add_sources(self, module: nn.Module) -> None:
        named = [(name, parameter, True) for name, parameter in module.named_parameters(remove_duplicate=False)]
        named += [(name, b, False) for name, b in module.named_buffers(remove_duplicate=False) if b.is_floating_point()]
        for name, tensor, is_parameter in named:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._parameters:
                self._alive.append(storage)
                self._parameters[storage._cdata] = self.next
                self.next += storage.nbytes() // tensor.element_size()
            self.sources.append(Source(name, self.region(tensor), self._parameters[storage._cdata], is_parameter))

    def fresh(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """New ids, in order."""
        numel = torch.Size(shape).numel()
        self.next += numel
        return torch.arange(self.next - numel, self.next).view(shape)

    def knows(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return storage in self._parameters or storage in self._shadows

    def region(self, tensor: Tensor) -> Region | None:
        """The ids of a view into a source; None for other tensors."""
        start = self._parameters.get(tensor.untyped_storage()._cdata)
        return None if start is None else Region(start + tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def made_of(self, tensor: Tensor) -> tuple[frozenset[int], Use] | None:
        """Of a source, or of copies of sources: their storages, and how their values are changed; None for all else."""
        storage = tensor.untyped_storage()._cdata
        return (frozenset({self._parameters[storage]}), Use()) if storage in self._parameters else self._made.get(storage)

    def make(self, tensor: Tensor, inputs: list[Tensor], scale: float = 1.0, shift: float = 0.0) -> None:
        """A tensor is now a copy of these, scaled and shifted."""
        made = [self.made_of(x) for x in inputs if self.knows(x)]
        if made and None not in made and len({use for _, use in made}) == 1:
            use = Use(made[0][1].scale * scale, made[0][1].shift * scale + shift)
            self._made[tensor.untyped_storage()._cdata] = frozenset().union(*(sources for sources, _ in made)), use

    def use(self, tensor: Tensor) -> None:
        """Take down that sources took part."""
        sources, use = self.made_of(tensor) or ((), Use())
        for source in sources:
            self.uses.setdefault(source, set()).add(use)

    def ids_of(self, tensor: Tensor) -> Tensor | None:
        """A copy of the ids of a tensor's elements as they are now; None where all are from nowhere."""
        region = self.region(tensor)
        if region is not None:
            return region.ids()
        shadow = self._shadow(tensor)
        return None if shadow is None else shadow.clone()

    def operand(self, tensor: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor | Region:
        """Ids after ``view``, a function that makes views; strides where they do."""
        if self.region(tensor) is not None:
            return self.region(view(tensor))
        ids = self.ids_of(tensor)
        return view(torch.full(tensor.shape, NOWHERE) if ids is None else ids)

    def _shadow(self, tensor: Tensor) -> Tensor | None:
        shadow, size = self._shadows.get(tensor.untyped_storage()._cdata, (None, 0))
        if shadow is None or size != tensor.element_size():
            return None
        return shadow.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def write(self, tensor: Tensor, ids: Tensor) -> None:
        """The tensor's elements are now these."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._shadows:
            self._alive.append(storage)
            elements = storage.nbytes() // tensor.element_size()
            self._shadows[storage._cdata] = torch.full((elements,), NOWHERE), tensor.element_size()
        shadow = self._shadow(tensor)
        if shadow is not None:
            shadow.copy_(ids)
