"""Taking down a forward pass, operator by operator.

A dispatch mode sees every operator that reaches a kernel. One that makes a view needs nothing, because its result lies in the
same storage; one that copies is replayed on the ids; one that computes becomes a node, and its results get ids of their own.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gpt2.port.recording.dataflow import NOWHERE, Kind, Node, Region
from gpt2.port.recording.operators import (
    BLANKS,
    FUSED_ATTENTION,
    HANDLERS,
    MOVED,
    MOVES,
    REDUCTIONS,
    ROWWISE,
    TAKES,
    Ids,
    spelt_out,
)
from gpt2.port.recording.shadows import Shadows

Factor = tuple[Tensor, Callable[[Tensor], Tensor]]  # of a contraction: a tensor, and how to view it as (*results, summed)


class Recorder(TorchDispatchMode):
    """While entered, takes down every operator. ``nodes`` and ``shadows`` hold the result."""

    def __init__(self, module: nn.Module, ids: Tensor) -> None:
        super().__init__()
        self.shadows = Shadows(module, ids)
        self.nodes: list[Node] = []
        self.unfollowed: set[str] = set()
        self._starts: list[int] = []
        self._weighted: list[bool] = []  # of each node: whether a source had a part in it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and saying so to torch would import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket in FUSED_ATTENTION:
            with self:
                return spelt_out(_named(func, args, kwargs), len(func._schema.returns))
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # as inference mode hands it down: still to be taken apart
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        try:
            self._follow(func, args, kwargs, result)
        except Exception:  # an operator used in a way not foreseen here must not keep the module from running
            self.unfollowed.add(str(func))
            for tensor in _tensors(result):
                self.shadows.write(tensor, torch.full(tensor.shape, NOWHERE))
        return result

    def _follow(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        name, writes = func._schema.name.removeprefix("aten::"), func._schema.is_mutable
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        if not writes:  # what lies in an input's storage is a view of it
            known = {tensor.untyped_storage()._cdata for tensor in inputs}
            outputs = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
        if not outputs or name in BLANKS or not any(self.shadows.knows(tensor) for tensor in inputs):
            return
        named = _named(func, args, kwargs)
        op = name.removesuffix("_") if writes and not name.startswith("__") else name
        if not writes and (changed := self._changed(op, named)) is not None:
            self.shadows.write(outputs[0], self.shadows.ids_of(changed[0][0]))
            self.shadows.make(outputs[0], *changed)
            return
        if name in MOVES:
            self.shadows.write(outputs[0], self._moved(func, op, named, outputs[0]))
            return
        for tensor in inputs:
            self.shadows.use(tensor)
        if op in HANDLERS and (ids := HANDLERS[op](self, named, outputs[0].shape)) is not None:
            self.shadows.write(outputs[0], ids)
        elif torch.Tag.pointwise in func.tags:
            self.shadows.write(outputs[0], self.elementwise(op, outputs[0].shape, *inputs))
        else:
            self._rest(op, inputs, outputs)

    # Nodes

    def node(self, kind: Kind, op: str, shape: tuple[int, ...], *operands: Tensor | Region, **more: Any) -> Tensor:
        """Ids of a new node's results."""
        natures = [self.nature(operand) for operand in operands]
        ids = self.shadows.fresh(shape)
        self._starts.append(self.shadows.next - ids.numel())
        self._weighted.append(any(weighted for _, weighted in natures))
        live = kind is Kind.LOOKUP or any(live for live, _ in natures)
        self.nodes.append(Node(kind, op, self._starts[-1], tuple(shape), operands, live, **more))
        return ids

    def elementwise(self, op: str, shape: tuple[int, ...], *inputs: Tensor | Ids) -> Tensor:
        """A node over whatever broadcasts to ``shape``."""
        ids = [x.ids if isinstance(x, Ids) else self.shadows.ids_of(x) for x in inputs]
        return self.node(Kind.ELEMENTWISE, op, shape, *(x.expand(shape) for x in ids if x is not None))

    def contraction(self, op: str, *factors: Factor) -> Tensor:
        """Sums of products of two tensors."""
        taken = self._by_one_hot(op, *factors) or self._by_one_hot(op, *factors[::-1])
        if taken is not None:
            return taken.ids
        operands = [self.shadows.operand(*factor) for factor in factors]
        natures = [self.nature(operand) for operand in operands]
        shape = tuple(operands[0].shape[:-1])
        known = [operand for operand, nature in zip(operands, natures, strict=True) if any(nature)]
        if len(known) < 2:  # with constants
            return self.node(Kind.OTHER, op, shape, *known)
        weights = [number for number, operand in enumerate(operands) if self._from_sources(operand)]
        return self.node(Kind.CONTRACTION, op, shape, *operands, weight=weights[0] if len(weights) == 1 else None)

    def owner(self, ids: Tensor) -> Node | None:
        """The one node that all these elements are results of, if there is one."""
        if not ids.numel():
            return None
        ends = [bisect.bisect_right(self._starts, int(id)) - 1 for id in ids.aminmax()]
        return self.nodes[ends[0]] if ends[0] == ends[1] >= 0 else None

    def nature(self, operand: Tensor | Region) -> tuple[bool, bool]:
        """Whether elements depend on the tokens, and whether on a source."""
        if isinstance(operand, Region):
            return False, True
        ids = _once(operand)
        if not ids.numel():
            return False, False
        low, high = (int(end) for end in ids.aminmax())
        if high < self.shadows.tokens:
            return False, high >= 0
        first, last = (bisect.bisect_right(self._starts, end) - 1 for end in (low, high))
        owners = [last]
        if first != last:
            owners = (torch.searchsorted(torch.tensor(self._starts), ids.contiguous(), right=True) - 1).unique().tolist()
        token = bool(((ids >= self.shadows.tokens) & (ids < self.shadows.computed)).any())
        source = 0 <= low < self.shadows.tokens or bool(((ids >= 0) & (ids < self.shadows.tokens)).any())
        return (
            token or any(self.nodes[number].live for number in owners if number >= 0),
            source or any(self._weighted[number] for number in owners if number >= 0),
        )

    def _from_sources(self, operand: Tensor | Region) -> bool:
        """Whether elements are parameters themselves."""
        if isinstance(operand, Region) or not operand.numel():
            return isinstance(operand, Region)
        low, high = _once(operand).aminmax()
        return int(low) >= 0 and int(high) < self.shadows.tokens

    # Copies

    def _changed(self, op: str, named: dict[str, Any]) -> tuple[list[Tensor], float, float] | None:
        """Of sources (or copies of some) that a constant is applied to: them, the scale and the shift. The ids stay."""
        x, constant = named.get("self"), named.get("other", 0.0)
        if op not in ("mul", "div", "add", "sub", "neg") or not isinstance(x, Tensor) or named.get("rounding_mode"):
            return None
        if op in ("mul", "add") and isinstance(constant, Tensor) and self.shadows.made_of(x) is None:
            x, constant = constant, x  # the constant came first
        if isinstance(constant, Tensor):
            constant = constant.item() if constant.numel() == 1 and not self.shadows.knows(constant) else None
        if constant is None or self.shadows.made_of(x) is None or (op in ("mul", "div") and not constant):
            return None
        constant = float(constant) * (named.get("alpha", 1) if op in ("add", "sub") else 1)
        scale = {"mul": constant, "div": 1 / (constant or 1), "neg": -1.0}.get(op, 1.0)
        return [x], scale, {"add": constant, "sub": -constant}.get(op, 0.0)

    def _moved(self, func: Any, op: str, named: dict[str, Any], output: Tensor) -> Tensor:
        """Ids of what an operator copied, by having it copy ids."""

        def ids_of(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            ids = self.shadows.ids_of(x)
            return torch.full(x.shape, NOWHERE) if ids is None else ids

        if op in TAKES and (taken := self._taken(func, op, named, output)) is not None:
            return taken
        copied = {name: value for name, value in named.items() if name in MOVED}
        if op != "copy":
            self.shadows.make(output, _tensors(copied))
        if op in ("_to_copy", "copy"):
            return ids_of(named["src" if op == "copy" else "self"]).expand(output.shape)
        swapped = named | tree_map(ids_of, copied)
        return func(**swapped | ({"value": NOWHERE} if op == "constant_pad_nd" else {}))

    def _taken(self, func: Any, op: str, named: dict[str, Any], output: Tensor) -> Tensor | None:
        """Ids of what was taken from a table of sources (None: from another); a lookup, if the tokens had a part in the index."""
        table, index = named[TAKES[op]], named["indices" if "indices" in named else "index"]
        if self.shadows.made_of(table) is None:
            return None

        def take(numbers: Tensor) -> Tensor:
            return func(**named | {TAKES[op]: numbers})

        def coordinates(axis: int) -> Tensor:
            n = table.shape[axis]
            return take(torch.arange(n).view([-1 if i == axis else 1 for i in range(table.ndim)]).expand(table.shape))

        region = self.shadows.region(table)
        if region is None:
            ids = take(self.shadows.ids_of(table))
        else:  # without an id for every entry of a large table
            ids = region.start + sum(coordinates(axis) * stride for axis, stride in enumerate(region.strides))
        found = [(axis, x) for axis, x in enumerate(index if isinstance(index, list | tuple) else [index]) if x is not None]
        numbers = [(axis, self.shadows.ids_of(x)) for axis, x in found]
        chosen = [(axis, x) for axis, x in numbers if x is not None and self.nature(x)[0]]
        if not chosen:
            self.shadows.make(output, [table])
            return ids
        self.shadows.use(table)
        axis, by = chosen[0]
        axis = named.get("dim", axis) % table.ndim
        if by.shape != ids.shape:
            by = by.view([1] * axis + [*by.shape] + [1] * (ids.ndim - axis - by.ndim)).expand(ids.shape)
        return self.node(Kind.LOOKUP, op, ids.shape, ids, by, index=coordinates(axis))

    def _by_one_hot(self, op: str, hot: Factor, table: Factor) -> Ids | None:
        """A product with one-hot vectors takes elements out of the other factor: a lookup, if the tokens had a part in them."""
        ids = None if self.shadows.region(hot[0]) is not None else self.shadows.ids_of(hot[0])
        live, weighted = (False, False) if ids is None else self.nature(ids)
        if self.shadows.region(hot[0]) is not None or weighted or self.shadows.ids_of(table[0]) is None:
            return None
        values = hot[1](hot[0])
        once = _once(values)
        if not values.numel() or not bool((((once == 1).sum(-1) == 1) & ((once != 0).sum(-1) == 1)).all()):
            return None
        index = once.argmax(-1).expand(values.shape[:-1])
        operand = self.shadows.operand(*table)
        if isinstance(operand, Region):
            operand = operand.ids()
        taken = operand.gather(-1, index[..., None])[..., 0]
        return Ids(self.node(Kind.LOOKUP, op, taken.shape, taken, index=index) if live else taken)

    def _rest(self, op: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Operators of no special meaning here: rowwise if a result has an input's shape."""
        known = [(tensor, ids) for tensor in inputs if (ids := self.shadows.ids_of(tensor)) is not None]
        for number, output in enumerate(outputs):
            like = [ids for tensor, ids in known if tensor.shape == output.shape and tensor.is_floating_point()]
            if op in REDUCTIONS or number > 0:
                ids = self.node(Kind.REDUCTION, op, output.shape, *(ids for _, ids in known))
            elif like and (op in ROWWISE or output.is_floating_point()):
                ids = self.node(Kind.ROWWISE, op, output.shape, like[0])
            else:
                ids = self.node(Kind.OTHER, op, output.shape, *(ids for _, ids in known))
            self.shadows.write(output, ids)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _named(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs


def _once(tensor: Tensor) -> Tensor:
    """Without the repetitions of expanded axes: they count once, and stay."""
    kept = [n if stride or n == 0 else 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(kept, tensor.stride())
