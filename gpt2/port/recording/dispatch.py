"""See every operator that reaches a kernel: the base of all dispatch modes here, and a mode without randomness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
FUSED_ATTENTION = {
    getattr(torch.ops.aten, name)
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
}
NARROWER = (torch.float32, torch.bfloat16, torch.float16)
CONTRACTIONS = {"mm", "addmm", "bmm", "baddbmm"}
NORMAL = {"randn", "randn_like", "normal_", "normal"}
RANDOM = {*NORMAL, "rand", "rand_like", "uniform_", "randint", "randint_like", "randperm", "multinomial"}


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

    Fused attention and composite operators are replaced by the operators that they consist of.
    """

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
    mask, dropout = named.get("attn_mask", named.get("attn_bias")), named.get("dropout_p", 0.0)
    out, weights = torch.ops.aten._scaled_dot_product_attention_math(
        named["query"], named["key"], named["value"], mask, dropout, named.get("is_causal", False), scale=named.get("scale")
    )
    return (out, weights, *[None] * (len(call.func._schema.returns) - 2))


class Dropout(NamedTuple):
    """An active dropout: what it was applied to, and the length of the sums in the last matrix product before it."""

    value: Tensor
    after: int


class DeterministicMode(OperatorMode):
    """Removes randomness (unless ``keep_random``) and casts to narrower dtypes (unless ``keep_casts``).

    Dropout passes everything through, normal noise is zero, and casts from float64 to a narrower dtype stay float64. Differences
    from GPT-2 that remain come from the module's own formulas and weights. ``dropouts`` are those that were active, ``draws`` the
    names of other random operators, ``casts`` the narrower dtypes.
    """

    def __init__(self, *, keep_casts: bool = False, keep_random: bool = False) -> None:
        super().__init__()
        self.keep_casts, self.keep_random = keep_casts, keep_random
        self.dropouts: list[Dropout] = []
        self.draws: list[str] = []
        self.casts: set[str] = set()
        self._summed = 0  # the length of the sums in the last matrix product
        self._mask: Tensor | None = None  # a random mask that was drawn and not yet multiplied with anything

    def handle(self, call: Call) -> Any:
        name, args, named = call.name, call.args, call.named
        if name in CONTRACTIONS:
            self._summed = call.inputs[-1].shape[-2]
        if name == "_to_copy" and args[0].dtype == torch.float64 and named.get("dtype") in NARROWER:
            self.casts.add(str(named["dtype"]).removeprefix("torch."))
            if not self.keep_casts:
                call = Call(call.func, args, {**call.kwargs, "dtype": torch.float64})
        if name == "native_dropout" and args[2] is not False and args[1] > 0:
            self.dropouts.append(Dropout(args[0].clone(), self._summed))
            if not self.keep_random:
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if self._mask is not None and name in ("mul", "mul_"):
            mask = self._mask.data_ptr()
            if any(factor.data_ptr() == mask for factor in call.inputs):
                value = next((factor for factor in call.inputs if factor.data_ptr() != mask), call.inputs[0])
                self.dropouts.append(Dropout(value.clone(), self._summed))
                self._mask = None
        keep = named.get("p", 0.5 if name == "bernoulli_" else None)
        if name == "bernoulli_":
            self._mask = args[0]
            if not self.keep_random and isinstance(keep, float):
                return args[0].fill_(keep)  # the module divides by this probability afterwards
        if name == "bernoulli":
            mean = torch.full_like(args[0], keep) if isinstance(keep, float) else args[0].clone()
            self._mask = call.run() if self.keep_random else mean
            return self._mask
        result = call.run()
        if name in RANDOM:
            self.draws.append(name)
            if not self.keep_random and name in NORMAL:
                result.zero_()
        return result


def run_deterministically(function: Callable[[], T], keep_casts: bool = False) -> tuple[T, DeterministicMode]:
    """``function()`` under :class:`DeterministicMode`, and the mode; casts are kept if the function fails without them."""
    mode = DeterministicMode(keep_casts=keep_casts)
    try:
        with mode:
            return function(), mode
    except (RuntimeError, TypeError):
        if keep_casts or not mode.casts:
            raise
        return run_deterministically(function, keep_casts=True)
