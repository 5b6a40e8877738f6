"""Run somebody's forward pass so that two causes of difference are gone: random numbers, and detours through a narrower dtype.

What is left to differ is what the port computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
NARROWER = (torch.float32, torch.bfloat16, torch.float16)
CONTRACTIONS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
DRAWS = {
    "randn",
    "randn_like",
    "normal_",
    "normal",
    "rand",
    "rand_like",
    "uniform_",
    "randint",
    "randint_like",
    "randperm",
    "multinomial",
}


@dataclass(frozen=True)
class Dropout:
    """A dropout that was active, and what it was applied to: its width and rows, its size, sum and sum of squares; ``after`` is
    the length of the sums of the last product before."""

    width: int
    rows: int
    after: int
    sums: tuple[int, float, float]

    def is_of(self, value: Tensor) -> bool:
        """Whether it was applied to ``value``, however that lay."""
        size, first, second = sums(value)
        scale = (second / max(size, 1)) ** 0.5 * size
        return size == self.sums[0] and abs(first - self.sums[1]) <= 1e-9 * scale and abs(second - self.sums[2]) <= 1e-9 * second


class Calm(TorchDispatchMode):
    """Under it dropout lets all through, normal noise is zero, and what is cast from float64 to less stays float64.

    ``dropouts`` and ``draws`` (names of operators) say what it met; ``casts``, the dtypes that were asked for. With
    ``lift=False`` and ``still=False`` it only takes notes.
    """

    def __init__(self, *, lift: bool = True, still: bool = True) -> None:
        super().__init__()
        self.lift, self.still = lift, still
        self.dropouts: list[Dropout] = []
        self.draws: list[str] = []
        self.casts: set[str] = set()
        self._after = 0
        self._noise: Tensor | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in load_into's recorder: else torch imports its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if name in CONTRACTIONS:
            self._after = [arg for arg in args if isinstance(arg, Tensor)][-1].shape[-2]
        if name == "_to_copy" and args[0].dtype == torch.float64 and kwargs.get("dtype") in NARROWER:
            self.casts.add(str(kwargs["dtype"]).removeprefix("torch."))
            if self.lift:
                kwargs["dtype"] = torch.float64
        if name == "native_dropout" and args[2] is not False and args[1] > 0:
            self._dropped(args[0])
            if self.still:
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if self._noise is not None and name in ("mul", "mul_"):
            factors = [arg for arg in args if isinstance(arg, Tensor)]
            if any(factor.data_ptr() == self._noise.data_ptr() for factor in factors):
                self._dropped(next((f for f in factors if f.data_ptr() != self._noise.data_ptr()), factors[0]))
                self._noise = None
        if name == "bernoulli_":
            self._noise = args[0]  # what it is multiplied with is dropped out
            keep = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            if self.still and isinstance(keep, float):
                return args[0].fill_(keep)  # divided by that probability afterwards
        if name == "bernoulli":
            keep = args[1] if len(args) > 1 else kwargs.get("p")
            result = torch.full_like(args[0], keep) if isinstance(keep, float) else args[0].clone()
            self._noise = result = result if self.still else func(*args, **kwargs)
            return result
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
            if dropout > 0:
                self.dropouts.append(Dropout(args[0].shape[-2], args[0].shape[-2], self._after, (0, 0.0, 0.0)))
        result = func(*args, **kwargs)
        if name in DRAWS:
            self.draws.append(name)
            if self.still and name in ("randn", "randn_like", "normal_", "normal"):
                result.zero_()
        return result

    def _dropped(self, tensor: Tensor) -> None:
        shape = tensor.shape
        width, rows = shape[-1] if shape else 1, shape[-2] if len(shape) > 1 else 1
        self.dropouts.append(Dropout(width, rows, self._after, sums(tensor)))


def sums(tensor: Tensor) -> tuple[int, float, float]:
    """Its size, sum and sum of squares."""
    values = tensor.double()
    return values.numel(), float(values.sum()), float(values.square().sum())


def calmly(call: Callable[[], Any]) -> tuple[Any, Calm]:
    """``call()`` under :class:`Calm`. Where its constants do not mix with float64, casts are left as they are."""
    calm = Calm()
    try:
        with calm:
            return call(), calm
    except (RuntimeError, TypeError):
        if not calm.casts:
            raise
    calm = Calm(lift=False)
    with calm:
        return call(), calm
