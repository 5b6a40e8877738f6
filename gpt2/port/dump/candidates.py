"""List what a program may do otherwise than GPT-2: each known fault in all blocks, in one, or outside them; and pairs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

from gpt2.port import graph
from gpt2.port.alternative import IN_PROMPT, IN_STEPS, Alternative, Schedule, Weighing, in_calls, merged, scheduled
from gpt2.port.alternatives import table
from gpt2.port.alternatives.outside import orders, sequence_faults, standing
from gpt2.port.alternatives.precision import integers
from gpt2.port.alternatives.schedule import prompts, stepped
from gpt2.port.diagnosis.places import Place, collapsed
from gpt2.port.dump.commonness import rarity
from gpt2.port.fault import Fault
from gpt2.port.graph import Formula, Model, Program

FITTED = 0.5  # the price of many fitted numbers: a known formula that gives the same is preferred
FREE = ("extra-bias", "untied-head")  # faults of the head with fitted numbers
Site = tuple[Alternative, int | None]  # an alternative, and the block that has it; None outside the blocks


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
    """Faults switched on: alternatives with the number of their block (None outside), and perhaps another order of blocks."""

    sites: tuple[Site, ...] = ()
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
        return frozenset(one.label for one, _ in self.sites) | ({str(self.order)} if self.order else set())

    @cached_property
    def price(self) -> float:
        """How much a candidate assumes: its faults, however many places each has."""
        faults = self.faults(0)
        free = any(fault.id in FREE for fault in self.head)
        return len({(fault.id, fault.kind or fault.detail) for fault in faults}) + 0.25 * self.rare + FITTED * free

    @property
    def rare(self) -> bool:
        return any(one.rare for one, _ in self.sites)

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
        return (frozenset((one.label, layer) for one, layer in self.sites), self.order, self.head)

    @cached_property
    def program(self) -> Program | None:
        """Return the program, None if nothing is replaced, one node is replaced twice, or the text is read in two ways."""
        blocks: dict[int, dict[str, Formula]] = {}
        outside: dict[str, Formula] = {}
        for one, layer in self.sites:
            both = merged(outside if layer is None else blocks.get(layer, {}), one.at(layer))
            if both is None:
                return None
            if layer is None:
                outside = both
            elif both:
                blocks[layer] = both
        calls = {one.calls for one, _ in self.sites if one.calls is not None}
        runs = {one.run for one, _ in self.sites if one.run is not None}
        if len(calls) > 1 or len(runs) + (self.order is not None) > 1:
            return None
        if not (outside or blocks or self.order or runs):
            return None
        if calls and any(one.crosses for one, _ in self.sites):
            stream = partial(graph.run, blocks=blocks, embed=outside.get("embed"), calls=next(iter(calls)))
            return Program({}, outside, run=stream)
        if runs and (blocks or "embed" in outside):
            return None
        for pieces in calls:
            blocks = {layer: in_calls(pieces, edits) for layer, edits in blocks.items()}
            outside = in_calls(pieces, outside)
        return Program(blocks, outside, self.order, *runs)

    def allows(self, other: Candidate) -> bool:
        """Return whether ``other`` is another fault, or elsewhere; :meth:`program` says whether both can be switched on."""
        if self.order is not None and other.order is not None:
            return False
        mine = {(one.label, layer) for one, layer in self.sites}
        return mine.isdisjoint((one.label, layer) for one, layer in other.sites)

    def with_(self, other: Candidate) -> Candidate:
        """Return both candidates' faults together."""
        return Candidate((*self.sites, *other.sites), self.order or other.order, (*self.head, *other.head))

    def faults(self, layers: int) -> list[Fault]:
        faults = [fault for one, layer in self.sites for fault in one.faults(layer)]
        sequence = [] if self.order is None else sequence_faults(self.order, layers)
        return [*faults, *sequence, *self.head]

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
    """Every known alternative: of blocks, of the embeddings, of the last norm and the head, and of whole programs.

    ``steps``: those that show only in several calls; with a prompt and single tokens, they are among the others too.
    """

    blocks: tuple[Alternative, ...]
    embeddings: tuple[Alternative, ...]
    ends: tuple[Alternative, ...]
    runs: tuple[Alternative, ...]
    steps: tuple[Alternative, ...]
    layers: int

    @classmethod
    def of(cls, model: Model) -> Table:
        every = table(model)
        some = [one for one in every if one.steps and (model.small or isinstance(one.edits.get("attn.weights"), Weighing))]
        steps = [scheduled(one, how) for how in prompts(model) for one in some if not (one.crosses and not model.small)]
        plain = [one for one in every if not one.steps and one.run is None]
        around = [one for one in plain if not one.edits]
        return cls(
            (*(one for one in plain if one.edits), *(one for one in steps if one.edits and not one.crosses)),
            (*(one for one in around if "embed" in one.outside), *(one for one in steps if not one.edits)),
            tuple(one for one in around if "embed" not in one.outside),
            (*(one for one in every if one.run is not None), *(one for one in steps if one.crosses)),
            tuple(one for one in every if one.steps),
            model.config.n_layer,
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
            yield from (Candidate(((one, None),)) for one in self.embeddings)
        if is_last:
            yield from (Candidate(((one, None),)) for one in self.ends)
            yield from (Candidate(((one, None),)) for one in self.blocks if _is_end(one))
        if all_blocks or whole:
            yield from (Candidate(order=order) for order in orders(self.layers))
        if whole or (all_blocks and from_start):
            yield from (Candidate(self._everywhere(one)) for one in self.runs if rare or not one.rare)
        for one in self.blocks if len(blocks) > 1 else ():
            everywhere = tuple((one, n) for n in blocks)
            yield Candidate(everywhere)
            if (whole and one.outside) or (is_last and _is_end(one)):
                yield Candidate((*everywhere, (one, None)))
        if whole and rare:
            yield from (Candidate(tuple((one, n) for n in some)) for some in _parts(self.layers) for one in self._in(some))
        for n in blocks:
            some = (one for one in self.blocks if (rare or not one.rare) and (len(blocks) == 1 or not one.shared))
            yield from (Candidate(((one, n),)) for one in some)

    def _everywhere(self, one: Alternative) -> tuple[Site, ...]:
        return (*((one, n) for n in range(self.layers) if one.edits), *[(one, None)] * (not one.edits))

    def _in(self, blocks: tuple[int, ...]) -> Iterator[Alternative]:
        """Yield the alternatives that are tried in some blocks; in one alone, those of shared code: others are tried anyway.

        How a text is read in calls is the same in all blocks.
        """
        return (one for one in self.blocks if (one.shared and one.calls is None) or (len(blocks) > 1 and not one.rare))

    def quantised(self, model: Model, first: int, last: int, whole: bool) -> Iterator[Candidate]:
        """Yield the matrices of blocks ``first`` to ``last`` (excluded) in integers; ``whole``: and the token table's as well."""
        for one in integers(model):
            inside = tuple((one, n) for n in range(first, last))
            yield Candidate(inside)
            if whole:
                yield Candidate((*inside, (one, None)))

    def since(self, model: Model, token: int, first: int, last: int, is_first: bool) -> Iterator[Candidate]:
        """Yield every fault of a formula in the tokens from ``token`` on: in blocks ``first`` to ``last``, or the embeddings."""
        how = Schedule(IN_STEPS.format(token), stepped(token, model.ids.shape[1]), "later")
        for one in (*self.embeddings, *standing(model)) if is_first else ():
            if not one.rare:
                yield Candidate(((_in_some(one, how), None),))
        for one in (_in_some(one, how) for one in self.blocks if not (one.rare or one.shared)):
            yield Candidate(tuple((one, n) for n in range(first, last)))
        later = [one for one in self.blocks if one.calls == how.calls and "empty place" in one.words]
        counted = [one for one in self.embeddings if one.calls == how.calls and "one too far" in one.words]
        for one, far in zip(later, counted, strict=False) if is_first else ():  # the empty place of a cache is counted
            yield Candidate(((far, None), *((one, n) for n in range(first, last))))

    def until(self, tokens: Iterable[int], labels: Container[str], first: int, last: int, end: int) -> Iterator[Candidate]:
        """Yield the faults of blocks ``first`` to ``last`` with these ``labels`` in a prompt of so many ``tokens`` of ``end``."""
        some = [one for one in self.blocks if one.label in labels]
        for token in tokens:
            how = Schedule(IN_PROMPT.format(token), stepped(token, end), "first")
            for one in some:
                yield Candidate(tuple((_in_some(one, how), n) for n in range(first, last)))


def _in_some(one: Alternative, how: Schedule) -> Alternative:
    """Return an alternative in some calls; where it is the same in calls of any length, the later ones are one."""
    (_, end), (_, last) = how.calls[0], how.calls[-1]
    return scheduled(one, how if one.sees else replace(how, calls=((0, end), (end, last))))


def _is_end(one: Alternative) -> bool:
    """Return whether an alternative of the blocks also is one of what follows them."""
    return bool(one.outside) and "embed" not in one.outside


def _parts(layers: int) -> list[tuple[int, ...]]:
    """Return the groups of blocks that a mistake may be in: every other block, all but the first, all but the last."""
    every = tuple(range(layers))
    parts = dict.fromkeys((every[1::2], every[::2], every[1:], every[:-1])) if layers > 1 else {}
    return [part for part in parts if len(part) < layers]
