"""Explain one dump under the assumption that its program computed in one dtype, in steps, until one explains all of it.

A dump that holds most values is *walked* through, from one to the next; where neither GPT-2's formulas nor the known wrong ones
give them, *fits* read off what was computed. What is not recorded is *simulated*: known faults in our own forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from gpt2.checkpoint import containers
from gpt2.measure.metrics import Progress
from gpt2.port.deadline import Deadline, TimeUp
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.places import Place
from gpt2.port.diagnosis.report import LIKELY, SURE, Divergence
from gpt2.port.diagnosis.trail import SEQUENCE, Trail, Walk, account
from gpt2.port.diagnosis.walk import UNKNOWN_ACTIVATION, Walker
from gpt2.port.dump.dumped import Dumped
from gpt2.port.dump.fits.following import Following
from gpt2.port.dump.fits.partial import looks_dropped
from gpt2.port.dump.simulating import Simulating, sequence_of
from gpt2.port.dump.tolerance import HALVES

RIGHT_SECONDS = 10.0  # for the walk through a dump with right logits
CHANCE = 3  # faults of one branch that do not explain the logits
NAMING = 4  # the part of the time for a walk that may only name better what is explained
LONGER = 2  # the part of the time for a longer walk
DRAWN = 4  # the part of the time for simulations of what seems to be drawn at random
SHOWN = 3  # arrays that a cause names
HASTY = 10  # the part of the time for the first walk, which finds what it knows soon


class Attempt:
    """An examination of ``dumped``; ``settled``: it explains all that the dump shows."""

    def __init__(self, dumped: Dumped, progress: Progress) -> None:
        self.dumped, self.progress, self.right = dumped, progress, dumped.right
        self.deadline = Deadline()
        self.causes: list[PlacedCause] = []
        self.notes: list[str] = list(dumped.notes())
        self.first = Divergence("logits", None, dumped.error)
        self.settled = False
        self.trail: Trail | None = None
        self.walked: Walk | None = None

    def examine(self, deadline: Deadline) -> None:
        """Look for causes, until ``deadline``; the first step that returns True is the last one."""
        self.deadline = deadline
        walk: tuple[Callable[[], bool], ...] = (self._walk_soon, self._walk_narrowly, self._fit, self._walk_on)
        rest = (self._accept, self._simulate) if self.dumped.is_walkable else (self._accept, self._order, self._simulate)
        steps = (self._nothing, *(walk if self.dumped.is_walkable else ()), *rest)
        next((step for step in steps if step()), None)
        self.settled |= self.equal

    @property
    def equal(self) -> bool:
        return self.right and not self.causes

    # Steps

    def _nothing(self) -> bool:
        """End if nothing was computed."""
        if self.dumped.is_constant:
            self.notes.append("each array of your dump is one number throughout: nothing was computed, or it is other memory")
        return self.dumped.is_constant

    def _walk_soon(self) -> bool:
        """Walk for a short time: a walk that succeeds does so soon."""
        walk = self._walk(HASTY)
        unknown = any(cause.detail == UNKNOWN_ACTIVATION for cause in walk.causes)
        return (unknown and self._fit()) or self._ends(walk)

    def _walk_narrowly(self) -> bool:
        """Walk with narrow tolerances, if every stage seems right and the logits are not: a fault near the tolerance."""
        if not self._seems_right or self.right:
            return False
        with self.dumped.pool.narrowed():
            return self._ends(self._walk(LONGER))

    @property
    def _seems_right(self) -> bool:
        """Whether the walk takes each stage for right."""
        return self.walked is not None and self.walked.explained

    def _fit(self) -> bool:
        """Read off from the recorded values what the program computed, where no known formula does."""
        if self.right:
            return False
        pool = self.dumped.pool
        pool.deadline = self.deadline.part(2)
        found = Following(pool, self.dumped.reference.state_dict(), self.dumped.config, self.dumped.ids, self.progress).run()
        pool.deadline = Deadline()
        if found.explained and found.causes:
            self.causes, self.first, self.settled = list(found.causes), found.first or self.first, True
        return self.settled and not self._is_cut

    @property
    def _is_cut(self) -> bool:
        """Whether the walk so far had too little time."""
        return self.walked is not None and self.walked.timed_out

    def _walk_on(self) -> bool:
        """Walk for a longer time, if the first walk had too little: what a known formula gives has the better name."""
        if self.right or not self._is_cut:
            return False
        first = self.first
        if not self._ends(self._walk(NAMING if self.settled else LONGER)) and self.settled:
            self.first = first
        return self.settled

    def _accept(self) -> bool:
        """End if the logits are right, which nothing contradicts, or each stage is: a walk that misses arrays can only guess."""
        if self.dumped.has_even_logits:
            self.notes.append("your logits are the same at every position: look where the positions or the context are lost")
        self.settled |= self._seems_right
        return self.right or self._seems_right

    def _order(self) -> bool:
        """Put the recorded streams in the sequence of blocks."""
        first, causes = sequence_of(self.dumped)
        if causes:
            self.causes, self.first, self.settled = causes, first or self.first, True
        return bool(causes)

    def _simulate(self) -> bool:
        """Try known faults in our own forward pass. If nothing explains the dump, name what each step found likely."""
        pool, values = self.dumped.pool, {} if self.trail is None else self.trail.values
        known = {point: value for point, value in values.items() if pool.find(value) is not None}
        random = self._random()
        deadline = self.deadline.part(DRAWN) if random else self.deadline
        found = Simulating(self.dumped, deadline, self.progress).run(known)
        self.first, self.settled = found.first or self.first, found.explains
        self.notes += found.notes
        likely = [] if found.explains else random or self._likely()
        self.causes = [*(likely or found.causes), *found.head]
        if self.causes and not found.explains:
            self.notes.append("these causes do not explain all of the difference; fix them and dump again")
        return True

    # Walks

    def _walk(self, share: int) -> Walk:
        """Walk for a part of the time that is left, 1 of ``share``."""
        reference, pool = self.dumped.reference, self.dumped.pool
        weights, dumped = dict(reference.state_dict()), self.dumped
        trail = Trail(pool, weights, dumped.config, dumped.ids, self.progress, weights_seen=False)
        pool.deadline = self.deadline.part(share, RIGHT_SECONDS if self.right else math.inf)
        try:
            Walker(trail, trail.own["wte.weight"]).run()
        except TimeUp:
            trail.run_out()
        pool.deadline = Deadline()
        walk = account(trail, reference)
        if self.walked is None or not self.walked.explained:
            self.trail, self.walked, self.first = trail, walk, walk.first_divergence or self.first
        return walk

    def _ends(self, walk: Walk) -> bool:
        """Return whether a walk explains the dump, and keep its causes if so."""
        if not walk.explained or not (walk.causes or self.right):
            return False
        self.causes, self.settled = self._walk_causes(walk, SURE), True
        self.first = walk.first_divergence or self.first
        return True

    def _walk_causes(self, walk: Walk, confidence: float) -> list[PlacedCause]:
        in_order = walk.blocks == tuple(range(self.dumped.config.n_layer))  # a block may hold another's c_fc and still be itself
        return [replace(one, confidence=confidence) for one in walk.causes if not (in_order and one.id in SEQUENCE)]

    def _random(self) -> list[PlacedCause]:
        """Return dropout, if arrays of a stream's size are zero at random places: no search can find what was drawn."""
        config, size = self.dumped.config, self.dumped.ids.numel() * self.dumped.config.n_embd
        names = [
            name
            for name, array in self.dumped.arrays.items()
            if array.numel() == size and looks_dropped(array.double().reshape(-1, config.n_embd), self.dumped.ids.shape[1])
        ]
        if not names:
            return []
        shown = ", ".join(map(containers.shown, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
        zeros = float((self.dumped.arrays[names[0]] == 0).double().mean())
        words = f"{zeros:.0%} of the entries are zero, at random places, in {shown}"
        evidence = "nothing else in a forward pass makes such zeros; what was drawn is in no array, so no numbers follow from it"
        places = tuple(Place(layer, "") for layer in range(config.n_layer))
        return [PlacedCause("dropout-active", places, words, evidence, LIKELY)]

    def _likely(self) -> list[PlacedCause]:
        """Return the causes of a walk that does not explain the logits."""
        if self.walked is None or self.dumped.tolerance.dtype in HALVES:  # whose rounding is so large that much fits by chance
            return []
        causes = self._walk_causes(self.walked, LIKELY)
        branches = {(place.layer, place.part.partition(".")[0]) for cause in causes for place in cause.places}
        return [] if len(causes) >= CHANCE and len(branches) == 1 else causes  # so many faults of one branch fit by chance
