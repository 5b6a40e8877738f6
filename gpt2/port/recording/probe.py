"""A stranger's module, run on a few tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.port.mapping.check import told
from gpt2.port.recording.dataflow import Recording, record


def give_shapes(module: nn.Module, config: GPT2Config, who: str) -> None:
    """Have a module register its parameters (keras does so when asked), and give them shapes (lazy ones get them when called)."""
    for part in list(module.modules()):
        part.named_parameters()
    if any(is_lazy(tensor) for tensor in [*module.parameters(), *module.buffers()]):
        try:
            module(_probe(config.vocab_size, 2, min(5, config.n_positions)))
        except Exception as error:
            raise InputError(f"{who}: its parameters have no shapes yet, and its forward fails ({told(error)})") from None


def run(module: nn.Module, config: GPT2Config, who: str) -> Recording:
    """A forward pass on a few tokens; on early ones, if the module knows fewer; on as many as the checkpoint has positions, if
    it takes no fewer."""
    device = next(module.parameters(), torch.empty(0)).device
    failures = []
    short = min(5, config.n_positions)
    few = min(6 * short, config.vocab_size)  # ids that every vocabulary has
    tries = [(2, short, config.vocab_size), (2, short, few), (1, config.n_positions, config.vocab_size)]
    for batch, length, vocabulary in dict.fromkeys(tries):
        try:
            return record(module, _probe(vocabulary, batch, length).to(device))
        except Exception as error:
            failures.append(told(error))
    raise InputError(f"{who}: its forward fails on ids of shape (2, {short}): {failures[0]}")


def _probe(vocabulary: int, batch: int, length: int) -> Tensor:
    """(B, T) ids, distinct where the vocabulary allows, and none of them the number of a position."""
    low = length if vocabulary >= length * (batch + 1) else 0
    order = torch.randperm(vocabulary - low, generator=torch.Generator().manual_seed(0)) + low
    return order.repeat(length * batch // len(order) + 1)[: length * batch].view(batch, length)
