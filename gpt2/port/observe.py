"""Observe a program's values: find, by value, what it has at a node of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from gpt2.port.dump.fits.observed import Observed
from gpt2.port.dump.fits.recorded import Arrays
from gpt2.port.dump.simulation import Simulation
from gpt2.port.graph import merge, split
from gpt2.port.recording.pool import Pool

HEADED = ("attn.q", "attn.k", "attn.v", "attn.heads")  # streams that may be recorded by heads
AXES = {**dict.fromkeys((*HEADED, "attn.mixed"), (1, 0, 2)), **dict.fromkeys(("attn.weights", "attn.scores"), (1, 0))}
FAR = 10  # times the tolerance: logits of one token, by their own size


class Seen(NamedTuple):
    """The program's own numbers for a value, laid out like it, and the relative error of the value."""

    own: Tensor
    error: float
    entries: tuple[int, ...]


class Observation:
    """The arrays of ``pool``, which a program on the ids of ``model`` has computed."""

    def __init__(self, pool: Pool, model: Simulation) -> None:
        self.pool, self.model, self.heads = pool, model, model.config.n_head
        self.arrays = Arrays(pool, model)

    def check(self) -> None:
        """Raise :class:`gpt2.port.deadline.TimeUp` behind the limit of time."""
        self.pool.deadline.check()

    def find(self, node: str, value: Tensor, fault: bool = False) -> Seen | None:
        """Return the program's numbers for a node's value, if they are among its arrays; ``fault``: with the narrower bound."""
        laid = split(value, self.heads) if node in HEADED and value.shape[-1] % self.heads == 0 else value
        if node == "attn.scores" and value.shape[-1] == value.shape[-2]:
            laid = value.tril()
        match = self.pool.find_at(node, laid, *AXES.get(node, (0, 1)))
        if match is None or (fault and match.error > self.pool.fault_bound(node)):
            return None
        own = self.pool.adopt(laid, match)
        return Seen(merge(own) if laid.ndim == 4 and value.ndim == 3 else own, match.error, match.entries)

    def take(self, seen: Iterable[Seen]) -> None:
        """Note that these arrays are known."""
        for number in {number for one in seen for number in one.entries}:
            self.arrays.used |= self.pool.again(number)

    def unexplained(self, node: str, like: Tensor, but: Iterable[Seen]) -> Iterator[Observed]:
        """Yield the arrays that may be a node's value, laid out like it, those most like it first; none of ``but``."""
        known = {number for one in but for number in one.entries}
        yield from (one for one in self.arrays.observed(node, like) if one.number not in known)

    def are_logits(self, normed: Tensor, head: Tensor) -> bool:
        """Return whether the head (V, D) gives the logits from a normed stream; those of the last token are compared first."""
        pool = self.pool
        given = pool.logits[..., : len(head)]
        bound = pool.tolerance_at("logits")
        if pool.logits_error(normed[:, -1:] @ head.T, given[:, -1:]) > FAR * bound:
            return False
        made = (normed @ head.T)[:, -given.shape[1] :]
        return made.shape == given.shape and pool.logits_error(made, given) <= bound
