"""Measure how fast each rank computes, until its own gradients are there: this names the slowest, for which all others wait."""

import time
from typing import Any, Self

import torch
from torch import nn

from gpt2.train.parallel import Ranks, sharded
from gpt2.train.recipe import Recipe


class Clock:
    """Times each step of DDP from its begin to the last of this rank's gradients, reading the batch included.

    FSDP's ranks wait for each other in every block, so its steps have no such time. Where targets may be unscored, the time
    includes one wait, to count the scored ones. A step without gradients is left out.
    """

    def __init__(self, scored: nn.Module, part: Recipe, ranks: Ranks) -> None:
        self.ranks, self.tokens = ranks, part.batch_size * part.context
        self.on = ranks.size > 1 and not sharded(scored)
        self.steps: list[tuple[Any, Any]] = []
        for parameter in scored.parameters() if self.on else ():
            if parameter.requires_grad:  # DDP begins to wait after the last one
                parameter.register_post_accumulate_grad_hook(self._mark)

    def _mark(self, parameter: torch.Tensor) -> None:
        self.ready = self._now()

    def __enter__(self) -> Self:
        self.began = self.ready = self._now() if self.on else None
        return self

    def __exit__(self, *raised: object) -> None:
        if self.ready is not self.began:
            self.steps.append((self.began, self.ready))

    def __call__(self) -> tuple[float, ...]:
        """Return each rank's tokens per second since the last call; empty for one process, and for FSDP."""
        if not self.on:
            return ()
        seconds = sum(self._between(*step) for step in self.steps)
        speed, self.steps = len(self.steps) * self.tokens / max(seconds, 1e-9), []
        return tuple(self.ranks.gathered(speed))

    def _now(self) -> Any:
        if self.ranks.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self.ranks.device, enable_timing=True)  # the device computes later than the call returns
        event.record()
        return event

    def _between(self, began: Any, ready: Any) -> float:
        return ready - began if isinstance(began, float) else began.elapsed_time(ready) / 1000


def slowest(by_rank: tuple[float, ...]) -> str:
    """Return a remark for the log that names the slowest rank; "" unless several have computed."""
    busy = [speed for speed in by_rank if speed]  # of few windows of validation text, some ranks have none
    if len(busy) < 2:
        return ""
    low, high = min(busy), max(busy)
    return f"slowest rank {by_rank.index(low)}: {low:,.0f} tok/s computing, fastest {high:,.0f}"
