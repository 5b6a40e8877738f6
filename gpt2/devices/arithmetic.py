"""Models of the arithmetic that a device may use: how far each rounds is what it explains of the device's error.

A model runs the same PyTorch calls on the CPU. It rounds the operands of matrix products to fewer bits, adds one term after
another, keeps sums in a narrower dtype, or flushes subnormal numbers to zero. Layer norm, softmax, GELU and attention are then
computed step by step, and exp, tanh, log and rsqrt are off by up to two units in the last place, as vendors allow themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.measure.rounding import Steps

aten = torch.ops.aten
ULPS = 2  # largest error of exp, tanh, log and rsqrt, in units in the last place of float32
LANE = 4096  # a longer sum is split into sums of this length: no device adds 50,257 terms one after another
PRODUCTS = ("TF32 products", "float16 products", "bfloat16 products")  # from the finest on
Run = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Arithmetic:
    """One way to round. ``advice`` is the line that turns it off, if the user can."""

    name: str
    products: Callable[[Tensor], Tensor] | None = None  # rounds the operands of a matrix product
    sums: torch.dtype | None = torch.float32  # of sums and of the steps of a function; None: the CPU's own kernels
    parts: int | None = None  # keep float32 sums of K / parts terms, and add those in ``sums``
    flushes: bool = False  # subnormal numbers count as zero
    advice: str = ""

    def run(self, function: Run, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call ``function`` with copies of the ``inputs`` in this arithmetic, on the CPU."""
        with ExitStack() as stack:
            if self.sums is not None:
                stack.enter_context(Steps(self.sums))
                stack.enter_context(_Rounding(self))
            elif self.flushes:
                stack.enter_context(_Rounding(self))
            return tuple(tensor.detach() for tensor in function(*(tensor.clone() for tensor in inputs)))


def to_tf32(x: Tensor) -> Tensor:
    """Round float32 to the 10 mantissa bits of TF32, to nearest even; range and infinities stay."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def _to(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype).to(x.dtype)


def arithmetics(dtype: torch.dtype, kind: str = "cuda") -> tuple[Arithmetic, ...]:
    """Return what a device of that ``kind`` may compute ``dtype`` with besides its own precision, the finest first."""
    name = str(dtype).removeprefix("torch.")
    flush = Arithmetic("subnormals flushed to zero", sums=None, flushes=True)
    if dtype == torch.float32:
        roundings: tuple[Callable[[Tensor], Tensor], ...]
        roundings = to_tf32, partial(_to, torch.float16), partial(_to, torch.bfloat16)
        settings = {"cuda": "torch.backends.cuda.matmul", "cpu": "torch.backends.mkldnn.matmul"}
        high = f"{settings[kind]}.fp32_precision = 'ieee'" if kind in settings else ""
        return (
            *(Arithmetic(name, products=rounds, advice=high) for name, rounds in zip(PRODUCTS, roundings, strict=True)),
            flush,
        )
    which, cuda = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype], "torch.backends.cuda.matmul"
    partly = f"{cuda}.allow_{which}_reduced_precision_reduction = False" if kind == "cuda" else ""
    wholly = f"{cuda}.allow_fp16_accumulation = False" if kind == "cuda" and dtype == torch.float16 else ""
    return (
        Arithmetic(f"partial sums rounded to {name}", sums=dtype, parts=16, advice=partly),
        Arithmetic(f"every sum rounded to {name}", sums=dtype, advice=wholly),
        flush,
    )


class _Rounding(TorchDispatchMode):
    """Runs matrix products, sums and exp-like functions in an :class:`Arithmetic`, forwards and backwards."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arithmetic, self.generator = arithmetic, torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.arithmetic.flushes:
            aliases = func._schema.is_mutable or any(each.alias_info is not None for each in func._schema.returns)
            return func(*args, **(kwargs or {})) if aliases else _flushed(func(*map(_flushed, args), **(kwargs or {})))
        if func in (aten.mm.default, aten.bmm.default):
            return self.product(*args)
        if func is aten.addmm.default and not kwargs:
            bias, a, b = args
            return self.product(a, b, bias)
        if func is aten.sum.dim_IntList and len(args[1]) == 1 and args[0].is_floating_point():
            total = self.total(args[0].movedim(args[1][0], -1))
            return total.unsqueeze(args[1][0]) if len(args) > 2 and args[2] else total
        result = func(*args, **(kwargs or {}))
        if func in INEXACT and result.dtype == torch.float32:
            off = torch.rand(result.shape, generator=self.generator).sub_(0.5).mul_(ULPS * torch.finfo(torch.float32).eps)
            result = torch.where(result.abs() == 1, result, result + result * off)  # a tanh of 1 and exp(0) are exact anywhere
        return result

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply (..., M, K) and (..., K, N), adding one term of K after another."""
        dtype, how = a.dtype, self.arithmetic
        a, b = a.float(), b.float()
        if how.products is not None:
            a, b = how.products(a), how.products(b)
        length, sums = a.size(-1), how.sums or torch.float32
        lane = LANE if how.parts is None else max(1, -(-length // how.parts))
        whole = a.new_zeros(*a.shape[:-1], b.size(-1))
        for start in range(0, length, lane):
            part = torch.zeros_like(whole)
            for k in range(start, min(start + lane, length)):
                part.addcmul_(a[..., k : k + 1], b[..., k : k + 1, :])
                if how.parts is None and sums != torch.float32:
                    part = _to(sums, part)
            whole = _to(sums, whole + part) if start else _to(sums, part)
        return (whole if bias is None else whole + bias.float()).to(dtype)

    def total(self, x: Tensor) -> Tensor:
        """Sum the last axis, one entry after another."""
        dtype, sums = x.dtype, self.arithmetic.sums or torch.float32
        parts = []
        for lane in x.split(LANE, -1):
            part = torch.zeros_like(lane[..., 0], dtype=sums)
            for entry in lane.unbind(-1):
                part = part + entry.to(sums)
            parts.append(part)
        return sum(parts[1:], parts[0]).to(dtype)


INEXACT = {aten.exp.default, aten.exp2.default, aten.tanh.default, aten.log.default, aten.rsqrt.default}


def _flushed(value: Any) -> Any:
    """Return a tensor with its subnormal numbers set to zero, and anything else as it is."""
    if isinstance(value, tuple | list):
        return type(value)(map(_flushed, value))
    if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return value
    small = value.abs() < torch.finfo(value.dtype).tiny
    return value if not bool((small & (value != 0)).any()) else value.masked_fill(small, 0)
