"""A recorded forward pass, and the graph it is built in: which elements each operator computed, and from which other ones.

Every element of a parameter or buffer, every token id and every computed element has a number, its id. Views, slices and copies
keep the ids. Nothing depends on names or module types. :mod:`.recorder` makes recordings.

:class:`Graph` has for each storage a tensor of its elements' ids, as shadow memory in memory debuggers: views share it, so that
slicing and writing in place need no code. Parameters are never written to; their ids follow from strides and take no memory.
"""

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

Factor = tuple[Tensor, Callable[[Tensor], Tensor]]  # a contraction's tensor, and its view as (*results, summed)
NO_ID = -1  # the element depends on no parameter and on no token


class NodeKind(Enum):
    """What an operator does to single elements."""

    LOOKUP = "lookup"  # entries of a table, chosen by token ids or one-hot vectors
    CONTRACTION = "contraction"  # sums of products: matrix products, convolutions of width one
    ELEMENTWISE = "elementwise"  # each result depends on the elements at its own index
    ROWWISE = "rowwise"  # has its input's shape; each result also depends on its neighbours: softmax, layer norm
    REDUCTION = "reduction"  # mean, variance, maximum
    OTHER = "other"


@dataclass(frozen=True)
class Region:
    """The ids of a view into a parameter: the element at ``index`` has the id ``start + sum(index * strides)``."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last(self) -> int:
        return self.start + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def ids(self) -> Tensor:
        """Return all ids, int64, in ``shape``."""
        return torch.arange(self.start, max(self.last, self.start) + 1).as_strided(self.shape, self.strides)

    def overlaps(self, ids: Tensor) -> bool:
        """Return whether any of these ids lies between the smallest and the largest id."""
        return bool(((ids >= self.start) & (ids <= self.last)).any())

    def __getitem__(self, index: tuple[Tensor, ...]) -> Tensor:
        """Return ``tensor[index]``, where ``index`` fixes all axes or the leading ones."""
        start = sum((i * stride for i, stride in zip(index, self.strides, strict=False)), torch.tensor(self.start))
        rest = Region(0, self.shape[len(index) :], self.strides[len(index) :]).ids()
        return start.view(*start.shape, *[1] * rest.ndim) + rest


@dataclass(frozen=True)
class Node:
    """One operator call; its results have the ids ``start`` to ``stop - 1``, in the order of ``shape``.

    ``operands``: ids of the inputs, broadcast to ``shape``; constants are left out. A contraction's operands have the summed axis
    last; reductions and OTHER keep the operands' shapes; a lookup has the entries taken and the indices that chose them.
    """

    kind: NodeKind
    op: str  # "add", "bmm", "_softmax"
    start: int
    shape: tuple[int, ...]
    operands: tuple[Tensor | Region, ...]
    live: bool  # depends on the token ids
    learned: bool  # depends on a parameter or buffer
    weight: int | None = None  # for a contraction: the operand that has only parameters
    index: Tensor | None = field(default=None, repr=False)  # for a lookup: each result's row

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def place(self, ids: Tensor | int) -> tuple[Any, ...]:
        """Return the indices in ``shape`` of these results."""
        return unravelled(ids - self.start, self.shape)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The operands that are tensors of ids, without a parameter's region."""
        return tuple(operand for operand in self.operands if isinstance(operand, Tensor))

    @property
    def weights(self) -> Tensor | Region:
        """The parameters' ids (*shape, K) of a projection, which is a contraction with parameters."""
        return self.operands[cast(int, self.weight)]

    @property
    def inputs(self) -> Tensor:
        """The activations' ids (*shape, K) of a projection."""
        return cast(Tensor, self.operands[1 - cast(int, self.weight)])


class Use(NamedTuple):
    """How the computation uses a parameter's value: times ``scale``, plus ``shift``."""

    scale: float = 1.0
    shift: float = 0.0

    def __str__(self) -> str:
        return f"times {self.scale:.4g}" + (f" plus {self.shift:.4g}" if self.shift else "")


@dataclass(frozen=True)
class Holder:
    """A parameter or buffer; ``storage`` is the first id of its storage, which other names may share."""

    name: str
    region: Region
    storage: int
    is_parameter: bool


@dataclass(frozen=True)
class Recording:
    """A forward pass on ``ids``; sources have the first ids, then come tokens, then results in order."""

    sources: tuple[Holder, ...]
    ids: Tensor
    tokens: int  # the id of the first token; smaller ids belong to parameters and buffers
    nodes: tuple[Node, ...]
    output: Tensor  # ids of the logits
    uses: dict[int, set[Use]]  # by storage: how it was used
    unfollowed: tuple[str, ...]  # operators that could not be followed; their results have no ids

    @property
    def stop(self) -> int:
        return self.nodes[-1].stop if self.nodes else self.tokens + self.ids.numel()

    @cached_property
    def _starts(self) -> list[int]:
        return [node.start for node in self.nodes]

    def owners(self, ids: Tensor) -> list[int]:
        """Return the indices of the nodes that computed these elements, in order; -1 for others."""
        return _spans(self._starts, ids)

    def owner(self, id: Tensor | int) -> int:
        return bisect.bisect_right(self._starts, int(id)) - 1

    def source(self, id: int) -> Holder:
        return next(source for source in self.sources if source.region.start <= id <= source.region.last)

    def name(self, id: int) -> str:
        """Return the source's name; "" for a computed element."""
        return self.source(id).name if 0 <= id < self.tokens else ""

    def made_weights(self) -> Iterator[tuple[int, str]]:
        """Yield each projection, by its node, whose weights are computed from parameters, and the name of one of these."""
        for node, number in ((self.nodes[number], number) for number in sorted(self.needed)):
            for operand in node.tensors if node.kind is NodeKind.CONTRACTION and node.live and node.weight is None else ():
                maker = self.owner(without_repeats(operand).amax())
                while maker >= 0 and self.nodes[maker].learned and not self.nodes[maker].live:
                    first = self.nodes[maker].operands[0]
                    last = first.last if isinstance(first, Region) else int(without_repeats(first).amax())
                    if last < self.tokens:
                        yield number, self.name(last)
                    maker = self.owner(last)

    @cached_property
    def needed(self) -> frozenset[int]:
        """The indices of the nodes that the output depends on."""
        needed = set(self.owners(self.output))
        for number in reversed(range(len(self.nodes))):
            for operand in self.nodes[number].tensors if number in needed else ():
                needed.update(self.owners(operand))
        return frozenset(needed - {-1})


def unravelled(numbers: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the indices of the elements with these numbers, as torch.unravel_index, which imports sympy, does."""
    indices = []
    for size in shape[:0:-1]:
        indices.append(numbers % max(size, 1))
        numbers = numbers // max(size, 1)
    return (*([numbers] if shape else []), *reversed(indices))


def _spans(starts: list[int], ids: Tensor) -> list[int]:
    """Return which spans of ids, by the first id of each, hold any of ``ids``, in order; -1 for ids before the first."""
    if not (ids := without_repeats(ids)).numel():
        return []
    first, last = (bisect.bisect_right(starts, int(id)) - 1 for id in ids.aminmax())
    if last - first < 2:
        return [first] if first == last else [first, last]
    return (torch.searchsorted(torch.tensor(starts), ids.contiguous(), right=True) - 1).unique().tolist()


def without_repeats(tensor: Tensor) -> Tensor:
    """Return a view in which each expanded axis has length 1."""
    kept = [n if stride or n == 0 else 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(kept, tensor.stride())


class Dependence(NamedTuple):
    """Whether elements depend on the token ids, and whether on a source."""

    tokens: bool
    sources: bool


class Graph:
    """The ids of all tensors so far, and the ``nodes``; ids below ``tokens`` are sources, then come token ids and results."""

    def __init__(self, module: nn.Module, ids: Tensor) -> None:
        self.nodes: list[Node] = []
        self.sources: list[Holder] = []
        self.uses: dict[int, set[Use]] = {}
        self._next = 0
        self._copies: dict[int, tuple[frozenset[int], Use]] = {}  # storage of a copy -> its sources' storages, and its change
        self._first_ids: dict[int, int] = {}  # storage of a source -> its first id
        self._ids: dict[int, tuple[Tensor, int]] = {}  # storage -> ids of its elements, and their size in bytes
        self._alive: list[torch.UntypedStorage] = []  # keeps addresses from being reused
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = {name: b for name, b in module.named_buffers(remove_duplicate=False) if b.is_floating_point()}
        for name, tensor in (parameters | buffers).items():
            storage = tensor.untyped_storage()
            if storage._cdata not in self._first_ids:
                self._alive.append(storage)
                self._first_ids[storage._cdata] = self._next
                self._next += storage.nbytes() // tensor.element_size()
            first = self._first_ids[storage._cdata]
            self.sources.append(Holder(name, _region(first, tensor), first, name in parameters))
        self.tokens, self.count = self._next, ids.numel()
        self._starts = [0, self.tokens]  # the first id of the sources, of the tokens, and of each node
        self._dependences = [Dependence(False, True), Dependence(True, False)]
        self.write(ids, self._new(ids.shape))

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        numel = torch.Size(shape).numel()
        self._next += numel
        return torch.arange(self._next - numel, self._next).view(shape)

    def has(self, tensor: Tensor) -> bool:
        """Return whether any element of its storage may have an id."""
        storage = tensor.untyped_storage()._cdata
        return storage in self._first_ids or storage in self._ids

    def region(self, tensor: Tensor) -> Region | None:
        """Return the ids of a view into a source; None for other tensors."""
        first = self._first_ids.get(tensor.untyped_storage()._cdata)
        return None if first is None else _region(first, tensor)

    def copied_from(self, tensor: Tensor) -> tuple[frozenset[int], Use] | None:
        """Return the storages and the change of a source, or of a copy of sources; None for other tensors."""
        storage = tensor.untyped_storage()._cdata
        if storage in self._first_ids:
            return frozenset({self._first_ids[storage]}), Use()
        return self._copies.get(storage)

    def mark_copy(self, tensor: Tensor, inputs: list[Tensor], scale: float = 1.0, shift: float = 0.0) -> None:
        """Mark a tensor as a scaled and shifted copy of ``inputs``, if these are sources or copies of sources."""
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
        """Return a copy of the current ids of a tensor's elements; None if no element has one."""
        if (region := self.region(tensor)) is not None:
            return region.ids()
        ids = self._view(tensor)
        return None if ids is None else ids.clone()

    def or_blank(self, tensor: Tensor) -> Tensor:
        """Like :meth:`of`, with ``NO_ID`` in place of None."""
        ids = self.of(tensor)
        return torch.full(tensor.shape, NO_ID) if ids is None else ids

    def write(self, tensor: Tensor, ids: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ids:
            self._alive.append(storage)
            elements = storage.nbytes() // tensor.element_size()
            self._ids[storage._cdata] = torch.full((elements,), NO_ID), tensor.element_size()
        if (view := self._view(tensor)) is not None:
            view.copy_(ids)

    def _view(self, tensor: Tensor) -> Tensor | None:
        ids, size = self._ids.get(tensor.untyped_storage()._cdata, (None, 0))
        if ids is None or size != tensor.element_size():
            return None
        return ids.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def add(
        self, kind: NodeKind, op: str, shape: tuple[int, ...], *operands: Tensor | Region, index: Tensor | None = None
    ) -> Tensor:
        tokens, sources = (any(needs) for needs in zip((False, False), *map(self.dependence, operands), strict=True))
        need = Dependence(tokens or kind is NodeKind.LOOKUP, sources)
        weights = [number for number, one in enumerate(operands) if kind is NodeKind.CONTRACTION and self.is_source(one)]
        weight = weights[0] if len(weights) == 1 else None
        self._starts.append(self._next)
        self._dependences.append(need)
        self.nodes.append(Node(kind, op, self._next, tuple(shape), operands, *need, weight, index))
        return self._new(shape)

    def elementwise(self, op: str, shape: tuple[int, ...], *operands: Tensor | None) -> Tensor:
        """Add a node over ids that broadcast to ``shape``; None is an operand without ids."""
        return self.add(NodeKind.ELEMENTWISE, op, shape, *(x.expand(shape) for x in operands if x is not None))

    def contraction(self, op: str, a: Factor, b: Factor) -> Tensor:
        """Add sums of products of two tensors."""
        for hot, table in ((a, b), (b, a)):
            if (taken := self._one_hot_lookup(op, hot, table)) is not None:
                return taken
        operands = [self._operand(*factor) for factor in (a, b)]
        shape = tuple(operands[0].shape[:-1])
        known = [operand for operand in operands if any(self.dependence(operand))]
        if len(known) < 2:  # one factor is a constant; one number at all places makes it a sum
            (constant, _), ids = (a, operands[1]) if any(self.dependence(operands[1])) else (b, operands[0])
            if len(constant.unique()) > 1 or isinstance(ids, Region):
                return self.add(NodeKind.OTHER, op, shape, *known)
            terms = self.stacked(shape, ids)
            return self.add(NodeKind.REDUCTION, op, shape, *known) if terms is None else terms
        return self.add(NodeKind.CONTRACTION, op, shape, *operands)

    def stacked(self, shape: tuple[int, ...], ids: Tensor) -> Tensor | None:
        """Add a sum over the last axis of tensors that were stacked; None for the units of a token."""
        made = ids
        while (node := self.owner(made)) is not None and node.kind is NodeKind.ELEMENTWISE and len(node.tensors) == 1:
            made = node.tensors[0][node.place(made)]  # of what a stack was multiplied by
        if node is not None or without_repeats(ids[..., 0]).numel() <= self.count:
            return None
        slices = [(one, own) for one, own in zip(ids.unbind(-1), made.unbind(-1), strict=True) if bool((own != NO_ID).any())]
        owners = {id(self.owner(own)) for _, own in slices if self.owner(own) or self.is_source(own)}
        return self.elementwise("add", shape, *(one.view(shape) for one, _ in slices)) if len(owners) == len(slices) > 0 else None

    def _operand(self, tensor: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor | Region:
        """Return the ids of ``view(tensor)``, where ``view`` makes views only; as a region for a source."""
        region = self.region(view(tensor)) if self.region(tensor) is not None else None
        return view(self.or_blank(tensor)) if region is None else region

    def _one_hot_lookup(self, op: str, hot: Factor, table: Factor) -> Tensor | None:
        """Record a product with one-hot vectors as a lookup if the vectors depend on tokens; None for other products."""
        if self.region(hot[0]) is not None or not self.has(table[0]):
            return None
        need = self.dependence(self.or_blank(hot[0]))
        once = without_repeats(values := hot[1](hot[0]))
        if need.sources or not once.numel() or not bool((((once == 1).sum(-1) == 1) & ((once != 0).sum(-1) == 1)).all()):
            return None
        index = once.argmax(-1).expand(values.shape[:-1])
        operand = self._operand(*table)
        entries = operand.ids() if isinstance(operand, Region) else operand
        taken = entries.gather(-1, index[..., None])[..., 0]
        return self.add(NodeKind.LOOKUP, op, taken.shape, taken, index=index) if need.tokens else taken

    def owner(self, ids: Tensor) -> Node | None:
        """Return the one node that computed all these elements, or None."""
        owners = _spans(self._starts, ids)
        return self.nodes[owners[0] - 2] if len(owners) == 1 and owners[0] >= 2 else None

    def dependence(self, operand: Tensor | Region) -> Dependence:
        """Return what any of these elements depends on."""
        if isinstance(operand, Region):
            return Dependence(False, True)
        known = [self._dependences[number] for number in _spans(self._starts, operand) if number >= 0]
        return Dependence(any(one.tokens for one in known), any(one.sources for one in known))

    def is_source(self, operand: Tensor | Region) -> bool:
        """Return whether all elements are parameters or buffers themselves."""
        return isinstance(operand, Region) or _spans(self._starts, operand) == [0]


def _region(first: int, tensor: Tensor) -> Region:
    return Region(first + int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
