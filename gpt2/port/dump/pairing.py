"""Find the pairs of faults that give a program's values, by what they make of its first tokens; common faults first.

No token sees a later one. So a pair that does not give the first token's values is not the program's, and neither is one that
does not give the first two: each prefix leaves fewer pairs for the next. Faults by which a token sees later ones are tried on all
tokens, and those by which a row sees others on all rows. Where one fault ends before the block in which the other is, each is
computed for all of the others at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

from gpt2.port.alternatives.outside import SEQUENCE
from gpt2.port.deadline import Deadline
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.evaluate import Evaluator
from gpt2.port.dump.lenses import Lens, Lenses, Nearness
from gpt2.port.graph import Program

PREFIXES = (1, 2, 4)  # tokens
FEW = 4  # tokens by which faults that the first one does not show are told apart
PORTION = 12  # faults of a round that are tried with many others
HIDDEN = 1e-9  # how much a fault that the first token's values do not show may change their error
Pair = tuple[Candidate, Candidate]


class Pairing:
    """Pairs of the faults in ``ranked``: single faults with how near each comes, of which none explains the program alone.

    ``limit``: how far a pair's values may be from the program's.
    """

    def __init__(self, lenses: Lenses, ranked: Sequence[tuple[Nearness, Candidate]], limit: float, deadline: Deadline) -> None:
        self.lenses, self.span, self.limit, self.deadline = lenses, lenses.span, limit, deadline
        tried = [(near, one) for near, one in ranked if not (one.is_right or any(two.crosses for two, _ in one.sites))]
        self.faults = [one for _, one in tried]
        self.programs = [one.program or Program() for one in self.faults]
        blocks = set(range(self.span.first, self.span.last))
        everywhere = torch.tensor(
            [_is_outside(one) or {n for _, n in one.sites} >= blocks for one in self.faults], dtype=torch.bool
        )
        self.common = torch.tensor([not one.rare for one in self.faults], dtype=torch.bool)
        self.rows = torch.tensor([program.rows for program in self.programs], dtype=torch.bool)
        self.everywhere, self.mixing = everywhere & ~self.rows, everywhere & self.rows  # ``mixing``: a row sees others
        first = torch.tensor([near.first for near, _ in tried], dtype=torch.float64)
        right = next((near.first for near, one in ranked if one.is_right), math.inf)
        bound = limit / float(self.span.wanted.square().mean().sqrt())
        self.is_first_right = right <= bound
        self.hidden = (first - right).abs() <= HIDDEN
        self.gives_first = first <= bound
        measures = torch.tensor([(near.log, near.angle, near.first) for near, _ in tried], dtype=torch.float64).reshape(-1, 3)
        self.by_nearness = measures.argsort(0).argsort(0).amin(1).argsort()  # by the measure in which a fault comes nearest

    def rounds(self) -> Iterator[list[Pair]]:
        """Yield pairs that may be the program's, the nearest of each round first; the likelier rounds first."""
        if self.faults and self.lenses.shows_pairs:
            for pairs, grows in self._rounds(self._later()):
                if self.deadline.passed:
                    return
                yield self._growing(pairs) if grows else self._near(pairs)

    def _rounds(self, later: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Yield pairs (N, 2), and whether no fault of them lets a token see later ones; ``later`` (F,): the faults that do."""
        everywhere, causal = self.everywhere & self.common, ~later & ~self.rows
        wide, hidden = everywhere & causal, self.hidden & causal
        if self.is_first_right:
            yield _combined(wide & hidden), True
            yield _crossed(wide & hidden, hidden & ~wide), True
        else:
            yield _crossed(self.gives_first & causal, hidden), True
            yield _crossed(self.gives_first & later, hidden), False
        yield _combined(wide & ~hidden), True
        yield from self._apart(later, rare=False)
        for some in self._nearest(everywhere & later).split(PORTION):
            yield _paired(some, everywhere), False
        yield from self._mixing_rows(later, everywhere, self.common)
        yield from _in_turn(
            self._beside(later), self._apart(later, rare=True), self._mixing_rows(later, everywhere, ~self.common)
        )

    def _beside(self, later: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Yield pairs of a fault in all blocks, the nearest first, with those in one block, and with rare ones."""
        first, last = self._reach
        inside = (first < self.span.last) & (last >= self.span.first)
        everywhere, causal, visible = self.everywhere & self.common, ~later & ~self.rows, ~self.hidden | later
        elsewhere, rare = self.common & ~self.everywhere & causal, self.everywhere & ~self.common & causal
        yield _crossed(everywhere & ~inside & causal & visible, rare & visible), True
        for some in self._nearest(everywhere & inside & visible).split(PORTION):
            yield _paired(some[causal[some]], elsewhere & visible), True
            yield _paired(some[later[some]], elsewhere), False
            yield _paired(some[causal[some]], rare & visible), True

    def _mixing_rows(self, later: Tensor, everywhere: Tensor, some: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Yield pairs of a fault of ``some`` by which a row sees others, the nearest first, with those ``everywhere``."""
        for wide in (~later, later):
            for part in self._nearest(self.mixing & some & wide).split(PORTION):
                yield _paired(part, everywhere), not bool(later[part].any())

    def _apart(self, later: Tensor, rare: bool) -> Iterator[tuple[Tensor, bool]]:
        """Yield pairs of a fault in one block, or behind the blocks, with one that ends before it; ``rare``: one of them is.

        They give the first tokens.
        """
        (first, last), end = self._reach, self.span.last
        shown = (self.hidden if self.is_first_right else ~self.hidden | later) & ~self.rows
        for layer in range(self.span.first, end + 1):
            before, behind = shown & (last < layer), shown & (first == layer) & (last == layer)
            if layer == end and not rare:
                before &= ~self.everywhere  # these were tried with all that is behind the blocks
            common, kinds = self.common, ((~self.common, torch.ones_like(self.common)), (self.common, ~self.common))
            for some, others in kinds if rare else ((common, common),):
                pairs = self._around(layer, (before & some).nonzero().flatten(), self._nearest(behind & others), later)
                wide = later[pairs].any(1)
                yield pairs[~wide], True
                yield pairs[wide], False

    def _around(self, layer: int, before: Tensor, behind: Tensor, later: Tensor) -> Tensor:
        """Return the pairs (N, 2) of one of ``before`` with one of ``behind``, in block ``layer``, that give the first tokens."""
        found, lens = [torch.zeros(0, 2, dtype=torch.long)], self.lenses.row
        if not (len(before) and len(behind)) or self.deadline.passed:
            return found[0]
        ends = Lens(lens.model, lens.span.before(layer, lens.right.entering(layer)))
        entering = self._runner(before, ends).alone()[:, 0]  # (N, T, D)
        few = min(FEW, self.lenses.tokens) if self.is_first_right else 1
        for some, tokens in ((behind[~later[behind]], few), (behind[later[behind]], self.lenses.tokens)):
            streams, twins = entering[:, :tokens].unique(dim=0, return_inverse=True)
            runner = self._runner(some, self.lenses.first(tokens))
            for part in torch.arange(len(streams)).split(runner.chunk) if len(some) else ():
                rows = torch.cartesian_prod(torch.arange(1, len(some) + 1), torch.arange(len(part)))
                for number, stream in rows[runner.near(rows, self.limit, streams[part], layer)].tolist():
                    alike = before[twins == part[stream]]
                    found.append(torch.stack([alike, some[number - 1].expand(len(alike))], 1))
        return torch.cat(found)

    @cached_property
    def _reach(self) -> tuple[Tensor, Tensor]:
        """The first and the last block that each fault replaces something in, (F,) each.

        The embeddings count as the block before the first one, the last norm and the head as the one behind the last.
        """
        begin, end = self.span.first, self.span.last
        reach = []
        for program in self.programs:
            places = set(program.blocks) if program.order is None else {begin, end - 1}
            places |= {begin - 1 if stage == "embed" else end for stage in program.outside}
            reach.append((min(places, default=begin - 2), max(places, default=end + 1)))
        first, last = torch.tensor(reach).T
        return first, last

    def _nearest(self, some: Tensor) -> Tensor:
        """Return the numbers of the faults of ``some`` (F,), the nearest first."""
        return self.by_nearness[some[self.by_nearness]]

    def _later(self) -> Tensor:
        """Return (F,) whether a fault lets a token see later ones: whether fewer tokens give their first two other values.

        A fault that does so everywhere does so in one block.
        """
        do, seeing = set[int](), torch.tensor([any(two.sees for two, _ in one.sites) for one in self.faults])
        for some in (self.everywhere & seeing, self.mixing):
            suspects = some.nonzero().flatten()
            lenses = [self._lens(suspects, tokens) for tokens in (min(2, self.lenses.tokens), self.lenses.tokens)]
            few, all = (self._runner(suspects, lens).alone()[:, :, :2] for lens in lenses)
            differ = ~((few - all).abs().amax((1, 2, 3)) <= self.limit)
            do |= {id(one) for n in suspects[differ].tolist() for one, _ in self.faults[n].sites}
        return torch.tensor([any(id(two) in do for two, _ in one.sites) for one in self.faults])

    def _growing(self, pairs: Tensor) -> list[Pair]:
        """Return the pairs that give the first tokens, the first few, and so on."""
        for prefix in PREFIXES:
            if prefix < self.lenses.tokens:
                pairs = self._left(pairs, prefix)
        return self._near(pairs)

    def _near(self, pairs: Tensor) -> list[Pair]:
        """Return the pairs that give all tokens, the nearest first."""
        return [(self.faults[one], self.faults[other]) for one, other in self._left(pairs, self.lenses.tokens).tolist()]

    def _left(self, pairs: Tensor, tokens: int) -> Tensor:
        """Return the pairs (N, 2) that give the first ``tokens``, the nearest first."""
        if not len(pairs) or self.deadline.passed:
            return pairs[:0]
        numbers, places = pairs.unique(return_inverse=True)
        runner = self._runner(numbers, self._lens(numbers, tokens))
        places = places + 1  # behind the program that replaces nothing
        apart = ~runner.clash()[places[:, 0], places[:, 1]]
        return pairs[apart][runner.near(places[apart], self.limit)]

    def _lens(self, numbers: Tensor, tokens: int) -> Lens:
        """Return the view of the first ``tokens``: of the first row, or of all, if one of the faults lets a row see others."""
        return self.lenses.first(tokens, None if bool(self.rows[numbers].any()) else 1)

    def _runner(self, numbers: Tensor, lens: Lens) -> Evaluator:
        return Evaluator(lens, [self.programs[number] for number in numbers.tolist()], self.deadline)


def _in_turn(*several: Iterator[tuple[Tensor, bool]]) -> Iterator[tuple[Tensor, bool]]:
    """Yield one item of each iterator, then the next of each."""
    return (one for some in zip_longest(*several) for one in some if one is not None)


def _crossed(some: Tensor, others: Tensor) -> Tensor:
    """Return the pairs (N, 2) of a fault of ``some`` (F,) with one of ``others``, which share none."""
    return _paired(some.nonzero().flatten(), others)


def _paired(some: Tensor, others: Tensor) -> Tensor:
    """Return the pairs (N, 2) of the faults ``some``, by number, with those of ``others`` (F,)."""
    return torch.cartesian_prod(some, others.nonzero().flatten()).reshape(-1, 2)


def _combined(some: Tensor) -> Tensor:
    """Return the pairs (N, 2) of two faults of ``some`` (F,)."""
    return torch.combinations(some.nonzero().flatten(), 2).reshape(-1, 2)


def _is_outside(one: Candidate) -> bool:
    """Return whether a fault is outside the blocks, or in which of them run."""
    ids = {fault.id for two, layer in one.sites if layer is not None for fault in two.faults(layer)}
    return one.order is not None or ids <= set(SEQUENCE)
