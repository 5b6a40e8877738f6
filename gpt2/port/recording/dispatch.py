"""Intercept every operator that reaches a kernel: the base of all dispatch modes here, and a mode without randomness."""

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpt2.measure.user_code import place_in

T = TypeVar("T")
FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
FUSED_ATTENTION = {getattr(torch.ops.aten, f"_scaled_dot_product_{name}") for name in FUSED}
NARROWER = (torch.float32, torch.bfloat16, torch.float16)
CONTRACTIONS = {"mm", "addmm", "bmm", "baddbmm"}
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
NORMAL = {"randn", "randn_like", "normal_", "normal"}
RANDOM = {*NORMAL, "rand", "rand_like", "uniform_", "randint", "randint_like", "randperm", "multinomial"}
SPECIAL = {*CONTRACTIONS, *RANDOM, "_to_copy", "native_dropout", "bernoulli", "bernoulli_"}  # in a deterministic run


class Operator(NamedTuple):
    """What torch says of an operator, read once: each look at its schema makes the schema anew.

    ``name``: without namespace and overload: "mm", "add_". ``written``: the arguments that it changes. ``composite``: made of
    others; only inference mode lets such a one reach a dispatch mode. ``func`` keeps its address, by which it is found.
    """

    func: OpOverload
    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    fused: bool
    composite: bool


def _operator(func: OpOverload) -> Operator:
    arguments, key = func._schema.arguments, torch._C.DispatchKey.CompositeImplicitAutograd
    return Operator(
        func,
        func._schema.name.removeprefix("aten::"),
        tuple(one.name for one in arguments),
        tuple(one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write),
        func._overloadpacket in FUSED_ATTENTION,
        bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)),
    )


OPERATORS: dict[int, Operator] = {}  # by address: to hash an operator takes a call in Python


class OperatorCall:
    """A call of an operator that reached a kernel."""

    __slots__ = ("args", "func", "kind", "kwargs", "name", "writes")

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.kind = OPERATORS.get(id(func)) or OPERATORS.setdefault(id(func), _operator(func))
        self.name, self.writes = self.kind.name, bool(self.kind.written)

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    @property
    def named(self) -> dict[str, Any]:
        """All given arguments, by name."""
        return dict(zip(self.kind.arguments, self.args, strict=False)) | self.kwargs

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments, and in lists of them."""
        given = (one if isinstance(one, list | tuple) else (one,) for one in (*self.args, *self.kwargs.values()))
        return [one for some in given for one in some if isinstance(one, Tensor)]


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list):  # the usual arguments, faster than by torch's trees
        return [x for part in tree for x in tensors(part)]
    return [] if type(tree) in PLAIN else [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class OperatorMode(TorchDispatchMode):
    """While entered, runs :meth:`handle` in place of every operator; splits fused attention and composite operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would make torch import its compiler, which takes seconds."""
        return False

    def handle(self, call: OperatorCall) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        call = OperatorCall(func, args, kwargs or {})
        if call.kind.fused:
            with self:
                return plain_attention_kernel(call)
        if call.kind.composite:
            with self:  # inference mode does not split these
                result = func.decompose(*args, **call.kwargs)
            if result is not NotImplemented:
                return result
        return self.handle(call)


def plain_attention_kernel(call: OperatorCall) -> tuple[Any, ...]:
    """Compute a fused attention's result by plain operators; results for the backward pass are None."""
    named = call.named
    mask, dropout = named.get("attn_mask", named.get("attn_bias")), named.get("dropout_p", 0.0)
    out, weights = torch.ops.aten._scaled_dot_product_attention_math(
        named["query"], named["key"], named["value"], mask, dropout, named.get("is_causal", False), scale=named.get("scale")
    )
    return (out, weights, *[None] * (len(call.func._schema.returns) - 2))


class FirstNaN(OperatorMode):
    """While entered, looks for the first result with NaN: ``words`` say which operator made it, of which shape, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ""

    def handle(self, call: OperatorCall) -> Any:
        result = call.run()
        made = next((x for x in tensors(result) if bool(x.isnan().any())), None)
        if made is not None and not self.words and "empty" not in call.name:
            held = " of NaN" * any(bool(x.isnan().any()) for x in call.inputs)
            self.words = f"{call.name.strip('_')}{held}, of shape {tuple(made.shape)}{place_in(traceback.extract_stack())}"
        return result


class Dropout(NamedTuple):
    """An active dropout: its input, and the length of the sums in the last matrix product before it."""

    value: Tensor
    after: int


class DeterministicMode(OperatorMode):
    """Removes randomness (unless ``keep_random``) and casts to narrower dtypes (unless ``keep_casts``).

    Dropout is the identity, normal noise is zero, and float64 stays float64, so that the remaining differences from GPT-2 come
    from the module's formulas and weights. ``dropouts``, ``draws`` (other random operators) and ``casts`` list what occurred;
    ``operators`` is how many operators ran.
    """

    def __init__(self, *, keep_casts: bool = False, keep_random: bool = False) -> None:
        super().__init__()
        self.keep_casts, self.keep_random = keep_casts, keep_random
        self.dropouts: list[Dropout] = []
        self.dropped: set[float] = set()  # with which probabilities
        self.draws: list[str] = []
        self.casts: set[str] = set()
        self.operators = 0
        self._summed = 0  # the length of the sums in the last matrix product
        self._mask: Tensor | None = None  # a random mask that was drawn and not yet used

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kind = OPERATORS.get(id(func))
        if kind is None or kind.fused or kind.composite or kind.name in SPECIAL or self._mask is not None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.operators += 1
        return func(*args, **(kwargs or {}))  # most operators: nothing here changes them

    def handle(self, call: OperatorCall) -> Any:
        self.operators += 1
        name, args = call.name, call.args
        if name in CONTRACTIONS:
            self._summed = call.inputs[-1].shape[-2]
        if name == "_to_copy" and args[0].dtype == torch.float64 and call.kwargs.get("dtype") in NARROWER:
            self.casts.add(str(call.kwargs["dtype"]).removeprefix("torch."))
            if not self.keep_casts:
                call = OperatorCall(call.func, args, {**call.kwargs, "dtype": torch.float64})
        if name == "native_dropout" and args[2] is not False and args[1] > 0:
            self.dropouts.append(Dropout(args[0].clone(), self._summed))
            self.dropped.add(args[1])
            if not self.keep_random:
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if self._mask is not None and name in ("mul", "mul_"):
            mask = self._mask.data_ptr()
            if any(factor.data_ptr() == mask for factor in call.inputs):
                value = next((factor for factor in call.inputs if factor.data_ptr() != mask), call.inputs[0])
                self.dropouts.append(Dropout(value.clone(), self._summed))
                self._mask = None
        keep = call.named.get("p", 0.5 if name == "bernoulli_" else None) if name.startswith("bernoulli") else None
        if isinstance(keep, float) and 0 < keep < 1:
            self.dropped.add(round(1 - keep, 9))
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


def run_deterministically(
    function: Callable[[], T], keep_casts: bool = False, keep_random: bool = False
) -> tuple[T, DeterministicMode]:
    """Return ``function()`` under :class:`DeterministicMode`, and the mode; keep casts if it fails without them."""
    mode = DeterministicMode(keep_casts=keep_casts, keep_random=keep_random)
    try:
        with mode:
            return function(), mode
    except (RuntimeError, TypeError):
        if keep_casts or not mode.casts:
            raise
        return run_deterministically(function, True, keep_random)
