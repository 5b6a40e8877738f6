"""What a program may do otherwise than GPT-2: alternatives, each in a block or outside the blocks, and how likely they are."""

from dataclasses import dataclass
from functools import cached_property

from gpt2.port.alternatives.alternative import Alternative, merged
from gpt2.port.alternatives.outside import sequence_faults
from gpt2.port.graph import Formula, Program
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import collapsed

FITTED = 0.5  # the price of many fitted numbers: a known formula that gives the same is preferred
FREE = ("extra-bias", "untied-head")  # faults of the head with fitted numbers
Placed = tuple[Alternative, int | None]  # an alternative, and the block that has it; None outside the blocks

# How common each mistake is among people: which of several explanations that fit equally well is named first. The numbers are of
# 217 public reports of wrong GPT-2 programs, those of the seventh and eighth set of programs, whose sources are listed in
# tests/support/programs/seventh/SOURCES.md (commit 47a5ad9) and eighth/SOURCES.md (6d4dc6f).
COUNTED = {  # causes, by how many reports each has
    23: "gelu-variant",
    20: "head-layout",
    16: "position-offset",
    10: "mask-missing",
    9: "missing-bias",
    7: "wrong-tensor output-projection-missing",
    6: "transposed layernorm-unbiased-variance scale-by-width "
    "mask-multiplied softmax-axis residual-from-normed final-norm-missing",
    5: "layernorm-axis qkv-order logits-softmaxed reduced-precision residual-missing",
    4: "layernorm-eps layernorm-not-normalising post-norm mask-strict layernorm-without-affine",
    3: "scale-wrong scale-missing untied-head embedding-scaled value-projection-wrong position-missing",
    2: "dropout-active extra-norm cache-inconsistent logits-scaled scale-twice layer-missing",
}
REPORTS = {id: count for count, ids in COUNTED.items() for id in ids.split()}
SELDOM = 1  # reports of all other causes, at most


@dataclass(frozen=True)
class Candidate:
    """Faults switched on: alternatives with the number of their block (None outside), and perhaps another order of blocks."""

    sites: tuple[Placed, ...] = ()
    order: tuple[int, ...] | None = None
    head: tuple[Cause, ...] = ()  # what is seen in the logits alone

    @property
    def is_right(self) -> bool:
        return not self.sites and self.order is None and not self.head

    @property
    def is_local(self) -> bool:
        """Whether all faults are in one block."""
        layers = {layer for _, layer in self.sites}
        return len(layers) == 1 and None not in layers

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
        reports = min((REPORTS.get(fault.id, SELDOM) for fault in self.faults(0)), default=0)  # of the least common
        return self.price, not permuted, -reports, self.is_local

    @property
    def rounds(self) -> bool:
        """Whether a candidate rounds numbers, and does nothing else."""
        return {fault.id for fault in self.faults(0)} == {"reduced-precision"}

    @cached_property
    def program(self) -> Program | None:
        """Return the program, None if nothing is replaced, or one node is replaced twice."""
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
        if not (outside or blocks or self.order):
            return None
        return Program(blocks, outside, self.order)

    def faults(self, layers: int) -> list[Cause]:
        faults = [fault for one, layer in self.sites for fault in one.faults(layer)]
        sequence = [] if self.order is None else sequence_faults(self.order, layers)
        return [*faults, *sequence, *self.head]

    def causes(self, layers: int) -> tuple[Cause, ...]:
        """Return the faults with all places of each, in order of appearance."""
        groups: dict[tuple[str, str], list[Cause]] = {}
        for fault in self.faults(layers):
            groups.setdefault((fault.id, fault.kind or fault.detail), []).append(fault)
        placed = ((some[0], collapsed((fault.place for fault in some), layers)) for some in groups.values())
        return tuple(Cause(one.id, places, one.detail, mend=one.mend) for one, places in placed)
