"""Find the pairs of common faults that give a program's values, all of them, by what they make of its first tokens.

No token sees a later one. So a pair that does not give the first token's values is not the program's, and neither is one that
does not give the first two: each prefix leaves fewer pairs for the next. Faults by which a token sees later ones are tried on all
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gpt2.port.deadline import Deadline
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.pairs import PairRunner
from gpt2.port.dump.sieve import WIDE, Nearness, Sieve
from gpt2.port.dump.simulation import Program

PREFIXES = (1, 2, 4)  # tokens
HIDDEN = 1e-9  # how much a fault that the first token's values do not show may change their error
Pair = tuple[Candidate, Candidate]


class Pairing:
    """Pairs of the faults in ``ranked``: single faults with how near each comes, of which none explains the program alone.

    ``limit``: how far a pair's values may be from the program's.
    """

    def __init__(self, sieve: Sieve, ranked: Sequence[tuple[Nearness, Candidate]], limit: float, deadline: Deadline) -> None:
        self.sieve, self.limit, self.deadline = sieve, limit, deadline
        self.tokens = sieve.exact.ids.shape[1]
        tried = [(near, one) for near, one in ranked if not (one.is_right or _needs_rows(one))]
        self.faults = [one for _, one in tried]
        blocks = set(range(sieve.span.first, sieve.span.last))
        self.everywhere = torch.tensor([_is_outside(one) or {n for _, n in one.sites} >= blocks for one in self.faults])
        self.common = torch.tensor([not one.rare for one in self.faults])
        first = torch.tensor([near.first for near, _ in tried], dtype=torch.float64)
        right = next(near.first for near, one in ranked if one.is_right)
        bound = limit / float(sieve.span.wanted.square().mean().sqrt())
        self.is_first_right = right <= bound
        self.hidden = (first - right).abs() <= HIDDEN
        self.gives_first = first <= bound

    def rounds(self) -> Iterator[list[Pair]]:
        """Yield pairs that may be the program's, the nearest of each round first; the likelier rounds first."""
        if not self.faults or self.sieve.span.softmaxed or not PairRunner.takes(self.sieve.row):
            return
        later = self._later()
        wide, hidden = self.everywhere & self.common & ~later, self.hidden & ~later
        if self.is_first_right:
            yield self._growing(_combined(wide & hidden))
        else:
            yield self._growing(_crossed(self.gives_first & ~later, hidden))
        yield self._growing(_combined(wide & ~hidden))
        wide_later = self.everywhere & self.common & later
        yield self._near(torch.cat([_crossed(wide_later, wide), _combined(wide_later)]))
        if self.is_first_right:
            yield self._growing(_crossed(wide & hidden, hidden & ~wide))

    def _later(self) -> Tensor:
        """Return (F,) whether a fault lets a token see later ones: whether fewer tokens give their first two other values."""
        suspects = [number for number, one in enumerate(self.faults) if _may_see_later(one)]
        few, all = (self._runner(suspects, tokens).alone()[1:, :2] for tokens in (min(2, self.tokens), self.tokens))
        later = torch.zeros(len(self.faults), dtype=torch.bool)
        later[suspects] = ~((few - all).abs().amax((1, 2)) <= self.limit)
        return later

    def _growing(self, pairs: Tensor) -> list[Pair]:
        """Return the pairs that give the first tokens, the first few, and so on."""
        for prefix in PREFIXES:
            if prefix < self.tokens:
                pairs = self._left(pairs, prefix)
        return self._near(pairs)

    def _near(self, pairs: Tensor) -> list[Pair]:
        """Return the pairs that give all tokens of the first row, the nearest first."""
        return [(self.faults[one], self.faults[other]) for one, other in self._left(pairs, self.tokens).tolist()]

    def _left(self, pairs: Tensor, tokens: int) -> Tensor:
        """Return the pairs (N, 2) that give the first ``tokens`` of the first row, the nearest first."""
        if not len(pairs) or self.deadline.passed:
            return pairs[:0]
        numbers, places = pairs.unique(return_inverse=True)
        runner = self._runner(numbers.tolist(), tokens)
        places = places + 1  # behind the program that replaces nothing
        return numbers[runner.near(places[~runner.clash()[places[:, 0], places[:, 1]]], self.limit) - 1]

    def _runner(self, numbers: Sequence[int], tokens: int) -> PairRunner:
        lens = self.sieve.first(tokens)
        return PairRunner(lens, [self.faults[number].program(lens.simulation) or Program() for number in numbers], self.deadline)


def _crossed(some: Tensor, others: Tensor) -> Tensor:
    """Return the pairs (N, 2) of a fault of ``some`` (F,) with one of ``others``, which share none."""
    return torch.cartesian_prod(some.nonzero().flatten(), others.nonzero().flatten()).reshape(-1, 2)


def _combined(some: Tensor) -> Tensor:
    """Return the pairs (N, 2) of two faults of ``some`` (F,)."""
    return torch.combinations(some.nonzero().flatten(), 2).reshape(-1, 2)


def _needs_rows(one: Candidate) -> bool:
    """Return whether a fault cannot be tried on the first row alone, or replaces no stages."""
    return any(variant.mixes_rows or variant.run is not None for variant, _ in one.sites)


def _is_outside(one: Candidate) -> bool:
    return one.order is not None or all(layer is None for _, layer in one.sites)


def _may_see_later(one: Candidate) -> bool:
    """Return whether a token's values may depend on later tokens."""
    return any(fault.id in WIDE for fault in one.faults(0)) or any(variant.all_tokens for variant, _ in one.sites)
