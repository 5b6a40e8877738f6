"""Run a forward pass without randomness and without rounding to less than float64.

Dropout passes everything through, normal noise is zero, and casts from float64 to a narrower dtype stay float64. Differences from
GPT-2 that remain come from the module's own formulas and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpt2.port.recording.dispatch import Call, OperatorMode

T = TypeVar("T")
NARROWER = (torch.float32, torch.bfloat16, torch.float16)
CONTRACTIONS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
NORMAL = {"randn", "randn_like", "normal_", "normal"}
RANDOM = {*NORMAL, "rand", "rand_like", "uniform_", "randint", "randint_like", "randperm", "multinomial"}


@dataclass(frozen=True)
class Dropout:
    """An active dropout, and what it was applied to: width and number of rows; size, sum and sum of squares; ``after`` is the
    length of the sums in the last matrix product before it."""

    width: int
    rows: int
    after: int
    sums: tuple[int, float, float]

    def is_of(self, value: Tensor) -> bool:
        """Whether it was applied to ``value``, in any layout."""
        size, first, second = _sums(value)
        scale = (second / max(size, 1)) ** 0.5 * size
        return size == self.sums[0] and abs(first - self.sums[1]) <= 1e-9 * scale and abs(second - self.sums[2]) <= 1e-9 * second


class DeterministicMode(OperatorMode):
    """Removes randomness (unless ``keep_random``) and casts to narrower dtypes (unless ``keep_casts``).

    ``dropouts`` are those that were active, ``draws`` the names of other random operators, ``casts`` the narrower dtypes.
    """

    takes_apart = False

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
            self._dropped(args[0])
            if not self.keep_random:
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if self._mask is not None and name in ("mul", "mul_"):
            mask = self._mask.data_ptr()
            if any(factor.data_ptr() == mask for factor in call.inputs):
                self._dropped(next((factor for factor in call.inputs if factor.data_ptr() != mask), call.inputs[0]))
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
        if name == "_scaled_dot_product_flash_attention_for_cpu" and named.get("dropout_p", 0.0) > 0:
            self.dropouts.append(Dropout(args[0].shape[-2], args[0].shape[-2], self._summed, (0, 0.0, 0.0)))
        result = call.run()
        if name in RANDOM:
            self.draws.append(name)
            if not self.keep_random and name in NORMAL:
                result.zero_()
        return result

    def _dropped(self, tensor: Tensor) -> None:
        shape = tensor.shape
        width, rows = shape[-1] if shape else 1, shape[-2] if len(shape) > 1 else 1
        self.dropouts.append(Dropout(width, rows, self._summed, _sums(tensor)))


def _sums(tensor: Tensor) -> tuple[int, float, float]:
    """Size, sum and sum of squares."""
    values = tensor.double()
    return values.numel(), float(values.sum()), float(values.square().sum())


def run_deterministically(function: Callable[[], T]) -> tuple[T, DeterministicMode]:
    """``function()`` under :class:`DeterministicMode`, and the mode; casts are kept if the function fails without them."""
    mode = DeterministicMode()
    try:
        with mode:
            return function(), mode
    except (RuntimeError, TypeError):
        if not mode.casts:
            raise
    mode = DeterministicMode(keep_casts=True)
    with mode:
        return function(), mode
