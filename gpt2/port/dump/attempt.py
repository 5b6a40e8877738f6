"""Explain one dump under the assumption that its program computed in one dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gpt2.measure.metrics import Progress, worst_relative_error
from gpt2.measure.tracing import layer_of, point_at, points
from gpt2.model import GPT2
from gpt2.port.deadline import Deadline, TimeUp
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.places import EVERY, Place
from gpt2.port.diagnosis.report import LIKELY, SURE, Divergence
from gpt2.port.diagnosis.trail import SEQUENCE, Trail, Walk, account
from gpt2.port.diagnosis.walk import Walker
from gpt2.port.dump.arrays import Output, recognised
from gpt2.port.dump.evidence import Placement, misordered, placements, streams, with_storage
from gpt2.port.dump.explaining import STREAMS, Explanation, explain
from gpt2.port.dump.fits.following import Followed, Following
from gpt2.port.dump.holdings import LINEAR
from gpt2.port.dump.loading import Loaded, Loading
from gpt2.port.dump.pool import DumpPool
from gpt2.port.dump.simulation import NEEDS, Simulation
from gpt2.port.dump.tolerance import HALVES, UNITS, excess, measured

WALKED = 3  # arrays of a stream's size a block from which on a walk is tried
RIGHT_SECONDS = 10.0  # for the walk through a dump with right logits
STORED = 40  # error of a product of stored values, in units of their rounding
MAX_PLACEMENTS = 3  # places in a block that unknown arrays are tried at
MORE = 2  # times as many arrays are right in the likelier precision
CHANCE = 3  # faults of one place that do not explain the logits
HASTY = 10  # the part of the time for the first walk, which finds what it knows soon
FEW = 5  # arrays, blocks or hypotheses that are named in a note


class Attempt:
    """An examination of ``arrays``, all but the logits, in ``dtype``.

    ``exact``: the trace of ``reference``, our model in float64, on the same ids. ``right``: the logits are; ``held``: the names
    of the arrays that hold a right value, by traced point.
    """

    def __init__(
        self,
        arrays: Mapping[str, Tensor],
        output: Output,
        exact: Mapping[str, Tensor],
        reference: GPT2,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self.arrays, self.output, self.exact, self.reference, self.progress = arrays, output, exact, reference, progress
        self.deadline = Deadline()
        self.config, self.ids = reference.config, output.ids
        self.order = points(self.config.n_layer)
        self.tolerance = measured(reference, self.ids, dict(exact), dtype)
        expected = exact["logits"][:, -output.logits.shape[1] :]
        mine = output.logits[..., : self.config.vocab_size].double()
        self.error = worst_relative_error(mine, expected)
        self.right = excess(mine, expected, output.logits.dtype) <= self.tolerance.points["logits"]
        self.pool = DumpPool(self.tolerance, self.config, (self.ids.shape[0], self.ids.shape[1]))
        self.pool.fill(arrays.items(), output.logits)
        self.held = recognised(self.pool, exact, self.config)
        self.causes: list[PlacedCause] = []
        self.notes: list[str] = list(self._shown())
        self.first: Divergence = Divergence("logits", None, self.error)
        self.walked: Walk | None = None
        self.followed: Followed | None = None
        self.explanation: Explanation | None = None
        self.ordered = False  # each stream is exactly what some block makes of the one before it

    def is_likelier(self, other: Attempt) -> bool:
        """Return whether far more of the dump is right under this assumption than under ``other``."""
        return self.right or len(self.held) > MORE * len(other.held)

    def examine(self, deadline: Deadline) -> None:
        """Look for causes, until ``deadline``."""
        self.deadline = deadline
        self._examine()

    @property
    def equal(self) -> bool:
        return self.right and not self.causes

    @property
    def settled(self) -> bool:
        """Whether this assumption explains all that the dump shows."""
        explained = self.explanation is not None and self.explanation.explains
        followed = self.followed is not None and self.followed.explained
        return self.equal or explained or followed or self.ordered or (self.walked is not None and self.walked.explained)

    def _examine(self) -> None:
        if all(bool((one == one.flatten()[0]).all()) for one in (self.output.logits, *self.arrays.values())):
            self.notes.append("each array of your dump is one number throughout: nothing was computed, or it is other memory")
            return
        loaded = Loaded(self.reference.state_dict(), ())
        if walkable := self._walkable():
            trail, self.walked = self._walk(loaded, HASTY)
            if not self.right and not (self.walked.explained and self.walked.causes):
                self.followed = self._follow()
                if self.followed.explained and self.followed.causes:
                    self.causes = list(self.followed.causes)
                    self.first = self.followed.first or self.first
                    return
            if not self.right and not self.walked.explained:  # only then may the weights be others than the checkpoint's
                found = self._load(loaded)
                if found.causes or self.walked.timed_out:
                    loaded = found
                    trail, self.walked = self._walk(loaded)
            if self.walked.explained and not (self.right or self.walked.causes or loaded.causes):
                with self.pool.narrowed():  # every stage seems right, and the logits are not: a fault near the tolerance
                    _, narrow = self._walk(loaded)
                self.walked = narrow if narrow.explained and narrow.causes else self.walked
            if self.walked.first_divergence is not None:
                self.first = self.walked.first_divergence
            if self.walked.explained:
                self.causes = self._with_loaded(loaded, SURE)
                return
        if len(flat := self.output.logits.flatten(0, 1)) > 1 and bool((flat == flat[0]).all()):
            self.notes.append("your logits are the same at every position: look where the positions or the context are lost")
        if self.right:
            return  # nothing contradicts the logits; a walk that misses arrays can only guess
        known = {p: v for p, v in trail.values.items() if self.pool.find(v) is not None} if walkable else {}
        if not walkable and (causes := self._sequence()):
            self.causes = causes
            return
        self._explain(known)
        assert self.explanation is not None
        if self.explanation.explains:
            self.causes = list(self._simulated(self.explanation))
            return
        walked = [] if self.walked is None else self._with_loaded(loaded, LIKELY)
        if len(walked) >= CHANCE and len({place for cause in walked for place in cause.places}) == 1:
            walked = []  # so many faults of one operator fit by chance
        if self.tolerance.dtype in HALVES:  # its rounding is so large that much fits by chance
            walked = list(loaded.causes)
        self.causes = [*(walked or self._simulated(self.explanation)), *self._head(self.explanation)]
        if self.causes:
            self.notes.append("these causes do not explain all of the difference; fix them and dump again")

    # A walk through recorded values

    def _walkable(self) -> bool:
        size = self.ids.numel() * self.config.n_embd
        return len(self.pool.of_size(size)) >= WALKED * self.config.n_layer

    def _load(self, right: Loaded) -> Loaded:
        """Return the weights that the products show; the right ones if a third of the time does not suffice."""
        self.progress("looking for weights that were read wrongly")
        self.pool.deadline = Deadline(self.deadline.left / 3)
        try:
            return Loading(self.pool, right.weights, self.config, self.ids).run()
        except TimeUp:
            self.notes.append("the search for weights that were read wrongly ended at its time limit")
            return right
        finally:
            self.pool.deadline = Deadline()

    def _walk(self, loaded: Loaded, share: int = 2) -> tuple[Trail, Walk]:
        trail = Trail(self.pool, dict(loaded.weights), self.config, self.ids, self.progress)
        self.pool.deadline = Deadline(min(self.deadline.left / share, RIGHT_SECONDS if self.right else math.inf))
        try:
            Walker(trail, trail.own["wte.weight"]).run()
        except TimeUp:
            if not trail.lost:
                trail.lost.append("logits")
        self.pool.deadline = Deadline()
        return trail, account(trail, self.reference)

    def _follow(self) -> Followed:
        self.pool.deadline = Deadline(self.deadline.left / 2)
        found = Following(self.pool, self.reference.state_dict(), self.config, self.ids, self.progress).run()
        self.pool.deadline = Deadline()
        return found

    def _with_loaded(self, loaded: Loaded, confidence: float) -> list[PlacedCause]:
        """Return the causes of the walk and of loading; a fault that both saw once."""
        assert self.walked is not None
        in_order = self.walked.blocks == tuple(range(self.config.n_layer))  # a block may hold another's c_fc and still be itself
        seen = {(cause.id, place.layer) for cause in loaded.causes if cause.id == "qkv-order" for place in cause.places}
        causes = [replace(cause, confidence=confidence) for cause in loaded.causes]
        for cause in self.walked.causes:
            again = all((cause.id, layer) in seen for place in cause.places for layer in self._layers(place))
            if not again and not (in_order and cause.id in SEQUENCE):
                causes.append(cause)
        return causes

    def _layers(self, place: Place) -> list[int | None]:
        return list(range(self.config.n_layer)) if place.layer == EVERY else [place.layer]

    # A simulation of what is not recorded

    def _explain(self, known: Mapping[str, Tensor]) -> None:
        right = {point: self.exact[point] for point in self.held if point not in ("wte", "wpe")} | dict(known)
        used = {number for number, name in enumerate(self.pool.names) if any(name in names for names in self.held.values())}
        left = streams(self.pool, self.ids, self.config.n_embd, used)
        placed: list[Placement] = []
        if left and not known:
            simulation = Simulation(self.reference.state_dict(), self.config, self.ids)
            placed = placements(simulation, right.keys(), left)[:MAX_PLACEMENTS]
        nothing = Placement((), {}, 0.0)  # arrays that are at none of these places: the logits decide
        trials = [*placed, nothing] if placed else []  # single faults first, at each place
        for one in trials:
            evidence, explanation = self._explained(right, one, several=False)
            if explanation.explains or self.deadline.passed:
                break
        else:
            one = placed[0] if placed else nothing
            evidence, explanation = self._explained(right, one, several=True)
        if not one.stages and explanation.explains:
            seen = self._seen(explanation.values, streams(self.pool, self.ids, self.config.n_embd, set()))
            parts, values = {_part(point) for point in seen}, explanation.values
            shown = (point for point in self.order if _part(point) in parts and point in values)
            wrong = (one for one in shown if worst_relative_error(values[one], self.exact[one]) > self._allowed(one))
            explanation = replace(explanation, first_wrong=next(wrong, explanation.first_wrong))
            evidence |= seen
        self.explanation = explanation
        self._place(explanation, evidence)

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
        return with_storage(self.tolerance.points, {point: self.exact[point]}, self._coarsest())[point]

    def _explained(self, right: Mapping[str, Tensor], placed: Placement, several: bool) -> tuple[dict[str, Tensor], Explanation]:
        """Search for faults that explain the logits and the arrays at recognised places."""
        evidence = {**right, **placed.values, "logits": self.output.logits.double()}
        allowed = with_storage(self.tolerance.points, evidence, self._coarsest())
        stages = {*STREAMS, *placed.stages} if placed.stages or several else ()
        found = explain(self.reference, self.ids, evidence, allowed, self.deadline, self.progress, stages=stages, several=several)
        return evidence, found

    def _sequence(self) -> list[PlacedCause]:
        """Return the faults in the sequence of blocks, if the streams show one block after the other."""
        used = {number for number, name in enumerate(self.pool.names) if name in self.held.get("embed", ())}
        arrays = streams(self.pool, self.ids, self.config.n_embd, used)
        whole = {number: array for number, array in arrays.items() if self.pool.whole[number]}
        bound = self.tolerance.points["logits"] + STORED * UNITS[self._coarsest()][0]
        divergence, causes = misordered(self.reference, self.exact, whole or arrays, self.output.logits.double(), bound)
        self.ordered, self.first = bool(causes), divergence or self.first
        return causes

    def _head(self, explanation: Explanation) -> Iterator[PlacedCause]:
        """Yield the head's own weights as a cause, where everything before it is explained and its result is not."""
        explained = "ln_f" in self.held or explanation.last_right == point_at(self.config.n_layer - 1, "")
        if explained and explanation.unexplained == "logits" and explanation.complete:
            evidence = "what enters the head is explained, and no known formula of the last norm and the head gives your logits"
            yield PlacedCause("untied-head", (Place(None, "logits"),), "the head has weights other than wte's", evidence, LIKELY)

    def _coarsest(self) -> torch.dtype:
        dtypes = {array.dtype for array in self.arrays.values()} | {self.output.logits.dtype}
        return max(dtypes, key=lambda dtype: UNITS[dtype][0])

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
        return point_at(layer_of(point), NEEDS[part][0]) if part in LINEAR else None

    def _between(self, before: str | None, point: str) -> str:
        inside = self.order[self.order.index(before) + 1 if before else 0 : self.order.index(point)]
        return ", ".join(inside[:FEW]) + (", ..." if len(inside) > FEW else "")

    def _simulated(self, explanation: Explanation) -> Iterator[PlacedCause]:
        hypotheses = explanation.hypotheses if explanation.explains else explanation.hypotheses[:1]
        several = len(hypotheses) > 1
        for number, one in enumerate(hypotheses[:FEW]):
            confidence = (LIKELY if self.arrays else LIKELY - 0.1) - (0.2 + 0.05 * number if several else 0.0)
            for fault in one.faults:
                evidence = f"our model with this fault gives all numbers of your dump that it can be held to, to {one.error:.0e}"
                evidence += "; it is one of several explanations" if several else ""
                yield PlacedCause(fault.id, fault.places, fault.detail, evidence, confidence)
            for fault in one.same:
                self.notes.append(f"on this model and these ids, {fault.id} gives the same numbers: {fault.detail}")
        if several:
            names = [" and ".join(dict.fromkeys(fault.id for fault in one.faults)) for one in hypotheses[:FEW]]
            decide = f"; dump {explanation.decisive} as well to decide" if explanation.decisive else ""
            self.notes.append(f"{len(hypotheses)} explanations fit equally well: {'; '.join(names)}{decide}")

    # What the report says about the arrays

    def _shown(self) -> Iterator[str]:
        dtypes = sorted({str(array.dtype).removeprefix("torch.") for array in [*self.arrays.values(), self.output.logits]})
        if not self.arrays:
            tried = "" if self.right else "; every known fault was tried in our own forward pass"
            yield f"your dump holds the logits alone ({dtypes[0]}){tried}"
            return
        origin = {name: name.partition("[")[0].removesuffix(" masked") for names in self.held.values() for name in names}
        count = len(set(origin.values()) & set(self.arrays))
        some = [f"{names[0]} is {point}" for point, names in self.held.items() if len(names) == 1][: FEW - 2]
        shown = f", such as: {', '.join(some)}" if some else ""
        arrays = f"{len(self.arrays)} other array{'s' if len(self.arrays) != 1 else ''}"
        yield f"your dump holds the logits, under the name {self.output.name}, and {arrays} ({', '.join(dtypes)})"
        yield f"{count} of the arrays {'hold' if count != 1 else 'holds'} GPT-2's own values{shown}"


def _part(point: str) -> str:
    """Return a point's part of a block, "" for the block's output; a point outside the blocks as it is."""
    layer = layer_of(point)
    return point if layer is None else point.removeprefix(f"h.{layer}").removeprefix(".")
