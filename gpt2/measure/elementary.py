"""Compute PyTorch's fused operators from elementary steps, so that each step can be rounded as a kernel rounds it."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

CACHED = 1 << 17  # numbers that are computed at a time, so that they stay in a processor's cache


class Steps(TorchFunctionMode):
    """Computes layer norm, softmax, GELU, attention and cross-entropy from elementary steps, in at least ``inside``.

    ``functions`` are those to replace, and ``wider`` is entered where a fused kernel for 16-bit numbers keeps float32.
    """

    def __init__(
        self,
        inside: torch.dtype,
        functions: Mapping[Any, Callable[..., Tensor]] | None = None,
        wider: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self.inside, self.functions, self.wider = inside, STEPS if functions is None else functions, wider

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        steps = self.functions.get(func)
        return func(*args, **(kwargs or {})) if steps is None else steps(self, *args, **(kwargs or {}))


def _layer_norm(steps: Steps, x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5, *_: Any) -> Tensor:
    wide = x.to(steps.inside)
    centred = wide - wide.sum(-1, keepdim=True) / wide.size(-1)
    variance = centred.square().sum(-1, keepdim=True) / wide.size(-1)
    return (centred * torch.rsqrt(variance + eps) * weight.to(steps.inside) + bias.to(steps.inside)).to(x.dtype)


def _exp(x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return the exp of all entries, the largest of which becomes 1, and their sum."""
    e = torch.exp2((x - x.amax(dim, keepdim=True).detach()) / math.log(2))  # as kernels do: this rounds large scores
    return e, e.sum(dim, keepdim=True)


def _softmax(steps: Steps, x: Tensor, dim: int = -1, **_: Any) -> Tensor:
    e, total = _exp(x.to(steps.inside), dim)
    return (e / total).to(x.dtype)


def _gelu(steps: Steps, x: Tensor, *, approximate: str = "none") -> Tensor:
    parts = [_half_gate(part, approximate == "tanh") for part in x.to(steps.inside).flatten().split(CACHED)]
    return torch.cat(parts).view(x.shape).to(x.dtype)


def _half_gate(x: Tensor, approximate: bool) -> Tensor:
    inner = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)) if approximate else torch.erf(x / math.sqrt(2))
    return 0.5 * x * (1 + inner)


def attention_in_steps(
    steps: Steps,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """Compute attention as a fused kernel does, which keeps scores and sums in ``steps.inside``; arguments as PyTorch's."""
    queries, keys = q.size(2), k.size(2)
    scale = 1 / math.sqrt(q.size(-1)) if scale is None else scale
    few, rows = max(1, CACHED // (queries * keys)), max(1, CACHED // keys)  # heads at a time, and queries of one head
    heads = [each.to(steps.inside).flatten(0, 1).split(few) for each in (q, k, v)]
    masks = [None] * len(heads[0]) if attn_mask is None else attn_mask.expand(*q.shape[:3], keys).flatten(0, 1).split(few)

    def some(start: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        part, end = q[:, start : start + rows], min(start + rows, keys) if is_causal else keys
        if is_causal:  # no query sees a later key
            mask = torch.ones(part.size(1), end, dtype=torch.bool).tril(start)
        elif mask is not None:
            mask = mask[:, start : start + rows]
        return _Attention.apply(steps, part, k[:, :end], v[:, :end], mask, scale)  # type: ignore[no-untyped-call]

    starts = range(0, queries, rows)
    outputs = [torch.cat([some(start, *each) for start in starts], 1) for each in zip(*heads, masks, strict=True)]
    return torch.cat(outputs).to(q.dtype).unflatten(0, q.shape[:2])


class _Attention(torch.autograd.Function):
    """A fused attention kernel's steps, forwards and backwards (Dao et al., arXiv:2205.14135, algorithm 4).

    The gradient of a row of scores is weights x (upstream v^T - upstream . y). Where one weight is nearly 1, the bracket is the
    difference of two nearly equal numbers that are rounded in different ways. Autograd's own formula takes both from one product,
    where their errors cancel.
    """

    @staticmethod
    def forward(ctx: Any, steps: Steps, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        with steps.wider():
            scores = torch.bmm(q, k.transpose(-1, -2)) * scale
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
            e, total = _exp(scores)
        weights = e / total
        y = torch.bmm(weights, v)
        ctx.steps, ctx.scale = steps, scale
        ctx.save_for_backward(q, k, v, weights, y)
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, y = ctx.saved_tensors
        with ctx.steps.wider():
            bracket = torch.bmm(upstream, v.transpose(-1, -2)) - (upstream * y).sum(-1, keepdim=True)
        scores = weights * bracket * ctx.scale
        gradients = torch.bmm(scores, k), torch.bmm(scores.transpose(-1, -2), q), torch.bmm(weights.transpose(-1, -2), upstream)
        return None, *gradients, None, None


def _cross_entropy(steps: Steps, logits: Tensor, targets: Tensor, *, reduction: str = "mean", **_: Any) -> Tensor:
    wide = logits.to(steps.inside)
    shifted = wide - wide.amax(-1, keepdim=True).detach()
    losses = torch.log(torch.exp(shifted).sum(-1)) - shifted.gather(-1, targets[:, None]).squeeze(-1)
    return (losses if reduction == "none" else losses.sum(0) / len(losses)).to(logits.dtype)


STEPS: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.softmax: _softmax,
    F.gelu: _gelu,
    F.scaled_dot_product_attention: attention_in_steps,
    F.cross_entropy: _cross_entropy,
}
