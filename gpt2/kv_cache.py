"""Keys and values of the tokens already seen, in buffers allocated once."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import GPT2Config


class KVCache:
    """Room for ``capacity`` tokens in every layer; ``length`` of them are filled.

    A forward pass calls :meth:`append` once per layer, all at the same offset, and :meth:`advance` once at its end.
    """

    def __init__(
        self,
        config: GPT2Config,
        batch: int,
        capacity: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = capacity or config.n_positions
        self.length = 0
        shape = (config.n_layer, batch, config.n_head, self.capacity, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``k`` and ``v`` (B, H, T, head) behind what is there; return all of it, (B, H, length + T, head)."""
        end = self.length + k.size(-2)
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens; {end} were asked of it")
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def reset(self) -> None:
        self.length = 0
