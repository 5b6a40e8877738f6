"""The base class of this room's dispatch modes, which see every operator that reaches a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FUSED_ATTENTION = {
    getattr(torch.ops.aten, name)
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
}


@dataclass(frozen=True)
class Call:
    """One call of an operator."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        """ "mm", "add_": without namespace and overload."""
        return self.func._schema.name.removeprefix("aten::")

    @property
    def writes(self) -> bool:
        """Whether it changes one of its arguments."""
        return self.func._schema.is_mutable

    @property
    def named(self) -> dict[str, Any]:
        """All arguments that were given, by name."""
        return dict(zip((argument.name for argument in self.func._schema.arguments), self.args, strict=False)) | self.kwargs

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return tensors((self.args, self.kwargs))


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class OperatorMode(TorchDispatchMode):
    """While entered, :meth:`handle` runs in place of every operator.

    Fused attention and composite operators are replaced by the operators that they consist of, unless ``takes_apart`` is False.
    """

    takes_apart = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Saying True would make torch import its compiler, which takes seconds."""
        return False

    def handle(self, call: Call) -> Any:
        """What the operator returns."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        call = Call(func, args, kwargs or {})
        if not self.takes_apart:
            return self.handle(call)
        if func._overloadpacket in FUSED_ATTENTION:
            with self:
                return plain_attention_kernel(call)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # inference mode passes these on undivided
                result = func.decompose(*args, **call.kwargs)
            if result is not NotImplemented:
                return result
        return self.handle(call)


def plain_attention_kernel(call: Call) -> tuple[Any, ...]:
    """A fused attention kernel's result by plain operators; its further results are for the backward pass only, and None."""
    named = call.named
    mask = named.get("attn_mask", named.get("attn_bias"))
    out, weights = torch.ops.aten._scaled_dot_product_attention_math(
        named["query"], named["key"], named["value"], mask, 0.0, named.get("is_causal", False), scale=named.get("scale")
    )
    return (out, weights, *[None] * (len(call.func._schema.returns) - 2))
