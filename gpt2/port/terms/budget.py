"""The limit of every search: how much it may compute, which is the same on every machine, and one limit of the clock."""

import gc
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

SMALL = 20_000_000  # parameters of a model whose diagnosis must be quick
WORK = {True: 1.5e6, False: 1e7}  # for a whole diagnosis, by whether the model is small: 20 and 120 s of a quiet core
CLOCK = 900.0  # seconds after which a whole diagnosis ends, on however slow and busy a machine
FEW = 4_000_000  # parameters of a model whose operators are too small to be shared between threads
OLD = 1000  # collections of middle-aged objects before one of all, as in commands
# What costs as much as calling one small operator.
PRODUCTS = 100_000  # multiplications and additions of a matrix product
ELEMENTS = 10_000  # numbers that an operator reads or writes


@contextmanager
def few_threads(parameters: int) -> Iterator[None]:
    """Let torch compute with one thread, if a model has FEW parameters; search all objects for garbage more rarely.

    On a busy machine, threads that wait for each other after each small operator take 15 times the time of one. To look through
    all that torch's import has made, again and again, took a sixth of a diagnosis.
    """
    import torch

    threads, (young, middle, old) = torch.get_num_threads(), gc.get_threshold()
    if parameters < FEW:
        torch.set_num_threads(1)
    gc.set_threshold(young, middle, max(old, OLD))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(young, middle, old)


def of_model(parameters: int) -> "Budget":
    """Return the budget for the diagnosis of a model of this size."""
    return Budget(WORK[parameters < SMALL], CLOCK)


class Spent(Exception):
    """The budget of a search is spent."""


class Budget:
    """A limit of ``work`` from now on, in calls of a small operator; of the clock as well, ``seconds`` for all parts together.

    What computes a value says what that costs (:meth:`spend`), and a search asks between two candidates whether it may go on. So
    the same search ends at the same candidate on any machine, unless the clock, which is for machines of another kind, ends it.
    """

    def __init__(self, work: float = math.inf, seconds: float = math.inf, of: "Budget | None" = None) -> None:
        self.whole: Budget = self if of is None else of.whole
        if of is None:
            self.done, self.seconds, self.deadline = 0.0, seconds, time.monotonic() + seconds
        self.end: float = min(self.whole.done + work, math.inf if of is None else of.end)

    def spend(self, calls: float, elements: float = 0, products: float = 0) -> None:
        """Count operators, the numbers that they read or write, and the products of matrices."""
        self.whole.done += calls + elements / ELEMENTS + products / PRODUCTS

    @property
    def left(self) -> float:
        """The work that is left."""
        return self.end - self.whole.done

    @property
    def late(self) -> bool:
        """Whether the clock ends the search."""
        return time.monotonic() > self.whole.deadline

    @property
    def spent(self) -> bool:
        return self.whole.done >= self.end or self.late

    def ended(self, untried: Iterable[str]) -> str:
        """Return words for a search that has just ended here: at which limit, and what was not tried, or not all of it."""
        limit = f"of {self.whole.seconds:g} s, because this machine is slow or busy" if self.late else "of work"
        return f"the search ended at its limit {limit}; not tried: {', '.join(untried)}"

    def part(self, share: float) -> "Budget":
        """Return a limit of 1 of ``share`` parts of what is left."""
        return Budget(self.left / share, of=self)

    def check(self) -> None:
        """Raise Spent if nothing is left."""
        if self.spent:
            raise Spent
