"""Keep the keys and values of tokens that the model has read, in preallocated tensors."""

import torch
from torch import Tensor

from gpt2.config import GPT2Config


class KVCache:
    """Keys and values of up to ``capacity`` tokens in every layer; ``length`` of them are filled.

    ``keys`` and ``values`` are (L, B, H, capacity, K). A forward pass calls :meth:`append` once per layer, always at the same
    offset, and then :meth:`advance` once. The tensors are written in place, so autograd cannot go back through them.
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
        """Store ``k`` and ``v`` (B, H, T, K); return the layer's (B, H, length + T, K). A wrong shape is a ValueError."""
        if k.size(0) != self.keys.size(1):  # copy_ would broadcast a single row to all of them
            raise ValueError(f"the cache was made for a batch of {self.keys.size(1)}; {k.size(0)} rows were given to it")
        tokens = k.size(-2)
        end = self.length + tokens
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens; {end} were asked of it")
        keys, values = self.keys.select(0, layer), self.values.select(0, layer)
        keys.narrow(2, self.length, tokens).copy_(k)  # narrow() takes half the time of indexing
        values.narrow(2, self.length, tokens).copy_(v)
        return keys.narrow(2, 0, end).to(k.dtype), values.narrow(2, 0, end).to(v.dtype)

    def advance(self, tokens: int) -> None:
        """Count the ``tokens`` that every layer has appended."""
        self.length += tokens

    def reset(self, length: int = 0) -> None:
        """Keep the first ``length`` tokens only."""
        self.length = min(self.length, length)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert keys and values to ``dtype``; the filled part is kept."""
        with torch.inference_mode(False), torch.no_grad():  # makes tensors that can be written in any mode
            keys, values = torch.empty_like(self.keys, dtype=dtype), torch.empty_like(self.values, dtype=dtype)
            for new, old in ((keys, self.keys), (values, self.values)):
                new[..., : self.length, :] = old[..., : self.length, :]
            self.keys, self.values = keys, values
