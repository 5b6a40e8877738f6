"""Run somebody else's module on a few tokens, and record it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpt2.config import GPT2Config
from gpt2.port.recording.dataflow import Recording
from gpt2.port.recording.forward import ForwardError, error_line
from gpt2.port.recording.recorder import record


def give_shapes(module: nn.Module, config: GPT2Config, name: str) -> None:
    """Make a module register its parameters (keras does so when asked), and give lazy ones a shape by calling the module.

    Raises:
        ForwardError: that call fails; ``name`` is the module's in the message.
    """
    for part in list(module.modules()):
        part.named_parameters()
    if any(is_lazy(tensor) for tensor in [*module.parameters(), *module.buffers()]):
        try:
            module(_probe(config.vocab_size, 2, min(5, config.n_positions)))
        except Exception as error:
            reason = error_line(error)
            raise ForwardError(f"{name}: its parameters have no shapes yet, and its forward fails ({reason})") from None


def record_probe(module: nn.Module, config: GPT2Config, name: str) -> Recording:
    """Record a forward pass on a few tokens.

    If the module refuses them, it is given small token ids, which every vocabulary has, and then a window of full length.

    Raises:
        ForwardError: its forward fails on all of them; ``name`` is the module's in the message.
    """
    device = next(module.parameters(), torch.empty(0)).device
    failures = []
    short = min(5, config.n_positions)
    small = min(6 * short, config.vocab_size)
    attempts = [(2, short, config.vocab_size), (2, short, small), (1, config.n_positions, config.vocab_size)]
    for batch, length, vocabulary in dict.fromkeys(attempts):
        try:
            return record(module, _probe(vocabulary, batch, length).to(device))
        except Exception as error:
            failures.append(error_line(error))
    raise ForwardError(f"{name}: its forward fails on ids of shape (2, {short}): {failures[0]}")


def _probe(vocabulary: int, batch: int, length: int) -> Tensor:
    """(B, T) ids, distinct where the vocabulary allows, and none of them the number of a position."""
    low = length if vocabulary >= length * (batch + 1) else 0
    order = torch.randperm(vocabulary - low, generator=torch.Generator().manual_seed(0)) + low
    return order.repeat(length * batch // len(order) + 1)[: length * batch].view(batch, length)
