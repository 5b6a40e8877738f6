"""Explain by model what a dump does not record: which known faults in our own forward pass give its arrays and logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from gpt2.measure.metrics import Progress, worst_relative_error
from gpt2.measure.tracing import layer_of, point_at, points
from gpt2.port.deadline import Deadline
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.places import ALL_WEIGHTS, Place
from gpt2.port.diagnosis.report import LIKELY, Divergence
from gpt2.port.dump.dumped import THIRDS, Dumped
from gpt2.port.dump.evidence import Placement, misordered, placements, streams, with_storage
from gpt2.port.dump.explaining import STREAMS, Explanation, explain
from gpt2.port.dump.tolerance import UNITS
from gpt2.port.graph import MODULES, READS, Model

STORED = 40  # error of a product of stored values, in units of their rounding
MAX_PLACEMENTS = 3  # places in a block that unknown arrays are tried at
EXCHANGED = ("attn.q", "attn.k", "attn.v", "attn.heads")  # points whose right numbers may be used as others
FEW = 5  # arrays, blocks or hypotheses that are named in a note


@dataclass(frozen=True)
class Simulated:
    """What models show: the likeliest causes, whether they explain the dump, and the first place that is wrong.

    ``head``: a cause in the head, where all before it is explained.
    """

    causes: tuple[PlacedCause, ...]
    head: tuple[PlacedCause, ...]
    explains: bool
    first: Divergence | None
    notes: tuple[str, ...]


class Trial(NamedTuple):
    """A search with arrays ``placed`` somewhere, its evidence, and what it found."""

    placed: Placement
    evidence: dict[str, Tensor]
    explanation: Explanation


def sequence_of(dumped: Dumped) -> tuple[Divergence | None, list[PlacedCause]]:
    """Return the faults in the sequence of blocks, if the streams show one block after the other; and the first wrong place."""
    pool = dumped.pool
    used = {number for number, name in enumerate(pool.names) if name in dumped.held.get("embed", ())}
    arrays = streams(pool, dumped.ids, dumped.config.n_embd, used)
    whole = {number: array for number, array in arrays.items() if pool.whole[number]}
    bound = dumped.tolerance.points["logits"] + STORED * UNITS[dumped.coarsest][0]
    return misordered(dumped.reference, dumped.exact, whole or arrays, dumped.output.logits.double(), bound)


class Simulating:
    """A search for faults that give what ``dumped`` holds, until ``deadline``."""

    def __init__(self, dumped: Dumped, deadline: Deadline, progress: Progress) -> None:
        self.dumped, self.deadline, self.progress = dumped, deadline, progress
        self.config, self.ids, self.exact, self.order = dumped.config, dumped.ids, dumped.exact, dumped.order
        self.held, self.pool = dumped.held, dumped.pool
        self.first: Divergence | None = None
        self.notes: list[str] = []

    def run(self, known: Mapping[str, Tensor]) -> Simulated:
        """Search; ``known``: recorded values by traced point."""
        explanation, evidence = self._explain(known)
        self._place(explanation, evidence)
        causes, head = (tuple(found) for found in (self._causes(explanation), self._head(explanation)))
        return Simulated(causes, head, explanation.explains, self.first, tuple(self.notes))

    def _explain(self, known: Mapping[str, Tensor]) -> tuple[Explanation, dict[str, Tensor]]:
        right = {point: self.exact[point] for point in self.held if point not in ("wte", "wpe")}
        right, walked = (self._without_thirds(values) for values in (right, right | dict(known)))
        used = {number for number, name in enumerate(self.pool.names) if any(name in names for names in self.held.values())}
        if self.dumped.is_walkable:  # a block's result, written again as the next one's input, is no other value
            used = set[int]().union(*map(self.pool.again, used))
        left = streams(self.pool, self.ids, self.config.n_embd, used)
        nothing = Placement((), {}, 0.0)  # arrays that are at none of these places: the logits decide
        trials = [(right, nothing)]
        if walked.keys() != right.keys():  # what a walk found, which is perhaps not so
            trials.insert(0, (walked, nothing))
        elif left:
            model = Model(self.dumped.reference.state_dict(), self.config, self.ids)
            trials = [*((right, one) for one in placements(model, right.keys(), left)[:MAX_PLACEMENTS]), *trials]
        if (roles := {point: value for point, value in right.items() if _part(point) not in EXCHANGED}).keys() != right.keys():
            trials.append((roles, nothing))  # right numbers that the program perhaps uses as others
        tried: list[Trial] = []
        for base, one in trials if len(trials) > 1 else ():  # single faults first, at each place
            tried.append(Trial(one, *self._explained(base, one, several=False)))
            if self.deadline.passed or (tried[-1].explanation.explains and tried[-1].explanation.faults == 1):
                break
        if explained := [trial for trial in tried if trial.explanation.explains]:
            trial = min(explained, key=lambda trial: trial.explanation.faults)  # one fault of all, not one in each part
        elif tried and self.deadline.passed:
            trial = tried[-1]
        else:
            base, one = trials[0]
            trial = Trial(one, *self._explained(base, one, several=True))
        one, evidence, explanation = trial
        if not one.stages and explanation.explains:
            seen = self._seen(explanation.values, streams(self.pool, self.ids, self.config.n_embd, set()))
            parts, values = {_part(point) for point in seen}, explanation.values
            shown = (point for point in self.order if _part(point) in parts and point in values)
            wrong = (one for one in shown if worst_relative_error(values[one], self.exact[one]) > self._allowed(one))
            explanation = replace(explanation, first_wrong=next(wrong, explanation.first_wrong))
            evidence |= seen
        return explanation, evidence

    def _without_thirds(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values without q, k and v that show as thirds of c_attn's result alone: heads may be cut otherwise."""
        names = {point: self.held.get(point, ()) for point in values}
        thirds = {point for point, some in names.items() if some and all(name.endswith(THIRDS) for name in some)}
        return {point: value for point, value in values.items() if point not in thirds}

    def _seen(self, values: Mapping[str, Tensor], arrays: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Return the ``arrays`` that are the ``values`` of a program with the faults found, by traced point."""
        return {
            point: array
            for point in points(self.config.n_layer)
            if point in values and point in self.exact
            for array in arrays.values()
            if array.shape == values[point].shape and worst_relative_error(array, values[point]) <= self._allowed(point)
        }

    def _allowed(self, point: str) -> float:
        return with_storage(self.dumped.tolerance.points, {point: self.exact[point]}, self.dumped.coarsest)[point]

    def _explained(self, right: Mapping[str, Tensor], placed: Placement, several: bool) -> tuple[dict[str, Tensor], Explanation]:
        """Search for faults that explain the logits and the arrays at recognised places."""
        evidence = {**right, **placed.values, "logits": self.dumped.output.logits.double()}
        allowed = with_storage(self.dumped.tolerance.points, evidence, self.dumped.coarsest)
        stages = {*STREAMS, *placed.stages} if placed.stages or several else ()
        found = explain(
            self.dumped.reference, self.ids, evidence, allowed, self.deadline, self.progress, stages=stages, several=several
        )
        return evidence, found

    def _head(self, explanation: Explanation) -> Iterator[PlacedCause]:
        """Yield the head's own weights as a cause, where everything before it is explained and its result is not."""
        explained = "ln_f" in self.held or explanation.last_right == point_at(self.config.n_layer - 1, "")
        if explained and explanation.unexplained == "logits" and explanation.complete:
            evidence = "what enters the head is explained, and no known formula of the last norm and the head gives your logits"
            yield PlacedCause("untied-head", (Place(None, "logits"),), "the head has weights other than wte's", evidence, LIKELY)

    def _place(self, explanation: Explanation, evidence: Mapping[str, Tensor]) -> None:
        """Set the first place that is not GPT-2's, and say what is right before it."""
        missing = None if explanation.explains else self._first_missing()
        wrong = self._earlier(missing, explanation.first_wrong)
        if wrong is None:
            return
        self.first = Divergence(wrong, layer_of(wrong), self._error(wrong, evidence))
        if not explanation.explains:
            wrong = self._earlier(missing, explanation.unexplained) or wrong
            rights = [one for one in (*self.held, explanation.last_right) if one and self._earlier(one, wrong) != wrong]
            last = max(rights, key=self.order.index, default=None)
            before = f"right up to {last}, " if last else ""
            self.notes.append(f"{before}wrong from {wrong} on; no known fault gives your numbers")
            if (entering := self._entering(wrong)) in self.held:
                self.notes.append(
                    f"{wrong} is computed from {entering}, which is right, by weights that are not the checkpoint's in any known "
                    "way: see whether they were loaded at all, and from where"
                )
            if between := self._between(last, wrong):
                self.notes.append(f"dump more between these places: {between}")
        if not explanation.complete:
            self.notes.append("the search ended at its time limit, before every known fault was tried")

    def _earlier(self, one: str | None, other: str | None) -> str | None:
        return min(filter(None, (one, other)), key=self.order.index, default=None)

    def _first_missing(self) -> str | None:
        """Return the first point that is not GPT-2's here, and is in other blocks, if some array may be the wrong value."""
        used = {name for names in self.held.values() for name in names}
        sizes = {entry.numel() for name, entry in zip(self.pool.names, self.pool.entries, strict=True) if name not in used}
        parts = {_part(point) for point in self.held}
        missing = (one for one in self.order[:-1] if one not in self.held and _part(one) in parts)
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

    def _entering(self, point: str) -> str | None:
        """Return the point that a linear layer's result is computed from; None if ``point`` is no such result."""
        part = _part(point)
        return point_at(layer_of(point), READS[part][0]) if part in MODULES else None

    def _between(self, before: str | None, point: str) -> str:
        inside = self.order[self.order.index(before) + 1 if before else 0 : self.order.index(point)]
        return ", ".join(inside[:FEW]) + (", ..." if len(inside) > FEW else "")

    def _causes(self, explanation: Explanation) -> Iterator[PlacedCause]:
        hypotheses = explanation.hypotheses if explanation.explains else explanation.hypotheses[:1]
        several = len(hypotheses) > 1
        for number, one in enumerate(hypotheses[:FEW]):
            confidence = (LIKELY if self.dumped.arrays else LIKELY - 0.1) - (0.2 + 0.05 * number if several else 0.0)
            for fault in one.faults:
                evidence = f"our model with this fault gives all numbers of your dump that it can be held to, to {one.error:.0e}"
                evidence += "; it is one of several explanations" if several else ""
                places = (ALL_WEIGHTS,) if Place(None, "") in fault.places else fault.places
                yield PlacedCause(fault.id, places, fault.detail, evidence, confidence, fault.fix)
            for fault in one.same:
                self.notes.append(f"on this model and these ids, {fault.id} gives the same numbers: {fault.detail}")
        if several:
            names = [" and ".join(dict.fromkeys(fault.id for fault in one.faults)) for one in hypotheses[:FEW]]
            decide = f"; dump {explanation.decisive} as well to decide" if explanation.decisive else ""
            self.notes.append(f"{len(hypotheses)} explanations fit equally well: {'; '.join(names)}{decide}")


def _part(point: str) -> str:
    """Return a point's part of a block, "" for the block's output; a point outside the blocks as it is."""
    layer = layer_of(point)
    return point if layer is None else point.removeprefix(f"h.{layer}").removeprefix(".")
