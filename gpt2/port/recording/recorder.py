"""Record a forward pass, operator by operator: ``record``.

A view needs no work, since it shares its input's storage. A copy is replayed on the ids. A computation becomes a node, and its
results get new ids. A new operator goes into a set below, or into ``HANDLERS`` if it does several things, by torch's name.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.int8 import require_float
from gpt2.measure.user_code import error_at, logits_of, row_by_row
from gpt2.port.recording.dataflow import NO_ID, Graph, NodeKind, Recording
from gpt2.port.recording.dispatch import OperatorCall, OperatorMode, tensors
from gpt2.port.recording.forward import Borrowed, ForwardError, plain_attention

# Operators that only copy, and the arguments that are copied.
COPIES = set(
    """
    clone _to_copy copy copy_ cat stack index index_select gather embedding take constant_pad_nd repeat repeat_interleave roll
    flip slice_scatter select_scatter index_put index_put_ index_copy index_copy_ diag_embed masked_select view_copy permute_copy
    expand_copy slice_copy select_copy t_copy transpose_copy unsqueeze_copy squeeze_copy split_copy unbind_copy _reshape_copy
    """.split()  # noqa: SIM905
)
COPIED_ARGUMENTS = {"self", "tensors", "src", "source", "values", "value", "weight", "input"}
TABLES = {"embedding": "weight", "index": "self", "index_select": "self", "gather": "self"}  # the argument that is indexed
CONSTANTS = set(  # the results do not depend on any input's values
    "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty".split()  # noqa: SIM905
)
ROWWISE = {"_softmax", "_log_softmax", "_safe_softmax", "cumsum", "tril", "triu"}
REDUCTIONS = {"mean", "sum", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "prod", "any", "all"}
REDUCTIONS |= {"norm", "linalg_vector_norm", "logsumexp", "argmax", "argmin"}


# Handlers take the graph, the arguments by name and the first result's shape. They return the first result's ids, or None for
# the default rule.
Handler = Callable[[Graph, dict[str, Any], torch.Size], Tensor | None]


def _product(graph: Graph, a: Tensor, b: Tensor) -> Tensor:
    """Add (..., I, K) times (..., K, J)."""
    rows, columns = a.shape[-2], b.shape[-1]
    return graph.contraction(
        "mm",
        (a, lambda x: x.unsqueeze(-2).expand(*x.shape[:-1], columns, x.shape[-1])),
        (b, lambda x: x.mT.unsqueeze(-3).expand(*x.shape[:-2], rows, x.shape[-1], x.shape[-2])),
    )


def _addmm(graph: Graph, named: dict[str, Any], shape: torch.Size) -> Tensor:
    a, b = (named[name] for name in ("mat1", "mat2", "batch1", "batch2") if name in named)
    return graph.elementwise("add", shape, _product(graph, a, b), graph.of(named["self"]))


def _convolution(graph: Graph, named: dict[str, Any], shape: torch.Size) -> Tensor | None:
    """Add (B, C, ...) convolved by a kernel of width one; GPT-2 has no wider kernels, which mix positions."""
    kernel, bias = named["weight"], named.get("bias")
    if kernel.shape[2:].numel() != 1 or named.get("groups", 1) != 1 or named.get("transposed"):
        return None
    ones = [1] * (len(shape) - 2)
    result = graph.contraction(
        "convolution",
        (named["input"], lambda x: x.movedim(1, -1).unsqueeze(1).expand(*shape, -1)),
        (kernel, lambda x: x.view(1, shape[1], *ones, -1).expand(*shape, -1)),
    )
    return result if bias is None else graph.elementwise("add", shape, result, graph.of(bias.view(-1, *ones)))


def _layer_norm(graph: Graph, named: dict[str, Any], shape: torch.Size) -> Tensor:
    result = graph.add(NodeKind.ROWWISE, "layer_norm", shape, graph.or_blank(named["input"]))
    for op, parameter in (("mul", named.get("weight")), ("add", named.get("bias"))):
        if parameter is not None:
            result = graph.elementwise(op, shape, result, graph.of(parameter))
    return result


def _sum(graph: Graph, named: dict[str, Any], shape: torch.Size) -> Tensor | None:
    """Add a sum of products, or of contractions (over heads, for example), as one contraction."""
    x, dims = named["self"], named.get("dim")
    if (ids := graph.of(x)) is None:
        return None
    terms = graph.stacked(shape, ids.movedim(dims[0], -1)) if isinstance(dims, list) and len(dims) == 1 else None
    if terms is not None or (node := graph.owner(ids)) is None:
        return terms
    longer = node.kind is NodeKind.CONTRACTION and node.weight is not None
    product = node.op == "mul" and len(node.tensors) == 2 and not torch.equal(*node.tensors)
    if not longer and not product:
        return None
    summed = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims or range(x.ndim))]
    kept = [axis for axis in range(x.ndim) if axis not in summed]
    place = node.place(ids.permute(*kept, *summed).flatten(len(kept)))
    operands = [operand[place].flatten(len(kept)) for operand in node.operands]
    if sum(map(graph.is_source, operands)) > 1 or not all(any(graph.dependence(operand)) for operand in operands):
        return None
    return graph.add(NodeKind.CONTRACTION, "sum", operands[0].shape[:-1], *operands).view(shape)


HANDLERS: dict[str, Handler] = {
    "mm": lambda graph, named, shape: _product(graph, named["self"], named["mat2"]),
    "bmm": lambda graph, named, shape: _product(graph, named["self"], named["mat2"]),
    "addmm": _addmm,
    "baddbmm": _addmm,
    "mv": lambda graph, named, shape: _product(graph, named["self"], named["vec"][:, None])[..., 0],
    "convolution": _convolution,
    "native_layer_norm": _layer_norm,
    "native_dropout": lambda graph, named, shape: graph.elementwise("dropout", shape, graph.of(named["input"])),
    "sum": _sum,
    "mean": lambda graph, named, shape: None if graph.owner(graph.or_blank(named["self"])) else _sum(graph, named, shape),
}


@torch.no_grad()
def record(module: nn.Module, ids: Tensor, vocabulary: int | None = None) -> Recording:
    """Run ``module`` on distinct (B, T) ``ids`` and record each element's origin; ValueError if there are no logits.

    ``vocabulary``: how many columns the logits have at least, to tell them from other results.
    """
    recorder = Recorder(module, ids)
    with plain_attention(), recorder:
        output = logits_of(module(ids), ids, vocabulary)
    graph, unfollowed = recorder.graph, tuple(sorted(recorder.unfollowed))
    nodes, sources = tuple(graph.nodes), tuple(graph.sources)
    return Recording(sources, ids, graph.tokens, nodes, graph.or_blank(output), graph.uses, unfollowed)


class Recorder(OperatorMode):
    """While entered, adds every operator to ``graph``; ``unfollowed`` are those that it could not follow."""

    def __init__(self, module: nn.Module, ids: Tensor) -> None:
        super().__init__()
        self.graph = Graph(module, ids)
        self.unfollowed: set[str] = set()

    def handle(self, call: OperatorCall) -> Any:
        result = call.run()
        try:
            self._follow(call, result)
        except Exception:  # an operator that we cannot follow must not stop the module
            self.unfollowed.add(str(call.func))
            for tensor in tensors(result):
                self.graph.write(tensor, torch.full(tensor.shape, NO_ID))
        return result

    def _follow(self, call: OperatorCall, result: Any) -> None:
        inputs, outputs = call.inputs, tensors(result)
        if not call.writes:  # a result in an input's storage is a view
            known = {tensor.untyped_storage()._cdata for tensor in inputs}
            outputs = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
        if not outputs or call.name in CONSTANTS or not any(self.graph.has(tensor) for tensor in inputs):
            return
        output, named = outputs[0], call.named
        op = call.name.removesuffix("_") if call.writes and not call.name.startswith("__") else call.name
        if not call.writes and (changed := self._changed_source(op, named)) is not None:
            source, scale, shift = changed
            self.graph.write(output, self.graph.or_blank(source))
            self.graph.mark_copy(output, [source], scale, shift)
            return
        if call.name in COPIES:
            self.graph.write(output, self._copied(call.func, op, named, output))
            return
        for tensor in inputs:
            self.graph.mark_use(tensor)
        if op in HANDLERS and (ids := HANDLERS[op](self.graph, named, output.shape)) is not None:
            self.graph.write(output, ids)
        elif torch.Tag.pointwise in call.func.tags:
            self.graph.write(output, self.graph.elementwise(op, output.shape, *map(self.graph.of, inputs)))
        else:
            self._follow_other(op, inputs, outputs)

    def _follow_other(self, op: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Add operators without a rule of their own: rowwise if a result has an input's shape."""
        known = [(tensor, ids) for tensor in inputs if (ids := self.graph.of(tensor)) is not None]
        for number, output in enumerate(outputs):
            alike = [ids for tensor, ids in known if tensor.shape == output.shape and tensor.is_floating_point()]
            if op in REDUCTIONS or number > 0:
                ids = self.graph.add(NodeKind.REDUCTION, op, output.shape, *(ids for _, ids in known))
            elif alike and (op in ROWWISE or output.is_floating_point()):
                ids = self.graph.add(NodeKind.ROWWISE, op, output.shape, alike[0])
            else:
                ids = self.graph.add(NodeKind.OTHER, op, output.shape, *(ids for _, ids in known))
            self.graph.write(output, ids)

    def _changed_source(self, op: str, named: dict[str, Any]) -> tuple[Tensor, float, float] | None:
        """Return a source, or a copy of one, that a constant is applied to, with scale and shift; its ids stay."""
        x, constant = named.get("self"), named.get("other", 0.0)
        if op not in ("mul", "div", "add", "sub", "neg") or not isinstance(x, Tensor) or named.get("rounding_mode"):
            return None
        if op in ("mul", "add") and isinstance(constant, Tensor) and self.graph.copied_from(x) is None:
            x, constant = constant, x  # the constant is the first argument
        if isinstance(constant, Tensor):
            constant = constant.item() if constant.numel() == 1 and not self.graph.has(constant) else None
        if constant is None or self.graph.copied_from(x) is None or (op in ("mul", "div") and not constant):
            return None
        constant = float(constant) * (named.get("alpha", 1) if op in ("add", "sub") else 1)
        scale = {"mul": constant, "div": 1 / (constant or 1), "neg": -1.0}.get(op, 1.0)
        return x, scale, {"add": constant, "sub": -constant}.get(op, 0.0)

    def _copied(self, func: Callable[..., Tensor], op: str, named: dict[str, Any], output: Tensor) -> Tensor:
        """Return the ids of copied elements: run the operator on ids instead of values."""
        if op in TABLES and (taken := self._taken(func, op, named, output)) is not None:
            return taken
        copied = {name: value for name, value in named.items() if name in COPIED_ARGUMENTS}
        if op != "copy":
            self.graph.mark_copy(output, tensors(copied))
        if op in ("_to_copy", "copy"):
            return self.graph.or_blank(named["src" if op == "copy" else "self"]).expand(output.shape)
        on_ids = named | tree_map(lambda x: self.graph.or_blank(x) if isinstance(x, Tensor) else x, copied)
        return func(**on_ids | ({"value": NO_ID} if op == "constant_pad_nd" else {}))

    def _taken(self, func: Callable[..., Tensor], op: str, named: dict[str, Any], output: Tensor) -> Tensor | None:
        """Return the ids taken from a table of sources (a lookup, if the index depends on tokens); None for other tables."""
        table, index = named[TABLES[op]], named["indices" if "indices" in named else "index"]
        if self.graph.copied_from(table) is None:
            return None

        def take(numbers: Tensor) -> Tensor:
            return func(**named | {TABLES[op]: numbers})

        def coordinates(axis: int) -> Tensor:
            n = table.shape[axis]
            return take(torch.arange(n).view([-1 if i == axis else 1 for i in range(table.ndim)]).expand(table.shape))

        region = self.graph.region(table)
        if region is None:
            ids = take(self.graph.or_blank(table))
        else:  # do not build the ids of a whole large table
            steps = [coordinates(axis) * stride for axis, stride in enumerate(region.strides)]
            ids = torch.stack(steps).sum(0) + region.start
        numbers = enumerate(index if isinstance(index, list | tuple) else [index])
        with_ids = [(axis, by) for axis, x in numbers if x is not None and (by := self.graph.of(x)) is not None]
        chosen = [(axis, by) for axis, by in with_ids if self.graph.dependence(by).tokens]
        if not chosen:
            self.graph.mark_copy(output, [table])
            return ids
        self.graph.mark_use(table)
        axis, by = chosen[0]
        axis = named.get("dim", axis) % table.ndim
        if by.shape != ids.shape:
            by = by.view([1] * axis + [*by.shape] + [1] * (ids.ndim - axis - by.ndim)).expand(ids.shape)
        return self.graph.add(NodeKind.LOOKUP, op, ids.shape, ids, by, index=coordinates(axis))


def give_shapes(module: nn.Module, config: GPT2Config, name: str) -> None:
    """Make a module register its parameters (keras) and give lazy ones a shape by a call; InputError if they hold nothing."""
    for part in list(module.modules()):
        getattr(part, "_track_variables", part.named_parameters)()  # KerasHub loses what keras had registered
    require_float(module, "reading a module")
    if packed := [part for part, each in module.named_modules() if hasattr(each, "_packed_params")]:
        made = f"its layer {packed[0]} has packed int8 weights, as of torch.ao's quantize_dynamic, which hide the numbers"
        raise InputError(f"{name}: {made}; give the module as it was before")
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        raise InputError(f"{name}: its parameters are on the meta device and hold nothing; build it on the cpu")
    if any(is_lazy(tensor) for tensor in [*module.parameters(), *module.buffers()]):
        try:
            module(_probe(config.vocab_size, 2, min(5, config.n_positions)))
        except Exception as error:
            reason = error_at(error)
            raise ForwardError(f"{name}: its parameters have no shapes yet, and its forward fails ({reason})") from None


def record_probe(borrowed: Borrowed, config: GPT2Config, name: str) -> Recording:
    """Record a forward pass on a few tokens; if it fails, on small ids, row by row, on a full context. Raises ForwardError."""
    module, failures, own = borrowed.module, list[str](), type(borrowed.module)
    device = next(module.parameters(), torch.empty(0)).device
    short, vocabulary = min(5, config.n_positions), config.vocab_size
    attempts: list[tuple[bool | None, int, int, int]] = [(None, 2, short, n) for n in (vocabulary, min(6 * short, vocabulary))]
    attempts += [(False, 2, short, vocabulary), (True, 2, short, vocabulary), (None, 1, config.n_positions, vocabulary)]
    for flat, batch, length, ids in dict.fromkeys(attempts):
        borrowed.rewind()
        try:
            if (kind := own if flat is None else row_by_row(own, flat, vocabulary, failures[0])) is not type(module):
                module.__class__ = kind
            return record(module, _probe(ids, batch, length).to(device), config.vocab_size)
        except Exception as error:
            failures.append(error_at(error))
    raise ForwardError(f"{name}: its forward fails on ids of shape (2, {short}): {failures[0]}")


def _probe(vocabulary: int, batch: int, length: int) -> Tensor:
    """Return (B, T) ids, distinct if the vocabulary allows, and none of them the number of a position."""
    low = length if vocabulary >= length * (batch + 1) else 0
    order = torch.randperm(vocabulary - low, generator=torch.Generator().manual_seed(0)) + low
    return order.repeat(length * batch // len(order) + 1)[: length * batch].view(batch, length)
