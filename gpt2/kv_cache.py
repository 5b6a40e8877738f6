"""Keys and values of the tokens already seen, in buffers allocated once."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2.config import GPT2Config


class KVCache:
    """Room for ``capacity`` tokens in every layer; ``length`` of them are filled.

    A forward pass calls :meth:`append` once per layer, all at the same offset, and :meth:`advance` once at its end. The
    buffers are written in place, so no gradient flows through them: autograd refuses a backward pass.
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
        self.capacity = config.n_positions if capacity is None else capacity
        self.length = 0
        shape = (config.n_layer, batch, config.n_head, self.capacity, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``k`` and ``v`` (B, H, T, head) behind what is there; return all of it, (B, H, length + T, head), as they are."""
        if k.size(0) != self.keys.size(1):  # a single row would be copied into all of them
            raise ValueError(f"the cache was made for a batch of {self.keys.size(1)}; {k.size(0)} rows were given to it")
        tokens = k.size(-2)
        end = self.length + tokens
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens; {end} were asked of it")
        keys, values = self.keys.select(0, layer), self.values.select(0, layer)
        keys.narrow(2, self.length, tokens).copy_(k)  # by its name, for brackets cost as much again
        values.narrow(2, self.length, tokens).copy_(v)
        return keys.narrow(2, 0, end).to(k.dtype), values.narrow(2, 0, end).to(v.dtype)

    def to(self, dtype: torch.dtype) -> KVCache:
        """A cache of ``dtype`` that holds the same tokens; this one, if it is of that dtype already."""
        if dtype == self.keys.dtype:
            return self
        other = KVCache.__new__(KVCache)
        other.capacity, other.length = self.capacity, self.length
        other.keys, other.values = torch.empty_like(self.keys, dtype=dtype), torch.empty_like(self.values, dtype=dtype)
        for new, old in ((other.keys, self.keys), (other.values, self.values)):
            new[..., : self.length, :] = old[..., : self.length, :]
        return other

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def reset(self, length: int = 0) -> None:
        """Forget all but the first ``length`` tokens."""
        self.length = min(self.length, length)
