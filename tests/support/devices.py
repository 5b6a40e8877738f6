"""Simulated devices: real PyTorch calls on the CPU, with operators replaced by ones that round otherwise, or compute wrongly.

Each stands for a device in ``gpt2.devices.judge.Device``, whose ``run`` is the code that a GPU takes too. The wrong ones compute
what issue threads describe; ``source`` names the thread. ``python -m support.devices`` (in ``tests/``) prints the table of
``gpt2/devices/README.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.devices.judge import Device
from gpt2.devices.report import DeviceReport
from gpt2.devices.run import verify_device

aten = torch.ops.aten
Replacement = Callable[..., Any]  # (original, *args, **kwargs)


class _Dispatch(TorchDispatchMode):
    def __init__(self, replaced: Mapping[Any, Replacement]) -> None:
        super().__init__()
        self.replaced = replaced

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        replacement = self.replaced.get(func)
        return func(*args, **(kwargs or {})) if replacement is None else replacement(func, *args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, replaced: Mapping[Any, Replacement]) -> None:
        super().__init__()
        self.replaced = replaced

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        replacement = self.replaced.get(func)
        return func(*args, **(kwargs or {})) if replacement is None else replacement(func, *args, **(kwargs or {}))


@dataclass(frozen=True)
class Simulated:
    """``operators`` replace ATen operators, forwards and backwards; ``functions`` replace functions of ``torch.nn.functional``.

    ``says`` must occur in the verdict: for a wrong device in what the first wrong operator is called and looks like, for an
    imprecise one in the name of its arithmetic. ``dtype`` is the one in which it shows.
    """

    name: str
    says: tuple[str, ...]
    operators: Mapping[Any, Replacement] = field(default_factory=dict)
    functions: Mapping[Any, Replacement] = field(default_factory=dict)
    source: str = ""
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> Device:
        @contextmanager
        def simulated() -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(_Functions(self.functions))
                stack.enter_context(_Dispatch(self.operators))
                yield

        return Device(torch.device("cpu"), f"simulated: {self.name}", simulated)


def products(multiply: Callable[[Tensor, Tensor], Tensor]) -> dict[Any, Replacement]:
    """Replace every matrix product by ``multiply`` of (..., M, K) and (..., K, N)."""
    return {
        aten.mm.default: lambda func, a, b: multiply(a, b),
        aten.bmm.default: lambda func, a, b: multiply(a, b),
        aten.addmm.default: lambda func, bias, a, b, **_: (multiply(a, b).float() + bias.float()).to(bias.dtype),
    }


def rounded(a: Tensor, b: Tensor, to: Callable[[Tensor], Tensor]) -> Tensor:
    return to(a) @ to(b) if a.dtype == torch.float32 else a @ b


def _tf32(x: Tensor) -> Tensor:
    """Round half away from zero, as the conversion instruction does (the package's model rounds half to even)."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _backwards(a: Tensor, b: Tensor) -> Tensor:
    """Sum from the last term to the first, in seven lanes."""
    wide_a, wide_b = a.float().flip(-1), b.float().flip(-2)
    total = 0
    for lane in range(7):
        part = 0
        for left, right in zip(wide_a[..., lane::7].split(1, -1), wide_b[..., lane::7, :].split(1, -2), strict=True):
            part = part + left * right
        total = total + part
    return total.to(a.dtype)  # type: ignore[attr-defined]


def _split_sums(a: Tensor, b: Tensor, parts: int = 8) -> Tensor:
    """Keep the sums of ``parts`` parts of K in the dtype of the operands."""
    if a.dtype == torch.float32:
        return a @ b
    step = -(-a.size(-1) // parts)
    sums = [(x.float() @ y.float()).to(a.dtype) for x, y in zip(a.split(step, -1), b.split(step, -2), strict=True)]
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return total


def _flushing(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _flush(func(*map(_flush, args), **kwargs))


def _flush(x: Any) -> Any:
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0, x) if isinstance(x, Tensor) and x.is_floating_point() else x


IMPRECISE = (
    Simulated("sums in another order", ("right",), products(_backwards)),
    Simulated("TF32 products", ("TF32 products", "fp32_precision"), products(lambda a, b: rounded(a, b, _tf32))),
    Simulated("bfloat16 products", ("bfloat16 products",), products(lambda a, b: rounded(a, b, lambda x: x.bfloat16().float()))),
    Simulated("float16 products", ("float16 products",), products(lambda a, b: rounded(a, b, lambda x: x.half().float()))),
    Simulated(
        "subnormals flushed",
        ("subnormals flushed",),
        {aten.mul.Tensor: _flushing, aten.add.Tensor: _flushing, aten._softmax.default: _flushing},
    ),
    Simulated("partial sums in bfloat16", ("partial sums rounded to bfloat16",), products(_split_sums), dtype=torch.bfloat16),
    Simulated("partial sums in float16", ("partial sums rounded to float16",), products(_split_sums), dtype=torch.float16),
)


def in_order(x: Tensor) -> Tensor:
    """Return a view's elements as they lie in memory."""
    return x if x.is_contiguous() else torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()).reshape(x.shape)


def _first_mask(attend: Replacement, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **rest: Any) -> Tensor:
    if attn_mask is not None and len(attn_mask) > 1:
        attn_mask = attn_mask[:1].expand_as(attn_mask)
    return attend(q, k, v, attn_mask=attn_mask, **rest)


def _long_unmasked(attend: Replacement, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **rest: Any) -> Tensor:
    return attend(q, k, v, is_causal=is_causal and q.size(-2) < 200, **rest)


def _band(func: Any, x: Tensor, dim: int, half: bool) -> Tensor:
    """Rows of just over a power of two are wrong, up to one and a half times it."""
    result = func(x, dim, half)
    length = x.size(-1)
    over = length / 2 ** math.floor(math.log2(length - 1)) if length > 64 else 2
    return result.roll(1, -1) if over <= 1.5 else result


def _overflowing_softmax(func: Any, x: Tensor, dim: int, half: bool) -> Tensor:
    e = x.exp()
    return e / e.sum(dim, keepdim=True)


def _gelu_by_exp(func: Any, x: Tensor, approximate: str = "none") -> Tensor:
    e = torch.exp(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + (e - 1) / (e + 1))


def _half_variance(func: Any, x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The variance is kept in float16, and overflows."""
    mean = x.float().mean(-1, keepdim=True)
    scale = torch.rsqrt((x.float() - mean).square().sum(-1, keepdim=True).half().float() / x.size(-1) + eps)
    return ((x.float() - mean) * scale * weight.float() + bias.float()).to(x.dtype), mean.to(x.dtype), scale.to(x.dtype)


def _late_rows_zero(func: Any, bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    out = func(bias, a, b)
    out[32:] = 0
    return out


def _copy_to_start(func: Any, target: Tensor, source: Tensor, *rest: Any) -> Tensor:
    """A copy into a view lands at the start of its memory."""
    if target.storage_offset() and not target.is_contiguous():
        func(torch.as_strided(target, target.shape, target.stride(), 0), source, *rest)
        return target
    return func(target, source, *rest)


def _last_write_wins(func: Any, grad: Tensor, ids: Tensor, rows: int, *rest: Any) -> Tensor:
    table = grad.new_zeros(rows, grad.size(-1))
    table[ids.flatten()] = grad.flatten(0, -2)
    return table


def _adamw_in_order(func: Any, params: list[Tensor], grads: list[Tensor], *rest: Any, **kwargs: Any) -> None:
    func(params, [each.contiguous() for each in grads], *rest, **kwargs)  # the kernel takes all memory in the parameter's order


WRONG = (
    Simulated(
        "attention reads the first row's mask in a batch",
        ("attention is wrong for B > 1 with a mask", "first row's mask"),
        functions={F.scaled_dot_product_attention: _first_mask},
        source="pytorch #184180 (MPS)",
    ),
    Simulated(
        "attention ignores the mask",
        ("attention is wrong for a mask", "ignores the mask"),
        functions={F.scaled_dot_product_attention: lambda f, *qkv, attn_mask=None, **rest: f(*qkv, **rest)},
        source="pytorch #108503 (CUDA, bfloat16)",
    ),
    Simulated(
        "attention ignores the mask of long texts",
        ("attention is wrong for causal, 256 tokens", "ignores the mask"),
        functions={F.scaled_dot_product_attention: _long_unmasked},
        source="pytorch #162588",
    ),
    Simulated(
        "attention ignores the scale",
        ("attention is wrong for another scale", "ignores the scale"),
        functions={F.scaled_dot_product_attention: lambda f, *qkv, scale=None, **rest: f(*qkv, **rest)},
        source="transformers #44397",
    ),
    Simulated(
        "a single query attends to the first key",
        ("attention is wrong for one token after cached ones", "first key only"),
        functions={
            F.scaled_dot_product_attention: lambda f, q, k, v, **rest: (
                v[..., :1, :].clone() if q.size(-2) == 1 and rest.get("attn_mask") is None else f(q, k, v, **rest)
            )
        },
        source="pytorch #144858, flax #5591",
    ),
    Simulated(
        "a matrix product reads a transposed weight in order",
        ("matrix product is wrong for non-contiguous weight", "as if it were contiguous"),
        {aten.addmm.default: lambda f, bias, a, b, **_: f(bias, a, in_order(b) if b.stride() == (1, b.size(0)) else b)},
        source="pytorch #161641, #162779 (MPS)",
    ),
    Simulated(
        "rows of a matrix product stay zero",
        ("matrix product is wrong for c_attn, B > 1", "zeros in"),
        {aten.addmm.default: _late_rows_zero},
        source="rocm-libraries #5706 (gfx1201)",
    ),
    Simulated(
        "scores read the transposed keys in order",
        ("scores is wrong for transposed keys", "as if it were contiguous"),
        {aten.bmm.default: lambda f, a, b: f(a, in_order(b))},
        source="pytorch #197636 (MPS)",
    ),
    Simulated(
        "softmax is wrong just above powers of two",
        ("softmax is wrong for rows of 65", "entries are off"),
        {aten._softmax.default: _band},
        source="torch-xpu-ops #4772",
    ),
    Simulated(
        "softmax overflows",
        ("softmax is wrong for scores up to 30,000", "overflows"),
        {aten._softmax.default: _overflowing_softmax},
        source="pytorch #96602, #165961 (MPS)",
    ),
    Simulated(
        "GELU overflows",
        ("GELU is wrong for inputs of -60 to 60", "overflows"),
        {aten.gelu.default: _gelu_by_exp},
        source="pytorch #186278 (MPS), llm-scaler #484",
    ),
    Simulated(
        "layer norm keeps the variance in float16",
        ("layer norm is wrong for entries of 3,000", "variance overflows"),
        {aten.native_layer_norm.default: _half_variance},
        source="onnxruntime #29034, pytorch #66707",
        dtype=torch.float16,
    ),
    Simulated(
        "layer norm reads a transposed input in order",
        ("layer norm is wrong for non-contiguous input", "as if it were contiguous"),
        {aten.native_layer_norm.default: lambda f, x, *rest: f(in_order(x), *rest)},
        source="as pytorch #161641 (MPS)",
    ),
    Simulated(
        "a sum in place into a view is lost",
        ("residual sum is wrong for in place, non-contiguous", "in place is lost"),
        {aten.add_.Tensor: lambda f, x, y, **kwargs: f(x, y, **kwargs) if x.is_contiguous() else x},
        source="pytorch #118117 (MPS)",
    ),
    Simulated(
        "a copy into a view lands at its memory's start",
        ("cache is wrong", "stale"),
        {aten.copy_.default: _copy_to_start},
        source="torch-spyre #2816",
    ),
    Simulated(
        "tril ignores its diagonal",
        ("mask is wrong for after cached tokens", "aligns the mask with the first key"),
        {aten.tril.default: lambda f, x, diagonal=0: f(x)},
        source="pytorch #103082, #110144",
    ),
    Simulated(
        "the loss's gradient ignores the gradient from above",
        ("loss, backward is wrong", "ignores the gradient from above"),
        {aten.nll_loss_backward.default: lambda f, grad, *rest: f(torch.ones_like(grad), *rest)},
        source="pytorch #94226 (MPS)",
    ),
    Simulated(
        "the gradient of a loss for each token is zero",
        ("loss, backward is wrong for one a token", "zeros in"),
        {aten.nll_loss_backward.default: lambda f, grad, *rest: f(grad if grad.ndim == 0 else grad * 0, *rest)},
        source="DirectML #739",
    ),
    Simulated(
        "the embedding's gradient keeps one of two equal ids",
        ("embedding lookup, backward is wrong for B > 1", "not added up"),
        {aten.embedding_dense_backward.default: _last_write_wins},
        source="the race that atomic sums prevent",
    ),
    Simulated(
        "AdamW reads a transposed parameter in order",
        ("AdamW step is wrong for fused, transposed parameter", "entries"),
        {aten._fused_adamw_.default: _adamw_in_order},
        source="pytorch #118115 (MPS)",
    ),
)


def _tail_dropped(func: Any, a: Tensor, b: Tensor) -> Tensor:
    whole = a.size(-1) // 16 * 16
    return func(a[..., :whole], b[..., :whole, :])


def _late_columns_zero(func: Any, a: Tensor, b: Tensor) -> Tensor:
    out = func(a, b)
    out[..., 1024:] = 0
    return out


def _first_row_only(func: Any, grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dx, dweight, dbias = func(grad, x, *rest)
    return dx, dweight / 2 if x.ndim == 3 and len(x) > 1 else dweight, dbias


def _noisy(func: Any, bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    out = func(bias, a, b)
    return torch.where(torch.rand_like(out) < 1e-3, out + 1e-2, out)


# Written after the judge was done; nothing of it was changed to name these.
SECOND = (
    Simulated(
        "embedding ids wrap at 1,024", ("embedding lookup",), {aten.embedding.default: lambda f, w, ids, *r: f(w, ids % 1024, *r)}
    ),
    Simulated(
        "the tail of a product's sum is dropped", ("weighted sum",), {aten.bmm.default: _tail_dropped}, source="ROCm #5730"
    ),
    Simulated("logits past column 1,024 are zero", ("logits", "zeros"), {aten.mm.default: _late_columns_zero}),
    Simulated(
        "a copy of a permuted view keeps the order of memory",
        ("split into q, k, v",),
        {aten.clone.default: lambda f, x, **kw: f(in_order(x), **kw) if x.ndim == 4 else f(x, **kw)},
        source="pytorch #85967",
    ),
    Simulated("masked_fill takes the mask inverted", ("mask",), {aten.masked_fill.Scalar: lambda f, x, mask, v: f(x, ~mask, v)}),
    Simulated(
        "softmax of a masked score is NaN",
        ("softmax", "masked scores"),
        {aten._softmax.default: lambda f, x, *r: f(x, *r) + 0 * x.masked_fill(x == -math.inf, math.nan)},
        source="Megatron-LM #132",
    ),
    Simulated(
        "attention sees as many keys as queries",
        ("attention", "cached"),
        functions={
            F.scaled_dot_product_attention: lambda f, q, k, v, attn_mask=None, **rest: f(
                q,
                k[..., : q.size(-2), :],
                v[..., : q.size(-2), :],
                attn_mask=None if attn_mask is None else attn_mask[..., : q.size(-2)],
                **rest,
            )
        },
    ),
    Simulated("GELU is the exact form", ("GELU", "exact"), {aten.gelu.default: lambda f, x, approximate="none": f(x)}),
    Simulated(
        "a sum uses the first row's second operand",
        ("residual sum",),
        {aten.add.Tensor: lambda f, x, y, **kw: f(x, y[:1] if isinstance(y, Tensor) and y.ndim == 3 else y, **kw)},
    ),
    Simulated("top-k is one place late", ("sampling",), {aten.topk.default: lambda f, x, k, *r: f(x.roll(1, -1) * 0.999, k, *r)}),
    Simulated(
        "the keys get no gradient",
        ("attention, backward", "zeros"),
        functions={F.scaled_dot_product_attention: lambda f, q, k, v, **rest: f(q, k.detach() + 0 * k, v, **rest)},
    ),
    Simulated(
        "layer norm's weight gets half its gradient",
        ("layer norm, backward",),
        {aten.native_layer_norm_backward.default: _first_row_only},
    ),
    Simulated(
        "AdamW leaves out the decay",
        ("AdamW step", "leaves out the weight decay"),
        {aten._fused_adamw_.default: lambda f, *args, weight_decay=0.0, **kw: f(*args, weight_decay=0.0, **kw)},
    ),
    Simulated("a product has rare wrong entries, never the same", ("matrix product",), {aten.addmm.default: _noisy}),
    Simulated(
        "GELU is NaN above 11, in bfloat16 only",
        ("GELU", "overflows"),
        {aten.gelu.default: lambda f, x, **kw: torch.where((x > 11) & (x.dtype == torch.bfloat16), math.nan, f(x, **kw))},
        source="pytorch #186278 (MPS)",
        dtype=torch.bfloat16,
    ),
)


def said(report: DeviceReport) -> str:
    """Return what a report says of the first wrong operator, or of the arithmetic."""
    first = report.first_wrong
    if first is None:
        names = [f"{name} (`{advice}`)" if advice else name for name, advice in report.arithmetics.items()]
        return ": ".join((report.verdict, *filter(None, [", ".join(names)])))
    return f"{report.sentence(first)}: {first.looks_like}"


if __name__ == "__main__":
    for each in (*IMPRECISE, *WRONG, *SECOND):
        report = verify_device("shakespeare-mini", each.device, dtypes=[each.dtype])
        print(f"| {each.name} | {each.source} | {said(report)} |", flush=True)
