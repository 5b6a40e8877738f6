"""Explain one dump under the assumption that its program computed in one dtype, in steps, until one explains all of it.

A dump that holds most values is *walked* through, from one to the next; where neither GPT-2's formulas nor the known wrong ones
give them, *fits* read off what was computed. What is not recorded is *simulated*: known faults in our own forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from gpt2.measure.metrics import Progress, worst_relative_error
from gpt2.measure.tracing import layer_of, point_at
from gpt2.port.dump.dumped import Dumped
from gpt2.port.dump.simulating import Explanation, Simulating
from gpt2.port.graph import MODULES, READS, Model, stage_of
from gpt2.port.search.observe import Observation
from gpt2.port.search.walk import Search, Walked
from gpt2.port.terms.budget import Budget
from gpt2.port.terms.causes import LIKELY, Cause
from gpt2.port.terms.places import ALL_WEIGHTS, Place
from gpt2.port.terms.report import Divergence
from gpt2.port.terms.tolerance import HALVES

CHANCE = 3  # faults of one branch that do not explain the logits
FEW = 5  # arrays, blocks or hypotheses that are named in a note


class Attempt:
    """An examination of ``dumped``; ``settled``: it explains all that the dump shows."""

    def __init__(self, dumped: Dumped, progress: Progress) -> None:
        self.dumped, self.progress, self.right = dumped, progress, dumped.right
        self.config, self.exact, self.order = dumped.config, dumped.exact, dumped.order
        self.held, self.pool = dumped.held, dumped.pool
        self.causes: list[Cause] = []
        self.notes: list[str] = list(dumped.notes())
        self.first = Divergence("logits", dumped.error)
        self.settled = False
        self.walked: Walked | None = None

    def run(self, budget: Budget) -> None:
        """Walk through the recorded values, if there are enough of them; then simulate what the walk does not explain."""
        if self.dumped.is_constant:
            self.notes.append("each array of your dump is one number throughout: nothing was computed, or it is other memory")
        self.settled = self.right or self.dumped.is_constant
        if not self.settled and self.dumped.is_walkable:
            self._walk(budget.part(2))
        if self.settled:
            return
        if self.dumped.has_even_logits:
            self.notes.append("your logits are the same at every position: look where the positions or the context are lost")
        if self.walked is not None and self.walked.explained:
            self.settled = True  # each stage is taken for right: a walk can only guess
        else:
            self._simulate(budget)
        if self.walked is not None and self.walked.ended and not self.settled:
            self.notes.append(self.walked.ended)

    @property
    def equal(self) -> bool:
        return self.right and not self.causes

    # Steps

    def _walk(self, budget: Budget) -> None:
        model = Model(self.dumped.reference.state_dict(), self.config, self.dumped.ids, budget=budget)
        self.pool.budget = budget
        walked = Search(Observation(self.pool, model), model, self.exact, self.progress).run()
        self.pool.budget = Budget()
        self.walked, self.first = walked, walked.first or self.first
        if walked.explained and walked.causes:
            self.causes, self.settled = list(walked.causes), True

    def _simulate(self, budget: Budget) -> None:
        """Try known faults in our own forward pass. If nothing explains the dump, name what each step found likely."""
        values = {} if self.walked is None else self.walked.values
        known = {point: value for point, value in values.items() if self.pool.find(value) is not None}
        found, evidence = Simulating(self.dumped, budget, self.progress).explanation(known)
        self.first, self.settled = self._place(found, evidence, budget) or self.first, found.explains
        named = list(self._named(found))
        likely = [] if found.explains else self._likely()
        self.causes = [*(likely or named), *self._head(found)]
        if self.causes and not found.explains:
            self.notes.append("these causes do not explain all of the difference; fix them and dump again")

    def _likely(self) -> list[Cause]:
        """Return the causes of a walk that does not explain the logits."""
        if self.walked is None or self.dumped.tolerance.dtype in HALVES:  # whose rounding is so large that much fits by chance
            return []
        causes = [replace(one, confidence=LIKELY) for one in self.walked.causes]
        branches = {(place.layer, place.part.partition(".")[0]) for cause in causes for place in cause.places}
        return [] if len(causes) >= CHANCE and len(branches) == 1 else causes  # so many faults of one branch fit by chance

    # What is said of faults in our own forward pass

    def _place(self, explanation: Explanation, evidence: Mapping[str, Tensor], budget: Budget) -> Divergence | None:
        """Return the first place that is not GPT-2's, and say what is right before it."""
        missing = None if explanation.explains else self._first_missing()
        wrong = self._earlier(missing, explanation.first_wrong)
        if wrong is None:
            return None
        first = Divergence(wrong, self._error(wrong, evidence))
        if not explanation.explains:
            wrong = self._earlier(missing, explanation.unexplained) or wrong
            rights = [one for one in (*self.held, explanation.last_right) if one and self._earlier(one, wrong) != wrong]
            last = max(rights, key=self.order.index, default=None)
            before = f"right up to {last}, " if last else ""
            self.notes.append(f"{before}wrong from {wrong} on; no known fault gives your numbers")
            entering = point_at(layer_of(wrong), READS[Place.of(wrong).part][0]) if Place.of(wrong).part in MODULES else None
            if entering in self.held:
                self.notes.append(
                    f"{wrong} is computed from {entering}, which is right, by weights that are not the checkpoint's in any known "
                    "way: see whether they were loaded at all, and from where"
                )
            if between := self.order[self.order.index(last) + 1 if last else 0 : self.order.index(wrong)]:
                streams = [point for point in between if stage_of(point) == ""] or between
                more = ", ".join(streams[:FEW]) + (", ..." if len(streams) > FEW else "")
                self.notes.append(f"only one mistake between two arrays is looked for: dump more, first {more}")
        if explanation.untried:
            self.notes.append(budget.ended(explanation.untried))
        return first

    def _earlier(self, one: str | None, other: str | None) -> str | None:
        return min(filter(None, (one, other)), key=self.order.index, default=None)

    def _first_missing(self) -> str | None:
        """Return the first point that is not GPT-2's here, and is in other blocks, if some array may be the wrong value."""
        used = {name for names in self.held.values() for name in names}
        sizes = {entry.numel() for name, entry in zip(self.pool.names, self.pool.entries, strict=True) if name not in used}
        parts = {Place.of(point).part for point in self.held}
        missing = (one for one in self.order[:-1] if one not in self.held and Place.of(one).part in parts)
        return next((one for one in missing if self.exact[one].numel() in sizes), None)

    def _error(self, point: str, evidence: Mapping[str, Tensor]) -> float:
        """Return how far the dump's value at a point is from GPT-2's; of the nearest array, where it is not known which one."""
        expected = self.exact[point]
        if point in evidence:
            value = evidence[point]
            if point == "logits":
                value, expected = value[..., : self.config.vocab_size], expected[:, -value.shape[1] :]
            return worst_relative_error(value, expected)
        alike = self.pool.of_size(expected.numel())
        return min((worst_relative_error(one.reshape(expected.shape), expected) for one in alike), default=math.inf)

    def _head(self, explanation: Explanation) -> Iterator[Cause]:
        """Yield the head's own weights as a cause, where everything before it is explained and its result is not."""
        explained = "ln_f" in self.held or explanation.last_right == point_at(self.config.n_layer - 1, "")
        if explained and explanation.unexplained == "logits" and not explanation.untried:
            evidence = "what enters the head is explained, and no known formula of the last norm and the head gives your logits"
            yield Cause("untied-head", (Place(None, "logits"),), "the head has weights other than wte's", evidence, LIKELY)

    def _named(self, explanation: Explanation) -> Iterator[Cause]:
        """Yield the causes of each explanation that fits."""
        hypotheses = explanation.hypotheses if explanation.explains else explanation.hypotheses[:1]
        several = len(hypotheses) > 1
        for number, one in enumerate(hypotheses[:FEW]):
            confidence = (LIKELY if self.dumped.arrays else LIKELY - 0.1) - (0.2 + 0.05 * number if several else 0.0)
            for fault in one.faults:
                evidence = f"our model with this fault gives all numbers of your dump that it can be held to, to {one.error:.0e}"
                evidence += "; it is one of several explanations" if several else ""
                places = (ALL_WEIGHTS,) if Place(None, "") in fault.places else fault.places
                yield replace(fault, places=places, evidence=evidence, confidence=confidence)
            for fault in one.same:
                self.notes.append(f"on this model and these ids, {fault.id} gives the same numbers: {fault.detail}")
        if several:
            names = [" and ".join(dict.fromkeys(fault.id for fault in one.faults)) for one in hypotheses[:FEW]]
            decide = f"; dump {explanation.decisive} as well to decide" if explanation.decisive else ""
            self.notes.append(f"{len(hypotheses)} explanations fit equally well: {'; '.join(names)}{decide}")
