"""The limit of time of every search: CPU time of its thread, by the clock on a very busy machine, longer on a slow one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

SLOWEST = 3.0  # seconds by the clock that count as one at least, on however busy a machine
FEW = 4_000_000  # parameters of a model whose operators are too small to be shared between threads
SMALL = 20_000_000  # parameters of a model whose diagnosis must be quick
PAUSE = 0.02  # seconds between two looks at the CPU time
USUAL = 0.0013  # seconds of :func:`slowness`'s piece of work on the machine for which limits are set
SLOW = 3.0  # times as long as there, at most, that a search may take


@contextmanager
def few_threads(parameters: int) -> Iterator[None]:
    """Let torch compute with one thread, if a model has FEW parameters.

    On a busy machine, threads that wait for each other after each small operator take 15 times the time of one.
    """
    import torch

    threads = torch.get_num_threads()
    if parameters < FEW:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def slowness() -> float:
    """Return how many times as long as on the usual machine small operators take here: between 1 and SLOW.

    A search multiplies its limit by it, so that a slow machine finds what a fast one does. Measured once, in 20 ms.
    """
    import torch

    rows = torch.ones(16, 64, dtype=torch.float64, device="cpu")
    weight = torch.eye(64, dtype=torch.float64, device="cpu")

    def piece() -> float:
        begun, out = time.perf_counter(), rows  # CPU time is too coarse on some systems; the least of six is little disturbed
        for _ in range(200):
            out = torch.layer_norm(out @ weight, (64,))
        return time.perf_counter() - begun

    with torch.no_grad(), few_threads(0):
        return min(max(1.0, min(piece() for _ in range(6)) / USUAL), SLOW)


class TimeUp(Exception):
    """The time for a search is over."""


class Deadline:
    """A limit of ``seconds`` from now on: of CPU time of the calling thread, and of SLOWEST times as many by the clock.

    On a quiet machine, CPU time and the clock are the same, because that thread takes its share of whatever torch computes on
    several threads. A part of a search, ``within`` another's limit, has its own CPU time and only the other's clock, so that on a
    busy machine every part gets its share as long as there is any time. Where OpenMP's threads spin while they wait (the command
    line lets them sleep), that is CPU time as well. Ask in the thread that made it.
    """

    def __init__(self, seconds: float = math.inf, within: Deadline | None = None) -> None:
        self.seconds, self.within = seconds, within
        self._clock, self._cpu = time.monotonic(), time.thread_time()
        self._asked, self._passed = self._clock, False

    @property
    def left(self) -> float:
        """The seconds that are left; negative behind the deadline."""
        cpu = time.thread_time() - self._cpu
        if self.within is not None:
            return min(self.seconds - cpu, self.within.left)
        return self.seconds - max(cpu, (time.monotonic() - self._clock) / SLOWEST)

    @property
    def words(self) -> str:
        """The limit in words; whether it is the clock's is told of a search that has just ended."""
        cpu = time.thread_time() - self._cpu
        clock = f", reached by the clock after {cpu:.0f} s on the processor: other programs have the rest"
        return f"{self.seconds:.3g} s{clock if cpu < 0.95 * self.seconds else ''}"

    @property
    def passed(self) -> bool:
        """Whether the limit is over; the CPU time, which is slow to ask for, is asked for every PAUSE seconds."""
        now = time.monotonic()
        if now - self._asked >= PAUSE or self.seconds <= 0:
            self._asked, self._passed = now, self.left <= 0
        return self._passed

    def part(self, share: float, most: float = math.inf) -> Deadline:
        """Return a limit of 1 of ``share`` parts of what is left, and of ``most`` seconds."""
        return Deadline(min(self.left / share, most), self)

    def check(self) -> None:
        """Raise TimeUp behind the deadline."""
        if self.passed:
            raise TimeUp
