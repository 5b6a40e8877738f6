"""Keep every floating-point tensor that a module computes in one forward pass, to be searched by value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from gpt2.config import GPT2Config
from gpt2.measure.user_code import logits_of
from gpt2.port.recording.dispatch import OperatorCall, OperatorMode, tensors
from gpt2.port.recording.forward import plain_attention
from gpt2.port.recording.pool import Pool

VIEWS_PER_TOKEN = 4  # views of a parameter are kept up to this many widths per token (rows of an embedding)


class _Collector(OperatorMode):
    """While entered, adds results to ``pool``: up to ``largest`` elements, and up to ``views`` of a weight.

    A tensor that is written part by part is added when it is next read as a whole.
    """

    def __init__(self, module: nn.Module, views: int, largest: int) -> None:
        super().__init__()
        held = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.is_floating_point()]
        self.pool, self.largest = Pool(), largest
        self.pool.narrow = bool(held) and held[0].dtype != torch.float64
        self.limits = {tensor.untyped_storage()._cdata: views for tensor in held}
        self._written: dict[int, UntypedStorage] = {}  # of which a part was written; held, so that no other gets its address

    def handle(self, call: OperatorCall) -> Any:
        for tensor in () if call.writes else call.inputs:
            storage = tensor.untyped_storage()
            if storage._cdata in self._written and 1 < tensor.numel() <= self.largest and _is_whole(tensor):
                del self._written[storage._cdata]
                self.pool.add(tensor)
        result = call.run()
        seen: set[tuple[int, int]] = set()
        if not call.writes:  # a view of a whole input adds nothing
            seen = {(tensor.untyped_storage()._cdata, tensor.numel()) for tensor in call.inputs}
        for tensor in tensors(result):
            storage = tensor.untyped_storage()._cdata
            largest = min(self.largest, self.limits.get(storage, self.largest))
            if tensor.is_floating_point() and 1 < tensor.numel() <= largest and (storage, tensor.numel()) not in seen:
                self.pool.narrow |= tensor.dtype != torch.float64
                self.pool.add(tensor)
            if call.writes and tensor.is_floating_point() and not _is_whole(tensor):
                self._written[storage] = tensor.untyped_storage()
        return result


@torch.no_grad()
def collect(module: nn.Module, ids: Tensor, config: GPT2Config) -> Pool:
    """Run ``module`` on (B, T) ``ids`` and keep its operators' results, up to the size of the widest activation."""
    width, inner = config.n_embd, config.inner
    largest = 4 * ids.numel() * max(inner, 3 * width, ids.size(1) * 64)
    collector = _Collector(module, VIEWS_PER_TOKEN * ids.numel() * width, largest)
    with plain_attention(), collector:
        output = logits_of(module(ids), ids, config.vocab_size)
    collector.pool.logits = output.detach().to("cpu", torch.float64)
    return collector.pool


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor has all elements of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
