"""Simulated devices: PyTorch on the CPU, with operators that round otherwise, or compute what issue threads describe."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.devices import judge

aten = torch.ops.aten
Replaced = dict[Any, Callable[..., Any]]  # an ATen operator or a function of torch.nn.functional -> (original, *args, **kwargs)


class Simulated(NamedTuple):
    """``says`` begins the sentence of what is first wrong, or is the arithmetic. ``dtype``: the one in which it shows."""

    name: str
    says: str
    replaced: Replaced
    dtype: torch.dtype = torch.float32


@contextmanager
def simulated(replaced: Replaced, watching: AbstractContextManager[Any] = nullcontext()) -> Iterator[None]:  # noqa: B008
    """Replace operators in all that gpt2.devices computes "on the device"."""

    def call(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (partial(replaced[func], func) if func in replaced else func)(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        __torch_function__ = call

    class Operators(TorchDispatchMode):
        __torch_dispatch__ = call
        _should_skip_dynamo = classmethod(lambda cls: False)  # else torch wraps each call, and imports its compiler

    def on_device(device: torch.device, run: Callable[..., Any], inputs: Any) -> Any:
        def inside(*moved: Tensor) -> Any:
            with Functions(), Operators(), watching:
                return run(*moved)

        return original(device, inside, inputs)

    original, judge.on_device = judge.on_device, on_device
    try:
        yield
    finally:
        judge.on_device = original


def products(multiply: Callable[[Tensor, Tensor], Tensor]) -> Replaced:
    """Replace every matrix product by ``multiply`` of (..., M, K) and (..., K, N)."""
    return {
        aten.mm.default: lambda f, a, b: multiply(a, b),
        aten.bmm.default: lambda f, a, b: multiply(a, b),
        aten.addmm.default: lambda f, bias, a, b: (multiply(a, b).float() + bias.float()).to(bias.dtype),
    }


def _tf32(x: Tensor) -> Tensor:
    """Round half away from zero to 10 bits, as the conversion instruction does."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _summed(a: Tensor, b: Tensor, dtype: torch.dtype, step: int) -> Tensor:
    """Sum from the last term to the first, ``step`` terms at a time in float32 and those sums in ``dtype``."""
    lefts, rights = a.float().flip(-1).split(step, -1), b.float().flip(-2).split(step, -2)
    return reduce(torch.add, [(x @ y).to(dtype) for x, y in zip(lefts, rights, strict=True)])


def _flushed(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    def flush(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny, 0)

    return flush(func(*map(flush, args), **kwargs))


def _in_order(x: Tensor) -> Tensor:
    """Return a view's elements as they lie in memory."""
    return x if x.is_contiguous() else torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()).reshape(x.shape)


def _first_mask(attend: Any, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **rest: Any) -> Tensor:
    return attend(q, k, v, attn_mask=None if attn_mask is None else attn_mask[:1].expand_as(attn_mask), **rest)


def _copy_to_start(func: Any, target: Tensor, source: Tensor, *rest: Any) -> Tensor:
    func(torch.as_strided(target, target.shape, target.stride(), 0), source, *rest)
    return target


BF16, FP16, SDPA = torch.bfloat16, torch.float16, F.scaled_dot_product_attention
ATTENTION = "attn.c_attn: scaled_dot_product_attention is wrong for a"
SUBNORMAL = (aten.mul.Tensor, aten.add.Tensor, aten.mm.default, aten.nll_loss_backward.default)
RIGHT = (
    Simulated("sums in another order", "right: {}", products(lambda a, b: _summed(a, b, a.dtype, 1))),
    Simulated("TF32 products", "TF32 products", products(lambda a, b: _tf32(a) @ _tf32(b))),
    Simulated("bfloat16 products", "bfloat16 products", products(lambda a, b: a.bfloat16().float() @ b.bfloat16().float())),
    Simulated("partial sums in bfloat16", "partial sums in bfloat16", products(lambda a, b: _summed(a, b, BF16, 2)), BF16),
    Simulated("sums in float16", "sums in float16", products(lambda a, b: _summed(a, b, FP16, 1)), FP16),
    Simulated("flushed subnormals", "subnormals flushed to zero", dict.fromkeys(SUBNORMAL, _flushed), FP16),
)
WRONG = (  # with the threads that report them; the second block of the model has another scale than the usual one
    Simulated("first row's mask for all, pytorch #184180", f"after h.0.{ATTENTION} batch with padding", {SDPA: _first_mask}),
    Simulated(
        "mask ignored, pytorch #108503",
        f"after h.0.{ATTENTION} batch with padding",
        {SDPA: lambda f, *qkv, attn_mask=None, **rest: f(*qkv, **rest)},
    ),
    Simulated(
        "scale ignored, transformers #44397",
        f"after h.1.{ATTENTION} batch",
        {SDPA: lambda f, *qkv, scale, **rest: f(*qkv, **rest)},
    ),
    Simulated("stale cache, torch-spyre #2816", "after h.1.attn.c_attn: copy is wrong", {aten.copy_.default: _copy_to_start}),
    Simulated(
        "transposed weight in order, pytorch #161641",
        "wte: linear is wrong for one row",
        {aten.mm.default: lambda f, a, b: f(a, _in_order(b))},
    ),
    Simulated(
        "lost sum in place, pytorch #118117",
        "after h.0.attn.c_proj: add is wrong for a cached prompt",
        {aten.add_.Tensor: lambda f, x, *rest, **kwargs: x},
    ),
    Simulated(
        "ignored gradient, pytorch #94226",
        "after wte: token_losses, backward is wrong for training",
        {aten.nll_loss_backward.default: lambda f, grad, *rest: f(torch.ones_like(grad), *rest)},
    ),
)
