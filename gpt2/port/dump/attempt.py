"""Explain one dump under the assumption that its program computed in one dtype, in steps, until one explains all of it.

A dump that holds most values is *walked* through, from one to the next; where neither GPT-2's formulas nor the known wrong ones
give them, *fits* read off what was computed. What is not recorded is *simulated*: known faults in our own forward pass.
"""

from __future__ import annotations

from dataclasses import replace

from gpt2.checkpoint import containers
from gpt2.measure.metrics import Progress
from gpt2.port.dump.dumped import Dumped
from gpt2.port.dump.simulating import Simulating
from gpt2.port.fits.dropout import looks_dropped
from gpt2.port.graph import Model
from gpt2.port.search.observe import Observation
from gpt2.port.search.walk import Search, Walked
from gpt2.port.terms.budget import Budget
from gpt2.port.terms.causes import LIKELY, Cause
from gpt2.port.terms.places import Place
from gpt2.port.terms.report import Divergence
from gpt2.port.terms.tolerance import HALVES

CHANCE = 3  # faults of one branch that do not explain the logits
DRAWN = 4  # the part of the budget for models of what seems to be drawn at random
SHOWN = 3  # arrays that a cause names


class Attempt:
    """An examination of ``dumped``; ``settled``: it explains all that the dump shows."""

    def __init__(self, dumped: Dumped, progress: Progress) -> None:
        self.dumped, self.progress, self.right = dumped, progress, dumped.right
        self.budget = Budget()
        self.causes: list[Cause] = []
        self.notes: list[str] = list(dumped.notes())
        self.first = Divergence("logits", dumped.error)
        self.settled = False
        self.walked: Walked | None = None

    def walk(self, budget: Budget) -> None:
        """Walk through the recorded values, if there are enough of them."""
        self.budget = budget
        if self.dumped.is_constant:
            self.notes.append("each array of your dump is one number throughout: nothing was computed, or it is other memory")
        self.settled = self.right or self.dumped.is_constant
        if not self.settled and self.dumped.is_walkable:
            self._searched()

    def simulate(self, budget: Budget) -> None:
        """Look for causes of what the walk does not explain."""
        self.budget = budget
        if not self._accepted():
            self._simulate()
        self.settled |= self.equal
        if self.walked is not None and self.walked.ended and not self.settled:
            self.notes.append(self.walked.ended)

    @property
    def equal(self) -> bool:
        return self.right and not self.causes

    # Steps

    def _searched(self) -> None:
        dumped, pool = self.dumped, self.dumped.pool
        model = Model(dumped.reference.state_dict(), dumped.config, dumped.ids, budget=self.budget)
        pool.budget = self.budget
        search = Search(Observation(pool, model), model, dumped.exact, self.progress)
        walked = search.run()
        pool.budget = Budget()
        self.walked, self.first = walked, walked.first or self.first
        if walked.explained and walked.causes:
            self.causes, self.settled = list(walked.causes), True

    @property
    def _seems_right(self) -> bool:
        """Whether the walk takes each stage for right."""
        return self.walked is not None and self.walked.explained

    def _accepted(self) -> bool:
        """Return whether the logits are right, which nothing contradicts, or each stage is: a walk can only guess."""
        if self.dumped.has_even_logits:
            self.notes.append("your logits are the same at every position: look where the positions or the context are lost")
        self.settled |= self._seems_right
        return self.right or self._seems_right

    def _simulate(self) -> None:
        """Try known faults in our own forward pass. If nothing explains the dump, name what each step found likely."""
        pool, values = self.dumped.pool, {} if self.walked is None else self.walked.values
        known = {point: value for point, value in values.items() if pool.find(value) is not None}
        random = self._random()
        found = Simulating(self.dumped, self.budget.part(DRAWN) if random else self.budget, self.progress)
        found.run(known)
        self.first, self.settled = found.first or self.first, found.explains
        self.notes += found.notes
        likely = [] if found.explains else random or self._likely()
        self.causes = [*(likely or found.causes), *found.head]
        if self.causes and not found.explains:
            self.notes.append("these causes do not explain all of the difference; fix them and dump again")

    def _random(self) -> list[Cause]:
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
        return [Cause("dropout-active", places, words, evidence, LIKELY)]

    def _likely(self) -> list[Cause]:
        """Return the causes of a walk that does not explain the logits."""
        if self.walked is None or self.dumped.tolerance.dtype in HALVES:  # whose rounding is so large that much fits by chance
            return []
        causes = [replace(one, confidence=LIKELY) for one in self.walked.causes]
        branches = {(place.layer, place.part.partition(".")[0]) for cause in causes for place in cause.places}
        return [] if len(causes) >= CHANCE and len(branches) == 1 else causes  # so many faults of one branch fit by chance
