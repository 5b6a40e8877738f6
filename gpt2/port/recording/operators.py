"""Sort torch's operators: which only copy elements, which work row by row, and how the others become nodes.

A new operator goes into a set below, or into ``HANDLERS`` if it does several things. Names: torch's native_functions.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpt2.port.recording.dataflow import NodeKind
from gpt2.port.recording.graph import Graph

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
    ids = graph.of(x)
    node = None if ids is None else graph.owner(ids)
    if ids is None or node is None:
        return None
    longer = node.kind is NodeKind.CONTRACTION and node.weight is not None
    product = node.op == "mul" and len(node.tensors) == 2 and not torch.equal(*node.tensors)
    if not longer and not product:
        return None
    summed = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims or range(x.ndim))]
    kept = [axis for axis in range(x.ndim) if axis not in summed]
    place = node.place(ids.permute(*kept, *summed).flatten(len(kept)))
    operands = [operand[place].flatten(len(kept)) for operand in node.operands]
    weights = [number for number, operand in enumerate(operands) if graph.is_source(operand)]
    if len(weights) > 1 or not all(any(graph.dependence(operand)) for operand in operands):
        return None
    weight = weights[0] if weights else None
    return graph.add(NodeKind.CONTRACTION, "sum", operands[0].shape[:-1], *operands, weight=weight).view(shape)


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
}
