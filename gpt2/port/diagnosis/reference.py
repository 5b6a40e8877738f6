"""Our model with other weights: what a port's logits and intermediate values are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with
from gpt2.measure.metrics import worst_relative_error
from gpt2.model import GPT2


class Reference:
    """Our model with the weights ``state``, and perhaps a head of its own (V, D): ids (B, T) to logits (B, T, V)."""

    def __init__(
        self, ours: GPT2, state: Mapping[str, Tensor], head: Tensor | None = None, dtype: torch.dtype = torch.float64
    ) -> None:
        self.model = model_with(ours.config, ((name, tensor.to(dtype)) for name, tensor in state.items()))
        self.model.requires_grad_(False)
        self.own_head = head

    def __call__(self, ids: Tensor, offset: int = 0) -> Tensor:
        """With positions counted from ``offset``."""
        ids = ids.cpu()
        wpe = self.model.wpe.weight
        self.model.wpe.weight = nn.Parameter(wpe[offset:], requires_grad=False)
        hidden = self.model.hidden(ids)
        self.model.wpe.weight = wpe
        return self.model.head(hidden) if self.own_head is None else F.linear(hidden, self.own_head.to(hidden))


def logits_error(theirs: Tensor, ours: Tensor) -> float:
    """The worst relative error of the positions that a port returns."""
    return worst_relative_error(theirs, ours[:, -theirs.shape[1] :])
