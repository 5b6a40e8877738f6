"""What the operators of a forward pass show where no cause explains its values: a line of ``SEEN`` each, seen and not proved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.port.recording.dispatch import OperatorCall, OperatorMode, tensors
from gpt2.port.recording.forward import plain_attention


class _Noticing(OperatorMode):
    """While entered, counts operators, in ``named`` by name, and keeps the masked scores that nothing has read, in ``unread``."""

    def __init__(self) -> None:
        super().__init__()
        self.named = Counter[str]()
        self.twice = list[str]()  # parts with weights that run more than once
        self.unread: dict[int, Tensor] = {}  # by storage, so that views of one are one

    def handle(self, call: OperatorCall) -> Any:
        exact = call.name == "gelu" and call.named.get("approximate", "none") == "none"
        self.named["erf" if exact else call.name] += 1
        for tensor in call.inputs:
            self.unread.pop(tensor.untyped_storage()._cdata, None)
        result = call.run()
        if call.name == "masked_fill":
            self.unread |= {tensor.untyped_storage()._cdata: tensor for tensor in tensors(result)}
        return result


def _operator(*names: str) -> Callable[[_Noticing], bool]:
    return lambda noticed: any(noticed.named[name] for name in names)


# What is seen, the causes that would say it, and whether it is there.
SEEN: tuple[tuple[str, str, Callable[[_Noticing], bool]], ...] = (
    (
        "a mask is made and never applied: masked_fill returns a new tensor, and nothing reads it (masked_fill_ works in place)",
        "mask-missing mask-multiplied",
        lambda noticed: bool(noticed.unread),
    ),
    ("an error function (erf), as of the exact GELU; GPT-2's GELU is that of tanh", "gelu-variant", _operator("erf")),
    ("a ReLU; GPT-2's activation is GELU", "gelu-variant", _operator("relu", "relu_", "clamp_min")),
    (
        "sines and cosines, as of rotary positions; GPT-2 adds learned ones",
        "rotary-positions position-sinusoidal",
        _operator("sin"),
    ),
    ("a block runs more than once", "layer-repeated", lambda noticed: bool(noticed.twice)),
)


@torch.no_grad()
def seen(module: nn.Module, ids: Tensor, named: Collection[str]) -> Iterator[str]:
    """Yield what the operators of ``module`` on (B, T) ``ids`` show, but what a cause of ``named`` says already."""
    noticing, runs = _Noticing(), Counter[str]()
    blocks = [(name, part) for name, part in module.named_modules() if name and _is_block(part)]

    def count(name: str, *_: Any) -> None:
        runs[name] += 1

    handles = [part.register_forward_pre_hook(partial(count, name)) for name, part in blocks]
    try:
        with plain_attention(), noticing:
            module(ids)
    finally:
        for handle in handles:
            handle.remove()
    noticing.twice = [name for name, times in runs.items() if times > 1]
    for words, ids_of, is_there in SEEN:
        if is_there(noticing) and not set(ids_of.split()) & set(named):
            yield f"seen in your operators, not proved: {words}{f' ({noticing.twice[0]})' if ids_of == 'layer-repeated' else ''}"


def _is_block(part: nn.Module) -> bool:
    """Return whether a part has parts of its own with several matrices, as a block has."""
    return sum(parameter.ndim > 1 for parameter in part.parameters()) > 2 and any(True for _ in part.children())
