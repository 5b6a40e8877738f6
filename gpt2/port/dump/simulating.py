"""Explain by simulation what a dump does not record: which known faults in our own forward pass give its arrays and logits.

Right values are recognised by value. Streams that are wrong are put in order by what each block would make of the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from gpt2.measure.metrics import Progress, worst_relative_error
from gpt2.measure.tracing import layer_of, point_at, points
from gpt2.port.dump.dumped import THIRDS, Dumped
from gpt2.port.dump.explaining import STREAMS, DumpExplainer, Explanation
from gpt2.port.graph import MODULES, ORDER, READS, Model, run_block, stage_of
from gpt2.port.terms.budget import Budget
from gpt2.port.terms.causes import LIKELY, Cause
from gpt2.port.terms.places import ALL_WEIGHTS, Place
from gpt2.port.terms.report import Divergence
from gpt2.port.terms.tolerance import UNITS

MAX_PLACEMENTS = 3  # places in a block that unknown arrays are tried at
EXCHANGED = ("attn.q", "attn.k", "attn.v", "attn.heads")  # points whose right numbers may be used as others
FEW = 5  # arrays, blocks or hypotheses that are named in a note
RECORDED: tuple[tuple[str, ...], ...] = (  # one tensor a block, or two
    *((stage,) for stage in ("", "mid", "mlp.c_proj", "attn.c_proj", "ln_1", "ln_2", "attn.heads")),
    ("mid", ""),
    ("attn.c_proj", "mlp.c_proj"),
    ("ln_1", "ln_2"),
)
LEAST_LIKENESS = 0.1  # of a stream and what the right block makes of the one before it, as a cosine
BY_CHANCE = 4.0  # standard deviations of such a cosine for an array that has nothing to do with the model


@dataclass(frozen=True)
class Placement:
    """Arrays of a dump at traced points; ``stages``: the stages of a block that these points are, "" for its result."""

    stages: tuple[str, ...] = ()
    values: Mapping[str, Tensor] = field(default_factory=dict)
    likeness: float = 0.0


class Simulating:
    """A search for faults that give what ``dumped`` holds, until the budget is spent.

    ``causes``: the likeliest; ``explains``: whether they explain the dump. ``head``: a cause in the head, where all before it is
    explained. ``first``: the first place that is wrong.
    """

    def __init__(self, dumped: Dumped, budget: Budget, progress: Progress) -> None:
        self.dumped, self.budget, self.progress = dumped, budget, progress
        self.config, self.ids, self.exact, self.order = dumped.config, dumped.ids, dumped.exact, dumped.order
        self.held, self.pool = dumped.held, dumped.pool
        self.model = Model(dumped.reference.state_dict(), dumped.config, dumped.ids, budget=budget)
        self.notes: list[str] = []

    def run(self, known: Mapping[str, Tensor]) -> None:
        """Search; ``known``: recorded values by traced point."""
        explanation, evidence = self._explain(known)
        self.explains, self.first = explanation.explains, self._place(explanation, evidence)
        self.causes, self.head = [*self._causes(explanation)], [*self._head(explanation)]

    def _explain(self, known: Mapping[str, Tensor]) -> tuple[Explanation, dict[str, Tensor]]:
        """Return what explains the dump best, with its arrays at one place of a block or another, and this evidence."""
        right = {point: self.exact[point] for point in self.held if point not in ("wte", "wpe")}
        right, walked = (self._without_thirds(values) for values in (right, right | dict(known)))
        alone = right, Placement()  # without a place for the other arrays: the logits decide
        trials = [alone]
        if walked.keys() != right.keys():  # what a walk found, which is perhaps not so
            trials.insert(0, (walked, Placement()))
        else:
            trials = [*((right, one) for one in self._placements(right)[:MAX_PLACEMENTS]), *trials]
        if (
            roles := {point: value for point, value in right.items() if Place.of(point).part not in EXCHANGED}
        ).keys() != right.keys():
            trials.append((roles, Placement()))  # right numbers that the program perhaps uses as others
        Trial = tuple[Placement, dict[str, Tensor], Explanation]
        whole, parted = list[Trial](), list[Trial]()
        for base, one in trials if len(trials) > 1 else ():  # one fault of all, not one in each part, comes first
            whole.append((one, *self._explained(base, one, one.stages)))
            if self.budget.spent or (whole[-1][2].explains and whole[-1][2].faults == 1):
                break
        explained = [trial for trial in whole if trial[2].explains]
        for base, one in trials[:1] if trials[0] is alone else (trials[0], alone):
            if explained or ((whole or parted) and self.budget.spent):
                break
            parted.append((one, *self._explained(base, one, STREAMS)))
            explained = [trial for trial in parted[-1:] if trial[2].explains]
        placed, evidence, explanation = min(explained or parted[:1] or whole[-1:], key=lambda trial: trial[2].faults)
        if not placed.stages and explanation.explains:  # arrays that are values of a program with these faults
            seen, values = self._seen(explanation.values), explanation.values
            parts = {Place.of(point).part for point in seen}
            shown = (point for point in self.order if Place.of(point).part in parts and point in values)
            wrong = (one for one in shown if worst_relative_error(values[one], self.exact[one]) > self._allowed(one))
            return replace(explanation, first_wrong=next(wrong, explanation.first_wrong)), evidence | seen
        return explanation, evidence

    def _without_thirds(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values without q, k and v that show as thirds of c_attn's result alone: heads may be cut otherwise."""
        names = {point: self.held.get(point, ()) for point in values}
        thirds = {point for point, some in names.items() if some and all(name.endswith(THIRDS) for name in some)}
        return {point: value for point, value in values.items() if point not in thirds}

    # The arrays

    def _streams(self, used: Collection[int]) -> dict[int, Tensor]:
        """Return the arrays that may be a stream (B, T, D), laid out so, by their entries' numbers; not those ``used``."""
        (batch, tokens), width = self.ids.shape, self.config.n_embd
        out: dict[int, Tensor] = {}
        for number, entry in enumerate(self.pool.entries):
            if entry.numel() != batch * tokens * width or number in used or not bool(entry.isfinite().all()):
                continue
            if entry.shape[-1] == width or entry.ndim == 1:
                time_first = entry.ndim == 3 and entry.shape[:2] == (tokens, batch) and tokens != batch
                out[number] = (entry.transpose(0, 1) if time_first else entry).reshape(batch, tokens, width)
            elif entry.shape[0] == width:
                out[number] = entry.movedim(0, -1).reshape(batch, tokens, width)
        return out

    def _placements(self, held: Collection[str]) -> list[Placement]:
        """Return what unknown arrays of a stream's size may be, the likeliest first: results of blocks, of norms, of branches."""
        used = {number for number, name in enumerate(self.pool.names) if any(name in names for names in self.held.values())}
        if self.dumped.is_walkable:  # a block's result, written again as the next one's input, is no other value
            used = set[int]().union(*map(self.pool.again, used))
        arrays = self._streams(used)
        found = [self._placed(stages, held, arrays) for stages in RECORDED] if arrays else []
        return sorted((one for one in found if one.values), key=lambda one: -one.likeness)

    def _placed(self, stages: tuple[str, ...], held: Collection[str], arrays: Mapping[int, Tensor]) -> Placement:
        """Return arrays at these stages, each as that which is most like what a block makes of the arrays before it.

        So where one block alone is wrong, everything else is exact. ``held``: points whose right value is recorded.
        """
        left, values, likeness, x = dict(arrays), dict[str, Tensor](), 0.0, self.model.embed()
        least = max(LEAST_LIKENESS, BY_CHANCE / x.numel() ** 0.5)
        behind = max((self.order.index(one) for one in held if one == "ln_f" or stage_of(one) in STREAMS), default=-1)
        for layer in range(self.config.n_layer):
            state, after = {"x": x}, -1
            for stage in (*stages, "") if stages[-1] else stages:
                state = run_block(self.model.site(layer, state), state, {}, after, ORDER[stage])
                point, after = point_at(layer, stage), ORDER[stage]
                if stage not in stages or (point not in held and self.order.index(point) < behind):
                    continue  # what a right stream was made of is right
                like = {number: _likeness(state[stage], array) for number, array in left.items() if point not in held}
                best = max(like, key=lambda number: like[number], default=None)
                if best is not None and like[best] >= least:
                    state[stage] = values[point] = left.pop(best)
                    likeness += like[best]
                likeness += point in held
            x = state[""]
        recorded = sum(stage_of(point) in {one for some in RECORDED for one in some} for point in held) + len(arrays)
        return Placement(stages, values, likeness / max(len(stages) * self.config.n_layer, recorded))

    def _seen(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arrays that are the ``values`` of a program with the faults found, by traced point."""
        return {
            point: array
            for point in points(self.config.n_layer)
            if point in values and point in self.exact
            for array in self._streams(()).values()
            if array.shape == values[point].shape and worst_relative_error(array, values[point]) <= self._allowed(point)
        }

    def _allowed(self, point: str) -> float:
        return self._with_storage({point: self.exact[point]})[point]

    def _with_storage(self, evidence: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the allowed errors with the rounding of storage, relative to the root mean square of each value."""
        unit, smallest = UNITS[self.dumped.coarsest]
        allowed = self.dumped.tolerance.points
        out = dict(allowed)
        for point, value in evidence.items():
            finite = value[value.isfinite()]
            if finite.numel():
                rms = float(finite.square().mean().sqrt().clamp(min=1e-300))
                out[point] = allowed.get(point, max(allowed.values())) + (unit * float(finite.abs().max()) + smallest) / rms
        return out

    def _explained(
        self, right: Mapping[str, Tensor], placed: Placement, stages: Collection[str]
    ) -> tuple[dict[str, Tensor], Explanation]:
        """Search for faults that explain the logits and the arrays at recognised places."""
        evidence = {**right, **placed.values, "logits": self.dumped.output.logits.double()}
        parts = {*STREAMS, *placed.stages} if stages else ()
        given = self.model, evidence, self._with_storage(evidence), self.budget, self.progress
        return evidence, DumpExplainer(*given, parts).explanation()

    # What is said

    def _place(self, explanation: Explanation, evidence: Mapping[str, Tensor]) -> Divergence | None:
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
            self.notes.append(self.budget.ended(explanation.untried))
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

    def _causes(self, explanation: Explanation) -> Iterator[Cause]:
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


def _likeness(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / (one.norm() * other.norm()).clamp(min=1e-300))
