"""Right kernels that sum in another order: what other machines and libraries do, computed in float32 term by term."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.measure.elementary import STEPS, Steps

aten = torch.ops.aten
Order = Callable[[int], list[list[int]]]  # K -> lanes: the terms that each running sum adds, in turn; the lanes are then added


def _lanes(count: int) -> Order:
    return lambda k: [list(range(lane, k, count)) for lane in range(min(count, k))]


ORDERS: dict[str, Order] = {"one after another": _lanes(1), "8 lanes": _lanes(8)}  # the least precise, and a precise one


@contextmanager
def summing(order: Order) -> Iterator[None]:
    """Compute matrix products and sums of the ``with`` block in this order, in float32; norms, attention and GELU in steps."""
    functions = {function: step for function, step in STEPS.items() if function is not F.softmax}  # which a trace looks for
    with Steps(torch.float32, functions), _Ordered(order):
        yield


class _Ordered(TorchDispatchMode):
    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (aten.mm.default, aten.bmm.default) and args[0].dtype != torch.float64:
            return self._product(*args)
        if func is aten.addmm.default and args[0].dtype != torch.float64:
            return (self._product(*args[1:]).float() + args[0].float()).to(args[0].dtype)
        if func is aten.sum.dim_IntList and len(args[1]) == 1 and args[0].dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = args[0].movedim(args[1][0], -1)
            total = self._product(x.reshape(-1, x.size(-1)), x.new_ones(x.size(-1), 1)).view(x.shape[:-1])
            return total.unsqueeze(args[1][0]) if len(args) > 2 and args[2] else total
        return func(*args, **(kwargs or {}))

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply (..., M, K) and (..., K, N)."""
        wide, total = (a.float(), b.float()), None
        for lane in self.order(a.size(-1)):
            part = wide[0].new_zeros(*a.shape[:-1], b.size(-1))
            for k in lane:
                part.addcmul_(wide[0][..., k : k + 1], wide[1][..., k : k + 1, :])
            total = part if total is None else total + part
        return total.to(a.dtype)
