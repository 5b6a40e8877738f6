"""What every number in a forward pass is made of, down to the single element.

Shadow memory, as memory debuggers keep it: beside each storage that a parameter or the token ids reach lies an integer tensor
that says, element for element, where the number came from. Views share their storage's shadow, so transposing, slicing,
splitting and writing in place need no code here; an operator that copies is replayed on the shadows; an operator that computes
becomes a :class:`Node`, and its results get ids of their own. Nothing depends on names, module types or values, so one recording
sees functions, einsum, ``nn.MultiheadAttention`` and hand-written layer norms alike.
"""

from __future__ import annotations

import bisect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NOWHERE = -1  # the id of a number that neither a parameter nor a token had a part in


class Kind(Enum):
    """What an operator does to single elements."""

    LOOKUP = "lookup"  # rows of a table, chosen by the token ids (or multiplied by their one-hot vectors)
    CONTRACTION = "contraction"  # sums of products: matrix products, convolutions of width one
    ELEMENTWISE = "elementwise"  # each result from the elements at its own place
    ROWWISE = "rowwise"  # of its input's shape, each result from its own place and its neighbours: softmax, layer norm
    REDUCTION = "reduction"  # mean, variance, maximum
    OTHER = "other"


@dataclass(frozen=True)
class Region:
    """Ids of a view into a parameter, as strides: its element at ``place`` has the id ``start + sum(place * stride)``."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last(self) -> int:
        """The largest id in it."""
        return self.start + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def ids(self) -> Tensor:
        """All of them; one int64 per element."""
        axes = enumerate(zip(self.shape, self.strides, strict=True))
        along = [(torch.arange(n) * stride).view([-1] + [1] * (len(self.shape) - axis - 1)) for axis, (n, stride) in axes]
        return reduce(operator.add, along, torch.tensor(self.start)).expand(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def __getitem__(self, place: tuple[Tensor, ...]) -> Tensor:
        """As ``tensor[place]``, where ``place`` fixes the leading axes and leaves the last."""
        *leading, last = self.strides
        start = sum((index * stride for index, stride in zip(place, leading, strict=True)), torch.tensor(self.start))
        return start[..., None] + torch.arange(self.shape[-1]) * last


@dataclass(frozen=True)
class Node:
    """One computing operator; its results bear the ids ``start`` to ``start + numel - 1``, in the order of ``shape``.

    ``operands`` are ids broadcast to ``shape``, except those of a contraction, which have the summed axis behind it, and those
    of reductions and others, which have their own shapes. Numbers from nowhere are left out.
    """

    kind: Kind
    op: str  # "add", "bmm", "_softmax"
    start: int
    shape: tuple[int, ...]
    operands: tuple[Tensor | Region, ...]
    live: bool  # depends on the token ids
    weight: int | None = None  # which operand of a contraction is made of parameters alone
    index: Tensor | None = field(default=None, repr=False)  # of a lookup: the row that each result was taken from

    @property
    def numel(self) -> int:
        return reduce(operator.mul, self.shape, 1)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def place(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Coordinates of results in ``shape``."""
        return torch.unravel_index(ids - self.start, self.shape)


@dataclass(frozen=True)
class Source:
    """A parameter or buffer: a region of ids, and of the storage that other names may share."""

    name: str
    region: Region
    storage: int  # the first id of the storage
    is_parameter: bool


@dataclass(frozen=True)
class Recording:
    """A forward pass on ``ids``: sources first in the numbering, then the token ids, then every node in order of execution."""

    sources: tuple[Source, ...]
    ids: Tensor
    tokens: int  # the id of the first token; every smaller id is a parameter's or buffer's
    nodes: tuple[Node, ...]
    output: Tensor  # ids of the logits
    unfollowed: tuple[str, ...]  # operators that could not be replayed, so that what they returned came from nowhere

    @property
    def stop(self) -> int:
        return self.nodes[-1].stop if self.nodes else self.tokens + self.ids.numel()

    def owner(self, id: Tensor | int) -> int:
        """Index of the node that computed an element; -1 for a source, a token and nowhere."""
        return int(torch.searchsorted(self._starts, torch.as_tensor(int(id)), right=True)) - 1

    def owners(self, ids: Tensor) -> Tensor:
        """:meth:`owner` of many elements."""
        return torch.searchsorted(self._starts, ids.contiguous(), right=True) - 1

    @property
    def _starts(self) -> Tensor:
        starts = self.__dict__.get("starts")
        if starts is None:
            starts = torch.tensor([node.start for node in self.nodes], dtype=torch.int64)
            object.__setattr__(self, "starts", starts)
        return starts


@torch.no_grad()
def record(module: nn.Module, ids: Tensor) -> Recording:
    """Run ``module`` on (B, T) ``ids``, distinct from each other, and take down what every number is made of.

    The module runs as it is, with its weights and dtype; dropout should be off. Values play no part, with one exception: a
    product with one-hot vectors is a lookup, and is seen to be one.

    Raises:
        whatever the module raises, and ValueError where its output holds no tensor of floating-point numbers.
    """
    with ExitStack() as stack:
        stack.enter_context(_plain_attention())
        recorder = _Recorder(module, ids)
        with recorder:
            output = logits_of(module(ids))
        result = recorder.ids_of(output)
    if result is None:
        result = torch.full(output.shape, NOWHERE)
    return Recording(
        tuple(recorder.sources), ids, recorder.tokens, tuple(recorder.nodes), result, tuple(sorted(recorder.unfollowed))
    )


def logits_of(output: Any) -> Tensor:
    """The logits in whatever a forward returns: a tensor; an object or dict with ``logits``; the first of a tuple that could be.

    Raises:
        ValueError: no tensor of floating-point numbers in it.
    """
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    candidates = [output] if named is None else [named]
    if named is None and not isinstance(output, Tensor):
        candidates = tree_flatten(dict(output) if isinstance(output, dict) else output)[0]
        candidates = [part for part in candidates if isinstance(part, Tensor)] or list(
            vars(output).values() if hasattr(output, "__dict__") else []
        )
    found = [part for part in candidates if isinstance(part, Tensor) and part.is_floating_point() and part.ndim >= 2]
    if not found:
        raise ValueError(f"its forward returns {type(output).__name__}, and no logits in it")
    return found[0]


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention spelt out in operators: no fused kernel, and no compiled graph."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if "torch._dynamo" in sys.modules:  # seconds to import, and without it nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


# Operators that copy elements and compute nothing: replayed on the shadows. Arguments of these names are what is copied.
MOVES = set(
    "clone _to_copy copy copy_ cat stack index index_select gather embedding take constant_pad_nd repeat repeat_interleave roll flip "
    "slice_scatter select_scatter index_put index_put_ index_copy index_copy_ diag_embed view_copy permute_copy expand_copy "
    "slice_copy select_copy t_copy transpose_copy unsqueeze_copy squeeze_copy split_copy unbind_copy _reshape_copy masked_select".split()
)
MOVED = {"self", "tensors", "src", "source", "values", "value", "weight", "input"}
CHOOSERS = {"embedding", "index", "index_select", "gather"}
FACTORIES = set("zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty".split())
ROWWISE = set("_softmax _log_softmax _safe_softmax cumsum tril triu native_dropout _fused_rms_norm native_group_norm".split())
REDUCTIONS = set(
    "mean sum var std var_mean std_mean amax amin max min norm linalg_vector_norm logsumexp prod any all argmax argmin".split()
)


class _Recorder(TorchDispatchMode):
    def __init__(self, module: nn.Module, ids: Tensor) -> None:
        super().__init__()
        self.next = 0
        self.sources: list[Source] = []
        self.nodes: list[Node] = []
        self.starts: list[int] = []  # of the nodes
        self.unfollowed: set[str] = set()
        self.parameters: dict[int, int] = {}  # storage -> its first id
        self.shadows: dict[int, tuple[Tensor, int]] = {}  # storage -> ids of its elements, and their size in bytes
        self.alive: list[Any] = []  # storages, lest the memory of one becomes another's
        self.live: set[int] = set()  # nodes that depend on the tokens
        self.weighted: set[int] = set()  # nodes that depend on a source
        self._add_sources(module)
        self.tokens = self.next
        self._write(ids, self._fresh(ids.shape))
        self.ids = ids
        # Nodes come after the tokens, so an id at or above this is a node's.
        self.first_node = self.next

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and marking it so would import the compiler, for seconds."""
        return False

    def _add_sources(self, module: nn.Module) -> None:
        named = [(name, parameter, True) for name, parameter in module.named_parameters(remove_duplicate=False)]
        named += [(name, b, False) for name, b in module.named_buffers(remove_duplicate=False) if b.is_floating_point()]
        for name, tensor, is_parameter in named:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.parameters:
                self.alive.append(storage)
                self.parameters[storage._cdata] = self.next
                self.next += storage.nbytes() // tensor.element_size()
            start = self.parameters[storage._cdata]
            self.sources.append(Source(name, self._region(tensor, start), start, is_parameter))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket in _FUSED_ATTENTION:
            with self:
                return _FUSED_ATTENTION[func._overloadpacket](func, args, kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        try:
            self._follow(func, args, kwargs, result)
        except Exception:
            self.unfollowed.add(str(func))
            for tensor in _tensors(result):
                self._write(tensor, torch.full(tensor.shape, NOWHERE))
        return result

    # Shadows

    def ids_of(self, tensor: Tensor) -> Tensor | None:
        """Ids of a tensor's elements now, or None where all came from nowhere."""
        storage = tensor.untyped_storage()._cdata
        if storage in self.parameters:
            return self._region(tensor, self.parameters[storage]).ids()
        shadow = self._shadow(tensor)
        return None if shadow is None else shadow.clone()

    def _shadow(self, tensor: Tensor) -> Tensor | None:
        shadow, size = self.shadows.get(tensor.untyped_storage()._cdata, (None, 0))
        if shadow is None or size != tensor.element_size():
            return None
        return shadow.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _write(self, tensor: Tensor, ids: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.shadows:
            self.alive.append(storage)
            elements = storage.nbytes() // tensor.element_size()
            self.shadows[storage._cdata] = torch.full((elements,), NOWHERE), tensor.element_size()
        shadow = self._shadow(tensor)
        if shadow is not None:
            shadow.copy_(ids)

    @staticmethod
    def _region(tensor: Tensor, start: int) -> Region:
        return Region(start + tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))

    def _fresh(self, shape: tuple[int, ...]) -> Tensor:
        numel = reduce(operator.mul, shape, 1)
        ids = torch.arange(self.next, self.next + numel).view(shape)
        self.next += numel
        return ids

    def node_of(self, ids: Tensor) -> Node | None:
        """The one node that all these elements are results of, if there is one."""
        if not self.nodes or int(ids.min()) < self.nodes[0].start:
            return None
        at = [bisect.bisect_right(self.starts, int(id)) - 1 for id in (ids.min(), ids.max())]
        return self.nodes[at[0]] if at[0] == at[1] else None

    # Operators

    def _follow(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        mutates = func._schema.is_mutable
        if not mutates:
            outputs = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]  # what remains is no view
        if not outputs:
            return
        if name.strip("_") in FACTORIES or all(not self._tracked(tensor) for tensor in inputs):
            return  # made of nothing; what it may have overwritten was nothing before
        base = name.removesuffix("_") if mutates and not name.startswith("__") else name
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if name in MOVES:
            self._move(func, base, args, kwargs, named, outputs[0])
        elif base in _HANDLERS:
            _HANDLERS[base](self, base, named, outputs)
        elif torch.Tag.pointwise in func.tags:
            self._write(outputs[0], self._elementwise(base, outputs[0].shape, inputs))
        else:
            self._rest(base, inputs, outputs)

    def _tracked(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return storage in self.parameters or storage in self.shadows

    def _node(self, kind: Kind, op: str, shape: tuple[int, ...], operands: list[Any], **more: Any) -> Tensor:
        ids = self._fresh(tuple(shape))
        natures = [self._nature(operand) for operand in operands]
        live, weighted = kind is Kind.LOOKUP or any(live for live, _ in natures), any(weighted for _, weighted in natures)
        self.live |= {len(self.nodes)} if live else set()
        self.weighted |= {len(self.nodes)} if weighted else set()
        self.starts.append(self.next - ids.numel())
        self.nodes.append(Node(kind, op, self.next - ids.numel(), tuple(shape), tuple(operands), live, **more))
        return ids

    def _nature(self, operand: Tensor | Region | None) -> tuple[bool, bool]:
        """Whether numbers depend on the tokens, and whether on a source."""
        if operand is None or isinstance(operand, Region):
            return False, operand is not None
        ids = operand.as_strided([n if s else 1 for n, s in zip(operand.shape, operand.stride(), strict=True)], operand.stride())
        starts = torch.tensor(self.starts, dtype=torch.int64)
        owners = (torch.searchsorted(starts, ids.contiguous(), right=True) - 1).unique().tolist()
        token = bool(((ids >= self.tokens) & (ids < self.first_node)).any())
        source = bool(((ids >= 0) & (ids < self.tokens)).any())
        return token or any(n in self.live for n in owners), source or any(n in self.weighted for n in owners)

    def _elementwise(self, op: str, shape: tuple[int, ...], inputs: list[Any]) -> Tensor:
        """A node over tensors (or ids already found) that broadcast to ``shape``."""
        ids = [self.ids_of(x) if not isinstance(x, _Ids) else x.ids for x in inputs]
        return self._node(Kind.ELEMENTWISE, op, shape, [x.expand(shape) for x in ids if x is not None])

    def _move(self, func: Any, op: str, args: tuple, kwargs: dict, named: dict[str, Any], output: Tensor) -> None:
        def shadow(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            ids = self.ids_of(x)
            return torch.full(x.shape, NOWHERE) if ids is None else ids

        swap = {name: tree_map(shadow, value) if name in MOVED else value for name, value in named.items()}
        if op == "_to_copy":
            self._write(output, swap["self"])
            return
        if op == "constant_pad_nd":
            swap["value"] = NOWHERE
        if op == "copy":  # with or without its underscore: the source, broadcast
            self._write(output, swap["src"].expand(output.shape))
            return
        moved = func(**swap)
        chosen = self._chosen(func, named) if op in CHOOSERS else None
        if chosen is not None:
            moved = self._node(Kind.LOOKUP, op, moved.shape, [moved], index=chosen)
        self._write(output, moved)

    def _chosen(self, func: Any, named: dict[str, Any]) -> Tensor | None:
        """For each element taken from a table by indices that depend on the tokens, which row it was taken from."""
        table = named.get("weight", named.get("self"))
        indices = named.get("indices", named.get("index"))
        indices = list(indices) if isinstance(indices, list | tuple) else [indices]
        live = [axis for axis, index in enumerate(indices) if index is not None and self._nature(self.ids_of(index))[0]]
        if not live:
            return None
        axis = named.get("dim", live[0])
        rows = torch.arange(table.shape[axis]).view([-1 if i == axis % table.ndim else 1 for i in range(table.ndim)])
        return func(**(named | {"weight" if "weight" in named else "self": rows.expand(table.shape)}))

    def _contraction(self, op: str, a: Tensor, b: Tensor, along: tuple[Callable, Callable]) -> Tensor:
        """Sums of products of ``a`` and ``b``, each brought into the shape (\\*results, summed) by a function of ``along``."""
        one_hot = self._one_hot(op, a, b, along)
        if one_hot is not None:
            return one_hot
        operands, natures = [], []
        for tensor, view in zip((a, b), along, strict=True):
            storage = tensor.untyped_storage()._cdata
            if storage in self.parameters:
                operands.append(self._region(view(tensor), self.parameters[storage]))
                natures.append("weight")
                continue
            ids = self.ids_of(tensor)
            ids = torch.full(tensor.shape, NOWHERE) if ids is None else ids
            natures.append(
                "weight" if bool(((ids >= 0) & (ids < self.tokens)).all()) else "nowhere" if bool((ids < 0).all()) else ""
            )
            operands.append(view(ids))
        shape = tuple(operands[0].shape[:-1])
        if "nowhere" in natures:
            return self._node(
                Kind.OTHER, op, shape, [x for x, nature in zip(operands, natures, strict=True) if nature != "nowhere"]
            )
        weight = natures.index("weight") if natures.count("weight") == 1 else None
        return self._node(Kind.CONTRACTION, op, shape, operands, weight=weight)

    def _one_hot(self, op: str, a: Tensor, b: Tensor, along: tuple[Callable, Callable]) -> Tensor | None:
        """A product with one-hot vectors takes elements out of the other factor; then their ids, as a lookup if tokens chose."""
        for hot, table, view, other in ((a, b, along[0], along[1]), (b, a, along[1], along[0])):
            live, weighted = self._nature(self.ids_of(hot))
            if weighted or not hot.numel():
                continue
            hot = view(hot)
            small = hot.as_strided([n if s else 1 for n, s in zip(hot.shape, hot.stride(), strict=True)], hot.stride())
            if not bool((((small == 1).sum(-1) == 1) & ((small != 0).sum(-1) == 1)).all()):
                continue
            index = small.argmax(-1).expand(hot.shape[:-1])
            places = torch.meshgrid(*(torch.arange(n) for n in index.shape), indexing="ij")
            ids = self.ids_of(table)
            if ids is None:
                continue
            moved = other(ids)[(*places, index)]
            return self._node(Kind.LOOKUP, op, moved.shape, [moved], index=index) if live else moved
        return None

    def _rest(self, op: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        tracked = [(tensor, ids) for tensor in inputs if (ids := self.ids_of(tensor)) is not None]
        for number, output in enumerate(outputs):
            like = [ids for tensor, ids in tracked if tensor.shape == output.shape and tensor.is_floating_point()]
            if op in REDUCTIONS or number > 0:
                kind, operands = Kind.REDUCTION, [ids for _, ids in tracked]
            elif op in ROWWISE or (like and output.is_floating_point()):
                kind, operands = Kind.ROWWISE, like[:1]
            else:
                kind, operands = Kind.OTHER, [ids for _, ids in tracked]
            self._write(output, self._node(kind, op, output.shape, operands))


@dataclass(frozen=True)
class _Ids:
    """Ids where a tensor would stand: an intermediate result of an operator that does several things."""

    ids: Tensor


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _rows(n: int) -> Callable[[Tensor], Tensor]:
    """(..., I, K) to (..., I, n, K)."""
    return lambda x: x.unsqueeze(-2).expand(*x.shape[:-1], n, x.shape[-1])


def _columns(n: int) -> Callable[[Tensor], Tensor]:
    """(..., K, J) to (..., n, J, K)."""
    return lambda x: x.mT.unsqueeze(-3).expand(*x.shape[:-2], n, x.shape[-1], x.shape[-2])


def _product(recorder: _Recorder, op: str, a: Tensor, b: Tensor) -> Tensor:
    """(..., I, K) times (..., K, J)."""
    return recorder._contraction(op, a, b, (_rows(b.shape[-1]), _columns(a.shape[-2])))


def _mm(recorder: _Recorder, op: str, named: dict[str, Any], outputs: list[Tensor]) -> None:
    recorder._write(outputs[0], _product(recorder, op, named["self"], named["mat2"]))


def _addmm(recorder: _Recorder, op: str, named: dict[str, Any], outputs: list[Tensor]) -> None:
    a, b = (named["mat1"], named["mat2"]) if "mat1" in named else (named["batch1"], named["batch2"])
    product = _Ids(_product(recorder, op, a, b))
    recorder._write(outputs[0], recorder._elementwise("add", outputs[0].shape, [product, named["self"]]))


def _mv(recorder: _Recorder, op: str, named: dict[str, Any], outputs: list[Tensor]) -> None:
    rows = named["self"].shape[0]
    along = (lambda x: x, lambda x: x.expand(rows, -1))
    recorder._write(outputs[0], recorder._contraction(op, named["self"], named["vec"], along))


def _convolution(recorder: _Recorder, op: str, named: dict[str, Any], outputs: list[Tensor]) -> None:
    """(B, C, ...) with a kernel of width one; any other mixes positions, and is no GPT-2's."""
    x, kernel, bias = named["input"], named["weight"], named.get("bias")
    if kernel.shape[2:].numel() != 1 or named.get("groups", 1) != 1 or named.get("transposed"):
        return recorder._rest(op, [x, kernel], outputs)
    shape = outputs[0].shape
    along = (
        lambda x: x.movedim(1, -1).unsqueeze(1).expand(*shape, -1),
        lambda w: w.flatten(1).view(1, shape[1], *[1] * (len(shape) - 2), -1).expand(*shape, -1),
    )
    result = recorder._contraction(op, x, kernel, along)
    if bias is not None:
        result = recorder._elementwise("add", shape, [_Ids(result), bias.view(-1, *[1] * (len(shape) - 2))])
    return recorder._write(outputs[0], result)


def _layer_norm(recorder: _Recorder, op: str, named: dict[str, Any], outputs: list[Tensor]) -> None:
    x, scale, shift = named["input"], named.get("weight"), named.get("bias")
    result = recorder._node(Kind.ROWWISE, op, x.shape, [recorder.ids_of(x)])
    for name, parameter in (("mul", scale), ("add", shift)):
        if parameter is not None:
            result = recorder._elementwise(name, x.shape, [_Ids(result), parameter])
    recorder._write(outputs[0], result)


def _sum(recorder: _Recorder, op: str, named: dict[str, Any], outputs: list[Tensor]) -> None:
    """A sum of products is a contraction, and a sum over contractions (heads, say) a longer one; any other is a reduction."""
    x, dims = named["self"], named.get("dim")
    ids, dims = recorder.ids_of(x), [dims] if isinstance(dims, int) else list(dims or range(x.ndim))
    node = recorder.node_of(ids)
    long = node is not None and node.kind is Kind.CONTRACTION and node.weight is not None
    product = node is not None and node.op == "mul" and len(node.operands) == 2 and not torch.equal(*node.operands)
    if not long and not product:
        return recorder._rest(op, [x], outputs)
    kept = [axis for axis in range(x.ndim) if axis not in [d % x.ndim for d in dims]]
    place = node.place(ids.permute(*kept, *dims).flatten(len(kept)))
    operands = [operand[place] for operand in node.operands]  # (*kept, summed), or (*kept, summed, summed before)
    operands = [operand.flatten(len(kept)) for operand in operands]
    natures = [recorder._nature(operand) for operand in operands]
    if not all(live or weighted for live, weighted in natures):
        return recorder._rest(op, [x], outputs)
    weights = [number for number, (live, weighted) in enumerate(natures) if not live]
    shape = tuple(operands[0].shape[:-1])
    result = recorder._node(Kind.CONTRACTION, op, shape, operands, weight=weights[0] if len(weights) == 1 else None)
    return recorder._write(outputs[0], result.view(outputs[0].shape))


def _addcmul(recorder: _Recorder, op: str, named: dict[str, Any], outputs: list[Tensor]) -> None:
    inner = recorder._elementwise(op.removeprefix("addc"), outputs[0].shape, [named["tensor1"], named["tensor2"]])
    recorder._write(outputs[0], recorder._elementwise("add", outputs[0].shape, [named["self"], _Ids(inner)]))


_HANDLERS: dict[str, Callable[[_Recorder, str, dict[str, Any], list[Tensor]], None]] = {
    "sum": _sum,
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "mv": _mv,
    "convolution": _convolution,
    "native_layer_norm": _layer_norm,
    "addcmul": _addcmul,
    "addcdiv": _addcmul,
}


def _spelt_out(func: Any, args: tuple, kwargs: dict) -> tuple[Any, ...]:
    """A fused attention kernel that a port insists on, computed by plain operators; further results are for the backward."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    mask = named.get("attn_mask", named.get("attn_bias"))
    out, weights = torch.ops.aten._scaled_dot_product_attention_math(
        named["query"], named["key"], named["value"], mask, 0.0, named.get("is_causal", False), scale=named.get("scale")
    )
    return (out, weights, *[None] * (len(func._schema.returns) - 2))


_FUSED_ATTENTION = {
    packet: _spelt_out
    for packet in map(
        partial(getattr, torch.ops.aten),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
    )
}
