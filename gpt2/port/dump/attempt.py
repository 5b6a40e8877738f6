"""Explain one dump under the assumption that its program computed in one dtype, in steps, until one explains all of it.

A dump that holds most values is *walked* through, from one to the next; where neither GPT-2's formulas nor the known wrong ones
give them, *fits* read off what was computed. What is not recorded is *simulated*: known faults in our own forward pass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from gpt2.measure.metrics import Progress, worst_relative_error
from gpt2.measure.tracing import layer_of, point_at
from gpt2.port.dump.dumped import EXCHANGED, Dumped
from gpt2.port.dump.simulating import DumpExplainer, Evidence, Explanation
from gpt2.port.graph import MODULES, READS, Model
from gpt2.port.search.blamed import Blamed
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
        self.dumped, self.progress, self.order = dumped, progress, dumped.order
        self.causes: list[Cause] = []
        self.notes: list[str] = list(dumped.notes())
        self.first = Divergence("logits", dumped.error)
        self.settled = dumped.right or dumped.is_constant

    @property
    def equal(self) -> bool:
        return self.dumped.right and not self.causes

    def run(self, budget: Budget) -> None:
        """Walk through the recorded values, if there are enough of them; then simulate what the walk does not explain."""
        if self.settled:
            return
        dumped, pool = self.dumped, self.dumped.pool
        walked: Walked | None = None
        model = Model(dumped.reference.state_dict(), dumped.config, dumped.ids, budget=budget)
        if dumped.is_walkable:
            model.budget = pool.budget = budget.part(2)
            walked = Search(pool, Blamed(model, dumped.exact), self.progress).run()
            model.budget, pool.budget = budget, Budget()
            self.first, self.settled = walked.first or self.first, walked.explained
            if walked.explained:
                self.causes = list(walked.causes)
                return
        if len(flat := dumped.output.logits.flatten(0, 1)) > 1 and bool((flat == flat[0]).all()):
            self.notes.append("your logits are the same at every position: look where the positions or the context are lost")
        found, evidence = self._simulated(model, {} if walked is None else walked.values)
        self.settled = found.explains
        self._place(found, evidence, walked, budget)
        named = list(self._named(found))
        likely = [] if walked is None or found.explains else self._likely(walked)
        self.causes = [*(likely or named), *self._head(found)]
        if self.causes and not found.explains:
            self.notes.append("these causes do not explain all of the difference; fix them and dump again")
        if walked is not None and walked.ended and not self.settled:
            self.notes.append(walked.ended)

    def _simulated(self, model: Model, known: Mapping[str, Tensor]) -> tuple[Explanation, Evidence]:
        """Return what explains the dump best, with its arrays at one place of a block or another, and this evidence.

        ``known``: recorded values by traced point, as a walk found them, which is perhaps not so.
        """
        dumped, exact, right = self.dumped, self.dumped.exact, self.dumped.shown
        walked = right | {point: value for point, value in known.items() if Place.of(point).part not in EXCHANGED}
        lost = walked.keys() != right.keys()
        placed = [] if lost else [right | values for values in dumped.placements(model)]
        plain = [walked, right] if lost else [right]
        one_fault = [(one, True) for one in plain] if len(placed) + len(plain) > 1 else []  # comes before one in each part
        done, explained = list[tuple[Evidence, bool, Explanation]](), list[tuple[Evidence, bool, Explanation]]()
        for given, at_once in (*((one, False) for one in placed), *one_fault, *((one, False) for one in plain)):
            if done and (model.budget.spent or (explained and done[-1][1])):
                break
            evidence = {**given, "logits": dumped.output.logits.double()}
            explainer = DumpExplainer(model, evidence, dumped.allowed(evidence), self.progress, at_once)
            done.append((evidence, at_once, explainer.explanation()))
            explained = [one for one in done if one[2].explains]
            if explained and explained[-1][2].faults == 1:
                break
        in_parts = [one for one in done if not one[1]]
        evidence, _, found = min(explained or in_parts[:1] or done[-1:], key=lambda one: one[2].faults)
        if found.explains:  # arrays that are values of a program with these faults
            values = {point: value for point, value in found.values.items() if point in exact}
            parts = {Place.of(point).part for point in dumped.recognised(values)}
            shown, allowed = (point for point in dumped.order if Place.of(point).part in parts), dumped.allowed(values)
            wrong = (one for one in shown if one in values and worst_relative_error(values[one], exact[one]) > allowed[one])
            return found._replace(first_wrong=next(wrong, found.first_wrong)), {**values, **evidence}
        return found, evidence

    def _likely(self, walked: Walked) -> list[Cause]:
        """Return the causes of a walk that does not explain the logits."""
        if self.dumped.tolerance.dtype in HALVES:  # whose rounding is so large that much fits by chance
            return []
        causes = [replace(one, confidence=LIKELY) for one in walked.causes]
        branches = {(place.layer, place.part.partition(".")[0]) for cause in causes for place in cause.places}
        return [] if len(causes) >= CHANCE and len(branches) == 1 else causes  # so many faults of one branch fit by chance

    # What is said of faults in our own forward pass

    def _place(self, found: Explanation, evidence: Mapping[str, Tensor], walked: Walked | None, budget: Budget) -> None:
        """Note the first place that is not GPT-2's, and say what is right before it."""
        lost = walked.first.point if walked is not None and walked.first is not None and not found.explains else None
        wrong = self._earlier(lost, found.first_wrong)
        if wrong is None:
            return
        if wrong != lost:
            value, count = evidence[wrong], evidence["logits"].shape[1] if wrong == "logits" else None
            expected = self.dumped.exact[wrong] if count is None else self.dumped.exact[wrong][:, -count:]
            self.first = Divergence(wrong, worst_relative_error(value[..., : expected.shape[-1]], expected))
        if not found.explains:
            wrong = self._earlier(lost, found.unexplained) or wrong
            rights = [one for one in (*self.dumped.held, found.last_right) if one and self._earlier(one, wrong) != wrong]
            last = max(rights, key=self.order.index, default=None)
            before = f"right up to {last}, " if last else ""
            self.notes.append(f"{before}wrong from {wrong} on; no known fault gives your numbers")
            entering = point_at(layer_of(wrong), READS[Place.of(wrong).part][0]) if Place.of(wrong).part in MODULES else None
            if entering in self.dumped.held:
                self.notes.append(
                    f"{wrong} is computed from {entering}, which is right, by weights that are not the checkpoint's in any known "
                    "way: see whether they were loaded at all, and from where"
                )
            if between := self.order[self.order.index(last) + 1 if last else 0 : self.order.index(wrong)]:
                streams = [point for point in between if Place.of(point).part == ""] or between
                more = ", ".join(streams[:FEW]) + (", ..." if len(streams) > FEW else "")
                self.notes.append(f"only one mistake between two arrays is looked for: dump more, first {more}")
        if found.untried:
            self.notes.append(budget.ended(found.untried))

    def _earlier(self, one: str | None, other: str | None) -> str | None:
        return min(filter(None, (one, other)), key=self.order.index, default=None)

    def _head(self, explanation: Explanation) -> Iterator[Cause]:
        """Yield the head's own weights as a cause, where everything before it is explained and its result is not."""
        explained = "ln_f" in self.dumped.held or explanation.last_right == point_at(self.dumped.config.n_layer - 1, "")
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
