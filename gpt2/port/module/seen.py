"""What the operators of a forward pass show where no cause explains its values: a line of ``SEEN`` each, seen and not proved."""

from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.port.recording.dispatch import OperatorCall, OperatorMode, tensors
from gpt2.port.recording.forward import plain_attention

UNREAD, TWICE = "a masked_fill whose result nothing reads", "a block"
# What is seen, the causes that would say it, and the operators that show it.
SEEN = (
    (
        "a mask is made and never applied: masked_fill returns a new tensor, and nothing reads it (masked_fill_ works in place)",
        {"mask-missing", "mask-multiplied"},
        {UNREAD},
    ),
    ("an error function (erf), as of the exact GELU; GPT-2's GELU is that of tanh", {"gelu-variant"}, {"erf"}),
    ("a ReLU; GPT-2's activation is GELU", {"gelu-variant"}, {"relu", "relu_", "clamp_min"}),
    ("sines and cosines, as of rotary positions; GPT-2 adds learned ones", {"rotary-positions", "position-sinusoidal"}, {"sin"}),
    ("a block runs more than once", {"layer-repeated"}, {TWICE}),
)


class _Noticing(OperatorMode):
    """While entered, keeps the names of operators in ``named``, and the masked scores that nothing has read in ``unread``."""

    def __init__(self) -> None:
        super().__init__()
        self.named = set[str]()
        self.unread: dict[int, Tensor] = {}  # by storage, so that views of one are one

    def handle(self, call: OperatorCall) -> Any:
        exact = call.name == "gelu" and call.named.get("approximate", "none") == "none"
        self.named.add("erf" if exact else call.name)
        for tensor in call.inputs:
            self.unread.pop(tensor.untyped_storage()._cdata, None)
        result = call.run()
        if call.name == "masked_fill":
            self.unread |= {tensor.untyped_storage()._cdata: tensor for tensor in tensors(result)}
        return result


@torch.no_grad()
def seen(module: nn.Module, ids: Tensor, named: Collection[str]) -> Iterator[str]:
    """Yield what the operators of ``module`` on (B, T) ``ids`` show, but what a cause of ``named`` says already."""
    noticing, runs = _Noticing(), Counter[str]()
    parents = [(name, part) for name, part in module.named_modules() if name and list(part.children())]
    blocks = [(name, part) for name, part in parents if sum(one.ndim > 1 for one in part.parameters()) > 2]  # several matrices
    handles = [part.register_forward_pre_hook(partial(lambda name, *_: runs.update([name]), name)) for name, part in blocks]
    try:
        with plain_attention(), noticing:
            module(ids)
    finally:
        for handle in handles:
            handle.remove()
    twice = [name for name, times in runs.items() if times > 1]
    shown = noticing.named | ({UNREAD} if noticing.unread else set()) | ({TWICE} if twice else set())
    for words, ids_of, operators in SEEN:
        if operators & shown and not ids_of & set(named):
            yield f"seen in your operators, not proved: {words}{f' ({twice[0]})' if TWICE in operators else ''}"
