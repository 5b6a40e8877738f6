"""List what a program may do otherwise than GPT-2: each known fault in all blocks, in one, or outside them; and pairs."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from gpt2.port.diagnosis.places import Place, collapsed
from gpt2.port.diagnosis.search import Fault
from gpt2.port.diagnosis.trail import post_norms, sequence_faults
from gpt2.port.dump.attention_variants import attention_variants
from gpt2.port.dump.branch_variants import branch_variants
from gpt2.port.dump.commonness import rarity
from gpt2.port.dump.faults import SHIFTS, block_variants, embedding_variants, norm_variants, standing
from gpt2.port.dump.misloading import loading_variants
from gpt2.port.dump.misloading_outside import end_variants, outside_variants, rounded_outside
from gpt2.port.dump.misloading_strided import strided_variants
from gpt2.port.dump.narrowing import narrow_variants, quantised_variants
from gpt2.port.dump.runs import run_variants
from gpt2.port.dump.simulation import Program, Simulation, Stage, Stages
from gpt2.port.dump.variants import Variant, early, late, on_top

FITTED = 0.5  # the price of many fitted numbers: a known formula that gives the same is preferred
MOST_ROWS = 64  # of the position table, that steps are tried to begin at or to stay at
BLOCKS: tuple[Callable[[Simulation], Iterable[Variant]], ...]
BLOCKS = (block_variants, loading_variants, strided_variants, attention_variants, branch_variants)
FREE = ("extra-bias", "untied-head")  # faults of the head with fitted numbers


@dataclass(frozen=True)
class Found:
    """One fault of a program: ``id`` is a key of :data:`..diagnosis.causes.CAUSES`; ``detail`` says what the program does.

    ``fix``: the corrected line, if it is not that of the table.
    """

    id: str
    places: tuple[Place, ...]
    detail: str
    fix: str | None = None


@dataclass(frozen=True)
class Candidate:
    """Faults switched on: variants with the number of their block (None outside), and perhaps another order of blocks."""

    sites: tuple[tuple[Variant, int | None], ...] = ()
    order: tuple[int, ...] | None = None
    head: tuple[Fault, ...] = ()  # what is seen in the logits alone

    @property
    def is_right(self) -> bool:
        return not self.sites and self.order is None and not self.head

    @property
    def is_local(self) -> bool:
        """Whether all faults are in one block."""
        layers = {layer for _, layer in self.sites}
        return len(layers) == 1 and None not in layers

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(variant.label for variant, _ in self.sites) | ({str(self.order)} if self.order else set())

    @cached_property
    def price(self) -> float:
        """How much a candidate assumes: its faults, however many places each has."""
        faults = self.faults(0)
        free = any(fault.id in FREE for fault in self.head)
        return len({(fault.id, fault.kind or fault.detail) for fault in faults}) + 0.25 * self.rare + FITTED * free

    @property
    def rare(self) -> bool:
        return any(variant.rare for variant, _ in self.sites)

    @cached_property
    def order_of_naming(self) -> tuple[float, bool, int, bool]:
        """What says which of several candidates is named first: few faults, common ones, not in one block alone.

        Another sequence of all blocks comes before each block with another one's weights, which is the same function.
        """
        permuted = self.order is not None and sorted(self.order) == list(range(len(self.order)))
        return self.price, not permuted, rarity(self.faults(0)), self.is_local

    @property
    def rounds(self) -> bool:
        """Whether a candidate rounds numbers, and does nothing else."""
        return {fault.id for fault in self.faults(0)} == {"reduced-precision"}

    @property
    def key(self) -> tuple[object, ...]:
        return (frozenset((variant.label, layer) for variant, layer in self.sites), self.order, self.head)

    def program(self, simulation: Simulation) -> Program | None:
        """Return the program, None if nothing is replaced or one stage is replaced twice."""
        blocks: dict[int, dict[str, Stage]] = {}
        outside: dict[str, Stage] = {}
        for variant, layer in sorted(self.sites, key=lambda site: site[0].top is not None):
            stages: Stages = variant.replaced(simulation, layer or 0)
            target = outside if layer is None else blocks.setdefault(layer, {})
            twice = target.keys() & stages.keys()
            tops = variant.top(simulation, layer or 0) if variant.top and twice else {}
            if twice - tops.keys():
                return None
            target.update({stage: on_top(tops[stage], target[stage]) if stage in twice else stages[stage] for stage in stages})
        runs = [variant.run for variant, _ in self.sites if variant.run is not None]
        if len(runs) + (self.order is not None) > 1 or not (outside or any(blocks.values()) or self.order or runs):
            return None
        return Program({layer: stages for layer, stages in blocks.items() if stages}, outside, self.order, *runs)

    def allows(self, other: Candidate) -> bool:
        """Return whether ``other`` is another fault, or elsewhere; :meth:`program` says whether both can be switched on."""
        if self.order is not None and other.order is not None:
            return False
        mine = {(variant.label, layer) for variant, layer in self.sites}
        return mine.isdisjoint((variant.label, layer) for variant, layer in other.sites)

    def with_(self, other: Candidate) -> Candidate:
        """Return both candidates' faults together."""
        return Candidate((*self.sites, *other.sites), self.order or other.order, (*self.head, *other.head))

    def faults(self, layers: int) -> list[Fault]:
        faults = [fault for variant, layer in self.sites for fault in variant.faults(layer)]
        sequence = [] if self.order is None else sequence_faults(self.order, layers)
        return [*post_norms(faults), *sequence, *self.head]

    def found(self, layers: int) -> tuple[Found, ...]:
        """Return the faults with all places of each, in order of appearance."""
        groups: dict[tuple[str, str], list[Fault]] = {}
        for fault in self.faults(layers):
            groups.setdefault((fault.id, fault.kind or fault.detail), []).append(fault)
        return tuple(
            Found(id, collapsed((fault.place for fault in same), layers), same[0].detail, same[0].fix)
            for (id, _), same in groups.items()
        )


@dataclass(frozen=True)
class Table:
    """Every known variant: of a block, of the embeddings, of the last norm and the head, of the sequence; and narrow numbers."""

    blocks: tuple[Variant, ...]
    embeddings: tuple[Variant, ...]
    ends: tuple[Variant, ...]
    runs: tuple[Variant, ...]
    narrow: tuple[tuple[Variant, Variant | None], ...]  # in all blocks, and what is outside them
    layers: int

    @classmethod
    def of(cls, simulation: Simulation) -> Table:
        return cls(
            tuple(one for make in BLOCKS for one in make(simulation)),
            (*embedding_variants(simulation), *outside_variants(simulation)),
            (*norm_variants(simulation, "ln_f"), *end_variants(simulation)),
            tuple(run_variants(simulation)),
            tuple(narrow_variants(simulation)),
            simulation.config.n_layer,
        )

    def singles(
        self,
        first: int,
        last: int,
        is_first: bool,
        is_last: bool,
        rare: bool = True,
        all_blocks: bool = False,
        from_start: bool = False,
    ) -> Iterator[Candidate]:
        """Yield every fault alone, in blocks ``first`` to ``last`` (excluded); ``is_first``: and in the embeddings, ``is_last``:
        and after the blocks. ``rare``: rare faults in single blocks too. ``all_blocks``: and in the sequence of blocks;
        ``from_start``: which begins with the right embeddings, so that rows and tokens may follow each other otherwise."""
        blocks = range(first, last)
        whole = is_first and is_last
        if is_first:
            yield from (Candidate(((variant, None),)) for variant in self.embeddings)
        if is_last:
            yield from (Candidate(((variant, None),)) for variant in self.ends)
        if all_blocks or whole:
            yield from (Candidate(order=order) for order in self._orders())
        if whole or (all_blocks and from_start):
            yield from (Candidate(((variant, None),)) for variant in self.runs if rare or not variant.rare)
        if len(blocks) > 1:
            yield from (Candidate(tuple((variant, n) for n in blocks)) for variant in self.blocks)
            yield from (Candidate(sites) for sites in self._both_norms(blocks, is_last, True))
        if whole:
            yield from self._everywhere()
        yield from (self._narrowed(pair, blocks, whole) for pair in self.narrow if blocks and (whole or pair[1] is None))
        if whole and rare:
            yield from (Candidate(tuple((one, n) for n in some)) for some in _parts(self.layers) for one in self._in(some))
        for n in blocks:
            variants = (one for one in self.blocks if (rare or not one.rare) and (len(blocks) == 1 or not one.shared))
            yield from (Candidate(((variant, n),)) for variant in variants)
            yield from (
                Candidate(sites) for sites in self._both_norms(range(n, n + 1), is_last and n == last - 1, len(blocks) == 1)
            )

    def _in(self, blocks: tuple[int, ...]) -> Iterator[Variant]:
        """Yield the variants that are tried in some blocks; in one alone, those of shared code: others are tried anyway."""
        return (one for one in self.blocks if one.shared or (len(blocks) > 1 and not one.rare))

    def _narrowed(self, pair: tuple[Variant, Variant | None], blocks: range, whole: bool) -> Candidate:
        inside, outside = pair
        sites: list[tuple[Variant, int | None]] = [(inside, n) for n in blocks]
        return Candidate((*sites, (outside, None)) if whole and outside is not None else tuple(sites))

    def quantised(self, simulation: Simulation, first: int, last: int, whole: bool) -> Iterator[Candidate]:
        """Yield the matrices of blocks ``first`` to ``last`` (excluded) in integers; ``whole``: and the token table's as well."""
        for pair in quantised_variants(simulation):
            yield self._narrowed(pair, range(first, last), False)
            if whole:
                yield self._narrowed(pair, range(first, last), True)

    def since(self, simulation: Simulation, token: int, first: int, last: int, is_first: bool) -> Iterator[Candidate]:
        """Yield every fault of a formula in the tokens from ``token`` on: in blocks ``first`` to ``last``, or the embeddings."""
        rows = range(min(simulation.config.n_positions, MOST_ROWS) if simulation.small else 1)  # where steps may begin
        shifts = tuple(sorted({*SHIFTS, token, *rows[1:]}))
        for variant in embedding_variants(simulation, shifts) if is_first else ():
            if not variant.rare:
                yield Candidate(((late(variant, token), None),))
        for row in rows[1:] if is_first else ():
            yield Candidate(((late(standing(row), token), None),))
        unbiased = (one for one in self.blocks if {fault.id for fault in one.blame(0)} == {"missing-bias"})
        every = (*block_variants(simulation), *unbiased, *branch_variants(simulation))
        formulas = {one.label: one for one in every if not one.rare}
        for variant in (late(one, token) for one in formulas.values()):
            yield Candidate(tuple((variant, n) for n in range(first, last)))
        slot = next((one for one in self.blocks if one.label == f"late slot {token}"), None)
        for variant in embedding_variants(simulation, (1,)) if is_first and slot else ():
            if variant.label == "embed shift 1 1 words":  # the empty place of a cache is counted
                sites: list[tuple[Variant, int | None]] = [(slot, n) for n in range(first, last) if slot]
                yield Candidate(((late(variant, token), None), *sites))

    def until(self, tokens: Iterable[int], labels: Container[str], first: int, last: int) -> Iterator[Candidate]:
        """Yield the faults of blocks ``first`` to ``last`` with these ``labels`` in a prompt of so many ``tokens`` alone."""
        variants = [one for one in self.blocks if one.label in labels]
        for variant in (early(one, token) for token in tokens for one in variants):
            yield Candidate(tuple((variant, n) for n in range(first, last)))

    def _both_norms(self, blocks: range, ending: bool, shared: bool) -> Iterator[tuple[tuple[Variant, int | None], ...]]:
        """Yield the same fault in both norms of ``blocks``; ``ending``: also with the last norm.

        ``shared``: faults of shared code too.
        """
        seconds = {variant.label.removeprefix("ln_2 "): variant for variant in self.blocks if variant.label.startswith("ln_2 ")}
        lasts = {variant.label.removeprefix("ln_f "): variant for variant in self.ends}
        for variant in self.blocks:
            label = variant.label.removeprefix("ln_1 ")
            if (
                label == variant.label
                or label not in seconds
                or (variant.shared and len(blocks) == 1 < self.layers and not ending)
            ):
                continue
            both = tuple((one, n) for n in blocks for one in (variant, seconds[label]))
            yield both
            if ending and label in lasts:
                yield (*both, (lasts[label], None))

    def _everywhere(self) -> Iterator[Candidate]:
        """Yield roundings of all weights."""
        for variant in self.blocks:
            if variant.label.startswith(" rounded to "):
                outside = rounded_outside(variant.label.removeprefix(" rounded to "))
                yield Candidate((*((variant, n) for n in range(self.layers)), (outside, None)))

    def _orders(self) -> Iterator[tuple[int, ...]]:
        """Yield the usual wrong sequences of blocks; one that is skipped, or runs again, is a fault of that block."""
        right = tuple(range(self.layers))
        out = [right[::-1], *((*right[:n], n + 1, n, *right[n + 2 :]) for n in right[:-1])]
        out += [tuple(sorted(right, key=str)), (*right[1:], 0), (right[-1], *right[:-1]), right + right]
        out += [(n,) * self.layers for n in (right[0], right[-1])]
        yield from (order for order in dict.fromkeys(out) if order != right and order)


def _parts(layers: int) -> list[tuple[int, ...]]:
    """Return the groups of blocks that a mistake may be in: every other block, all but the first, all but the last."""
    every = tuple(range(layers))
    parts = dict.fromkeys((every[1::2], every[::2], every[1:], every[:-1])) if layers > 1 else {}
    return [part for part in parts if len(part) < layers]
