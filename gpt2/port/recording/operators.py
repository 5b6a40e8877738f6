"""What torch's operators do to single elements: which only copy, which keep to their rows, and how the others are made up.

Source: the schemas in torch's native_functions.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpt2.port.recording.dataflow import Kind

if TYPE_CHECKING:
    from gpt2.port.recording.recorder import Recorder


@dataclass(frozen=True)
class Ids:
    """Ids where a tensor would stand: an intermediate result of an operator that does several things."""

    ids: Tensor


# Operators that only copy, and the arguments that they copy from.
MOVES = set(
    """
    clone _to_copy copy copy_ cat stack index index_select gather embedding take constant_pad_nd repeat repeat_interleave roll
    flip slice_scatter select_scatter index_put index_put_ index_copy index_copy_ diag_embed masked_select view_copy permute_copy
    expand_copy slice_copy select_copy t_copy transpose_copy unsqueeze_copy squeeze_copy split_copy unbind_copy _reshape_copy
    """.split()  # noqa: SIM905
)
MOVED = {"self", "tensors", "src", "source", "values", "value", "weight", "input"}
TAKES = {"embedding": "weight", "index": "self", "index_select": "self", "gather": "self"}  # from a table, by an index
BLANKS = set("zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty".split())  # noqa: SIM905
ROWWISE = {"_softmax", "_log_softmax", "_safe_softmax", "cumsum", "tril", "triu"}
REDUCTIONS = {"mean", "sum", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "prod", "any", "all"}
REDUCTIONS |= {"norm", "linalg_vector_norm", "logsumexp", "argmax", "argmin"}


# Handlers: (recorder, arguments by name, shape of the first result) to the ids of the first result, or None to pass.


def _product(recorder: Recorder, op: str, a: Tensor, b: Tensor) -> Tensor:
    """(..., I, K) times (..., K, J)."""
    rows, columns = a.shape[-2], b.shape[-1]
    return recorder.contraction(
        op,
        (a, lambda x: x.unsqueeze(-2).expand(*x.shape[:-1], columns, x.shape[-1])),
        (b, lambda x: x.mT.unsqueeze(-3).expand(*x.shape[:-2], rows, x.shape[-1], x.shape[-2])),
    )


def _mm(recorder: Recorder, named: dict[str, Any], shape: torch.Size) -> Tensor:
    return _product(recorder, "mm", named["self"], named["mat2"])


def _addmm(recorder: Recorder, named: dict[str, Any], shape: torch.Size) -> Tensor:
    factors = [named[name] for name in ("mat1", "mat2", "batch1", "batch2") if name in named]
    return recorder.elementwise("add", shape, Ids(_product(recorder, "mm", *factors)), named["self"])


def _mv(recorder: Recorder, named: dict[str, Any], shape: torch.Size) -> Tensor:
    return recorder.contraction("mv", (named["self"], lambda x: x), (named["vec"], lambda x: x.expand(*shape, -1)))


def _convolution(recorder: Recorder, named: dict[str, Any], shape: torch.Size) -> Tensor | None:
    """(B, C, ...) by a kernel of width one; any wider one mixes positions, and is no GPT-2's."""
    kernel, bias = named["weight"], named.get("bias")
    if kernel.shape[2:].numel() != 1 or named.get("groups", 1) != 1 or named.get("transposed"):
        return None
    ones = [1] * (len(shape) - 2)
    result = recorder.contraction(
        "convolution",
        (named["input"], lambda x: x.movedim(1, -1).unsqueeze(1).expand(*shape, -1)),
        (kernel, lambda x: x.view(1, shape[1], *ones, -1).expand(*shape, -1)),
    )
    return result if bias is None else recorder.elementwise("add", shape, Ids(result), bias.view(-1, *ones))


def _layer_norm(recorder: Recorder, named: dict[str, Any], shape: torch.Size) -> Tensor:
    result = recorder.node(Kind.ROWWISE, "layer_norm", shape, recorder.shadows.ids_of(named["input"]))
    for op, parameter in (("mul", named.get("weight")), ("add", named.get("bias"))):
        if parameter is not None:
            result = recorder.elementwise(op, shape, Ids(result), parameter)
    return result


def _addcmul(recorder: Recorder, named: dict[str, Any], shape: torch.Size) -> Tensor:
    product = recorder.elementwise("mul", shape, named["tensor1"], named["tensor2"])
    return recorder.elementwise("add", shape, named["self"], Ids(product))


def _dropout(recorder: Recorder, named: dict[str, Any], shape: torch.Size) -> Tensor:
    return recorder.elementwise("dropout", shape, named["input"])


def _sum(recorder: Recorder, named: dict[str, Any], shape: torch.Size) -> Tensor | None:
    """A sum of products is a contraction, and a sum of contractions (over heads, say) a longer one."""
    x, dims = named["self"], named.get("dim")
    ids = recorder.shadows.ids_of(x)
    node = None if ids is None else recorder.owner(ids)
    longer = node is not None and node.kind is Kind.CONTRACTION and node.weight is not None
    product = node is not None and node.op == "mul" and len(node.operands) == 2 and not torch.equal(*node.operands)
    if not longer and not product:
        return None
    summed = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims or range(x.ndim))]
    kept = [axis for axis in range(x.ndim) if axis not in summed]
    place = node.place(ids.permute(*kept, *summed).flatten(len(kept)))
    operands = [operand[place].flatten(len(kept)) for operand in node.operands]
    weights = [number for number, operand in enumerate(operands) if recorder._from_sources(operand)]
    if len(weights) > 1 or not all(any(recorder.nature(operand)) for operand in operands):
        return None
    result = recorder.node(Kind.CONTRACTION, "sum", operands[0].shape[:-1], *operands, weight=weights[0] if weights else None)
    return result.view(shape)


HANDLERS: dict[str, Callable[[Recorder, dict[str, Any], torch.Size], Tensor | None]] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "mv": _mv,
    "convolution": _convolution,
    "native_layer_norm": _layer_norm,
    "addcmul": _addcmul,
    "native_dropout": _dropout,
    "sum": _sum,
}

# Kernels that a port may insist on; the plain ones then compute in their place.
FUSED_ATTENTION = {
    getattr(torch.ops.aten, name)
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
}


def spelt_out(named: dict[str, Any], results: int) -> tuple[Any, ...]:
    """Attention by plain operators; the fused kernels' further results are for the backward pass only."""
    mask = named.get("attn_mask", named.get("attn_bias"))
    out, weights = torch.ops.aten._scaled_dot_product_attention_math(
        named["query"], named["key"], named["value"], mask, 0.0, named.get("is_causal", False), scale=named.get("scale")
    )
    return (out, weights, *[None] * (results - 2))
