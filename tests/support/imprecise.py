"""Models that are right in float64 and imprecise in the dtype that they run in: what verify's rule of rounding must refuse."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.model import GPT2, Conv1D, eager_attention

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Imprecise:
    """``apply`` makes a model imprecise in ``dtype``; ``refused``: by more than the rule allows. ``training``: only backwards."""

    name: str
    apply: Callable[[GPT2], object]
    dtype: str = "float32"
    refused: bool = True
    training: bool = False


def _keeping_gradient(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded - x).detach()


def to(dtype: torch.dtype) -> Change:
    """Return a function that rounds to ``dtype`` and back."""
    return lambda x: _keeping_gradient(x, x.to(dtype).to(x.dtype))


def bits(count: int) -> Change:
    """Return a function that rounds to ``count`` bits behind the point (Veltkamp's splitting, in float32)."""

    def rounded(x: Tensor) -> Tensor:
        wide = x.detach().float()
        scaled = wide * (2.0 ** (23 - count) + 1)
        return _keeping_gradient(x, (scaled - (scaled - wide)).to(x.dtype))

    return rounded


def off(size: float, waves: float = 1e4) -> Change:
    """Return a function that is off by a fixed pattern of relative error ``size``, as a coarse polynomial is."""
    return lambda y: y * (1 + size * torch.sin(waves * y.detach().masked_fill(y.isinf(), 0)))


def _narrow(x: Tensor) -> bool:
    return x.dtype != torch.float64


def products(change: Change, model: GPT2) -> None:
    """Round the inputs of the projections and of the head."""
    for module in model.modules():
        if isinstance(module, Conv1D):

            def forward(x: Tensor, module: Conv1D = module, original: Callable[[Tensor], Tensor] = module.forward) -> Tensor:
                if not _narrow(x):
                    return original(x)
                y = torch.addmm(module.bias, change(x.reshape(-1, x.size(-1))), change(module.weight))
                return y.view(*x.shape[:-1], -1)

            module.forward = forward  # type: ignore[method-assign]
    whole = model.head
    model.head = lambda h: F.linear(change(h), change(model.wte.weight)) if _narrow(h) else whole(h)  # type: ignore[method-assign]


def attention(model: GPT2, scores: Change | None = None, **changes: Change) -> None:
    """Change ``qk``, ``scores`` or ``v`` of every attention, traced or not."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
        if not _narrow(q):
            return eager_attention(q, k, v, mask, scale, dropout)
        same: Change = lambda x: x  # noqa: E731
        qk, values = changes.get("qk", same), changes.get("v", same)
        if mask is None:
            mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(k.size(-2) - q.size(-2))
        found = ((scores or same)(qk(q) @ qk(k).mT * scale)).masked_fill(~mask, -math.inf)
        return F.softmax(found, -1) @ values(v)

    for block in model.h:
        block.attn.attend = attend


def cache(dtype: torch.dtype, model: GPT2) -> None:
    """Keep keys and values in ``dtype``: imprecise only where they are read from the cache."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
        if _narrow(q) and q.size(-2) != k.size(-2):
            k, v = to(dtype)(k), to(dtype)(v)
        return eager_attention(q, k, v, mask, scale, dropout)

    model.use_attention(attend)


def gradients(change: Change, model: GPT2) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda g: change(g) if _narrow(g) else g)


half, bf16 = torch.float16, torch.bfloat16
tf32 = bits(10)
IMPRECISE = (
    Imprecise("a cache in float16", partial(cache, half)),
    Imprecise("scores in float16", partial(attention, scores=to(half))),
    Imprecise("values in bfloat16", partial(attention, v=to(bf16))),
    Imprecise("inputs of all products of 18 bits", partial(products, bits(18))),
    Imprecise("inputs of all products of 21 bits", partial(products, bits(21)), refused=False),
    Imprecise("inputs of all products of 4 bits", partial(products, bits(4)), "bfloat16"),
    Imprecise("a cache in bfloat16", partial(cache, bf16), "float16", refused=False),
    Imprecise("gradients off by 1e-5", partial(gradients, off(1e-5, 1e9)), training=True),
)
