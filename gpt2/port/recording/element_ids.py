"""Give every element of every tensor an id: beside each storage, a tensor of the ids of its elements.

Memory debuggers do the same and call it shadow memory. Views share a storage and so share its ids: transposing, slicing,
splitting and writing in place need no code. Parameters are never written to, so their ids follow from strides and take no memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpt2.port.recording.dataflow import NO_ID, Region, Source, Use


class ElementIds:
    """The ids of all tensors in a forward pass: sources below ``tokens``, then token ids below ``computed``, then results."""

    def __init__(self, module: nn.Module, ids: Tensor) -> None:
        self.next = 0
        self.sources: list[Source] = []
        self.uses: dict[int, set[Use]] = {}
        self._copies: dict[int, tuple[frozenset[int], Use]] = {}  # storage of a copy -> storages of its sources, and its change
        self._first_ids: dict[int, int] = {}  # storage of a source -> its first id
        self._ids: dict[int, tuple[Tensor, int]] = {}  # storage -> ids of its elements, and their size in bytes
        self._alive: list[torch.UntypedStorage] = []  # keeps addresses from being used again
        self._add_sources(module)
        self.tokens = self.next
        self.write(ids, self.new(ids.shape))
        self.computed = self.next

    def _add_sources(self, module: nn.Module) -> None:
        named: list[tuple[str, Tensor, bool]] = [(name, p, True) for name, p in module.named_parameters(remove_duplicate=False)]
        named += [(name, b, False) for name, b in module.named_buffers(remove_duplicate=False) if b.is_floating_point()]
        for name, tensor, is_parameter in named:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._first_ids:
                self._alive.append(storage)
                self._first_ids[storage._cdata] = self.next
                self.next += storage.nbytes() // tensor.element_size()
            first = self._first_ids[storage._cdata]
            self.sources.append(Source(name, _region(first, tensor), first, is_parameter))

    def new(self, shape: tuple[int, ...]) -> Tensor:
        """New ids, in order."""
        numel = torch.Size(shape).numel()
        self.next += numel
        return torch.arange(self.next - numel, self.next).view(shape)

    def has(self, tensor: Tensor) -> bool:
        """Whether any element of its storage may have an id."""
        storage = tensor.untyped_storage()._cdata
        return storage in self._first_ids or storage in self._ids

    def region(self, tensor: Tensor) -> Region | None:
        """The ids of a view into a source; None for other tensors."""
        first = self._first_ids.get(tensor.untyped_storage()._cdata)
        return None if first is None else _region(first, tensor)

    def copied_from(self, tensor: Tensor) -> tuple[frozenset[int], Use] | None:
        """Of a source, or of a copy of sources: their storages, and how the values were changed. None for all else."""
        storage = tensor.untyped_storage()._cdata
        if storage in self._first_ids:
            return frozenset({self._first_ids[storage]}), Use()
        return self._copies.get(storage)

    def mark_copy(self, tensor: Tensor, inputs: list[Tensor], scale: float = 1.0, shift: float = 0.0) -> None:
        """Note that a tensor is a copy of ``inputs``, scaled and shifted, if these are sources or copies of sources."""
        origins = [self.copied_from(x) for x in inputs if self.has(x)]
        copies = [origin for origin in origins if origin is not None]
        if copies and len(copies) == len(origins) and len({use for _, use in copies}) == 1:
            before = copies[0][1]
            use = Use(before.scale * scale, before.shift * scale + shift)
            self._copies[tensor.untyped_storage()._cdata] = frozenset().union(*(sources for sources, _ in copies)), use

    def mark_use(self, tensor: Tensor) -> None:
        """Note that an operator computed with a source, or with a copy of one."""
        sources, use = self.copied_from(tensor) or ((), Use())
        for source in sources:
            self.uses.setdefault(source, set()).add(use)

    def of(self, tensor: Tensor) -> Tensor | None:
        """A copy of the ids of a tensor's elements as they are now; None where no element has one."""
        region = self.region(tensor)
        if region is not None:
            return region.ids()
        ids = self._view(tensor)
        return None if ids is None else ids.clone()

    def or_blank(self, tensor: Tensor) -> Tensor:
        """As :meth:`of`, with ``NO_ID`` everywhere where no element has an id."""
        ids = self.of(tensor)
        return torch.full(tensor.shape, NO_ID) if ids is None else ids

    def operand(self, tensor: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor | Region:
        """The ids of ``view(tensor)``, where ``view`` makes views only; as a region for a source."""
        region = self.region(view(tensor)) if self.region(tensor) is not None else None
        return view(self.or_blank(tensor)) if region is None else region

    def _view(self, tensor: Tensor) -> Tensor | None:
        ids, size = self._ids.get(tensor.untyped_storage()._cdata, (None, 0))
        if ids is None or size != tensor.element_size():
            return None
        return ids.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def write(self, tensor: Tensor, ids: Tensor) -> None:
        """Give a tensor's elements these ids."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ids:
            self._alive.append(storage)
            elements = storage.nbytes() // tensor.element_size()
            self._ids[storage._cdata] = torch.full((elements,), NO_ID), tensor.element_size()
        view = self._view(tensor)
        if view is not None:
            view.copy_(ids)


def _region(first: int, tensor: Tensor) -> Region:
    return Region(first + int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
