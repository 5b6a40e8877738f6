"""Explain a program's numbers by faults: which known ones, switched on in our own forward pass, give the same numbers.

A program may show one tensor a block, or only its logits. Between two streams that it shows, every known fault is tried, alone
and then in pairs; the search goes on behind an explained part with our own values, and ends where nothing explains a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.measure.metrics import Progress, silent, worst_relative_error
from gpt2.measure.tracing import points
from gpt2.model import GPT2
from gpt2.port.deadline import Deadline
from gpt2.port.dump.candidates import FITTED, Candidate, Found, Table
from gpt2.port.dump.matching import Search
from gpt2.port.dump.segments import Fit, Segment
from gpt2.port.fault import Fault
from gpt2.port.graph import Model, Program, State, stage_of

SAME = 1e-9  # programs whose values differ by less are one function
ENDS, STREAMS = ("embed", "logits"), ("", "mid")  # points, and stages of a block, behind which a search begins anew
MAX_OFFERED = 8  # explanations that are reported


@dataclass(frozen=True)
class Hypothesis:
    """Faults that together explain a program; ``error`` is the largest relative error of its values at the points that it shows.

    ``same``: faults that are the same function on this model and these ids, so that nothing can tell them apart.
    """

    faults: tuple[Found, ...]
    error: float
    same: tuple[Found, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What explains a program's values.

    ``right``: GPT-2 itself does. ``hypotheses``: every set of faults that does, the simplest first; faults of what lies before,
    if a point is ``unexplained``: the first one that no fault gives. None, if each part is explained and no faults explain all
    together. ``decisive``: the traced point that would tell the first two apart. ``last_right``: the last shown point that is
    explained, None if there is none; ``first_wrong``: the first one that is not GPT-2's. ``complete``: all single faults were
    tried before the deadline.
    """

    right: bool
    hypotheses: tuple[Hypothesis, ...]
    decisive: str | None
    last_right: str | None
    first_wrong: str | None
    unexplained: str | None
    complete: bool
    values: Mapping[str, Tensor]  # of the first hypothesis, by traced point, if it explains everything

    @property
    def faults(self) -> int:
        """How many faults the first hypothesis has."""
        return len(self.hypotheses[0].faults) if self.hypotheses else 0

    @property
    def explains(self) -> bool:
        """Whether faults were found that give every shown value."""
        return bool(self.hypotheses) and self.unexplained is None


@torch.no_grad()
def explain(
    reference: GPT2,
    ids: Tensor,
    evidence: Mapping[str, Tensor],
    tolerance: Mapping[str, float],
    deadline: Deadline,
    progress: Progress = silent,
    *,
    stages: Collection[str] = STREAMS,
    several: bool = True,
) -> Explanation:
    """Return what explains ``evidence``, a program's values for ``ids`` (B, T), with the weights of ``reference``.

    Args:
        evidence: by traced point, float64, as :func:`gpt2.measure.tracing.trace` has them; of the logits (B, T', V') perhaps only
            the last position, and a padded vocabulary.
        tolerance: the relative error that rounding explains, by point.
        deadline: when to stop.
        stages: of a block, such as "attn.c_proj": where they are shown, the search begins anew behind them.
        several: try pairs and triples of faults between two shown tensors, where no single one explains them.
    """
    vocabulary = reference.config.vocab_size
    shown = {point: evidence[point] for point in points(reference.config.n_layer) if point in evidence}
    if "logits" in shown:
        shown["logits"] = shown["logits"][..., :vocabulary]
    model = Model(reference.state_dict(), reference.config, ids)
    return Explainer(model, shown, tolerance, deadline, progress, stages, several).explanation()


class Explainer:
    """Follows the shown points from one stream to the next."""

    def __init__(
        self,
        model: Model,
        shown: Mapping[str, Tensor],
        tolerance: Mapping[str, float],
        deadline: Deadline,
        progress: Progress,
        stages: Collection[str],
        several: bool,
    ) -> None:
        self.model, self.shown, self.tolerance = model, shown, tolerance
        self.deadline, self.progress = deadline, progress
        self.stages, self.several = stages, several
        self.layers = model.config.n_layer
        self.complete = True
        self.explained: list[tuple[Segment, list[Fit]]] = []
        self.counts = Counter[frozenset[str]]()  # of the explained parts that some faults explain

    def explanation(self) -> Explanation:
        last_right = first_wrong = unexplained = None
        right = True
        table = None
        for segment in self._segments():
            bad = segment.first_wrong(Candidate())
            if bad is None:
                fits = [Fit(Candidate(), 0.0)]
            else:
                right, first_wrong = False, first_wrong or bad
                table = table or Table.of(self.model)
                search = Search(segment, table, self.deadline, self.progress)
                fits = search.fits(self.several)
                self.complete &= search.complete
            if not fits:
                unexplained = bad
                break
            fits.sort(key=self._rank)
            self.counts.update({fit.candidate.labels for fit in fits})
            self.explained.append((segment, fits))
            segment.candidate, last_right = fits[0].candidate, segment.end
        whole = self._whole(unexplained is None)
        hypotheses = self._described(whole)
        decisive = self._decisive([fit.candidate for fit in whole]) if len(hypotheses) > 1 else None
        values = self._trace(whole[0].candidate) if whole and unexplained is None else {}
        return Explanation(right, tuple(hypotheses), decisive, last_right, first_wrong, unexplained, self.complete, values)

    def _rank(self, fit: Fit) -> tuple[float, int, tuple[float, bool, int, bool]]:
        """Return how likely a fit is, the least first: one mistake in several parts is likelier than several."""
        return fit.price, -self.counts[fit.candidate.labels], fit.candidate.order_of_naming

    def _segments(self) -> Iterable[Segment]:
        """Yield the parts between two shown tensors; what enters one is known when it is yielded."""
        order = points(self.layers)
        ends = [point for point in order if point in self.shown and (point in ENDS or stage_of(point) in self.stages)]
        if "logits" not in ends and "ln_f" in self.shown:
            ends.append("ln_f")
        before = None
        for end in ends:
            behind = -1 if before is None else order.index(before.end)
            inside = {point: value for point, value in self.shown.items() if behind < order.index(point) <= order.index(end)}
            entrance = None if before is None else before.left()
            yield (before := Segment(self.model, end, entrance, inside, self.tolerance))

    def _whole(self, complete: bool) -> list[Fit]:
        """Return explanations of all explained segments together: a fault that explains several is preferred in each.

        ``complete``: all segments are explained, so that the faults together must give every shown value; none, if no such do.
        """
        faulty = [fits for _, fits in self.explained if not fits[0].candidate.is_right]
        if not faulty:
            return []
        choices = [sorted(fits, key=self._rank) for fits in faulty]
        best = [fits[0] for fits in choices]
        out = [joined(best)]
        for number, fits in enumerate(choices):
            for other in fits[1:]:
                mine = best[number].candidate.labels
                swapped = [
                    next((fit for fit in choices[i] if fit.candidate.labels == other.candidate.labels), None)
                    if one.candidate.labels == mine
                    else one
                    for i, one in enumerate(best)
                ]
                if all(fit is not None for fit in swapped):
                    out.append(joined([fit for fit in swapped if fit is not None]))
        unique: dict[object, Fit] = {}
        for fit in out:
            unique.setdefault(fit.candidate.key, fit)
        ordered = sorted(unique.values(), key=lambda fit: fit.candidate.order_of_naming)
        alone = len(faulty) == 1  # these fits were seen to give every shown value
        held: list[Fit] = []
        for fit in ordered:
            if len(held) == MAX_OFFERED or (held and fit.price >= held[0].price + FITTED):
                break  # another fault that is not needed is none
            if alone or (complete and self._holds(fit.candidate)):
                held.append(fit)
        if alone and len(held) > 1 and complete:  # some may do more behind their part
            held = [fit for fit in held if self._holds(fit.candidate)] or held
        return held if alone or complete else ordered[:1]

    def _holds(self, candidate: Candidate) -> bool:
        """Return whether the faults of all segments, switched on together, give all shown values."""
        if not candidate.is_right and not candidate.head and candidate.program is None:
            return False
        whole = Segment(self.model, list(self.shown)[-1], None, self.shown, self.tolerance)
        return whole.first_wrong(candidate) is None

    def _described(self, fits: list[Fit]) -> list[Hypothesis]:
        """Return hypotheses; those that are the same function, or the same faults at the same places, are one."""
        out: list[Hypothesis] = []
        values: list[tuple[Tensor, tuple[Fault, ...]]] = []
        for fit in fits:
            value = self._trace(fit.candidate)["logits"]
            faults = fit.candidate.found(self.layers)
            twin = next(
                (
                    number
                    for number, (other, head) in enumerate(values)
                    if [(one.id, one.places) for one in faults] == [(one.id, one.places) for one in out[number].faults]
                    or (head == fit.candidate.head and worst_relative_error(value, other) < SAME)
                ),
                None,
            )
            if twin is not None:
                one = out[twin]
                new = tuple(fault for fault in faults if fault.detail not in {other.detail for other in (*one.faults, *one.same)})
                out[twin] = Hypothesis(one.faults, one.error, (*one.same, *new))
            elif len(out) < MAX_OFFERED:
                out.append(Hypothesis(faults, fit.error))
                values.append((value, fit.candidate.head))
        return out

    def _trace(self, candidate: Candidate) -> State:
        return self.model.trace(candidate.program or Program())

    def _decisive(self, candidates: list[Candidate]) -> str | None:
        """Return the traced point at which the first two candidates differ most."""
        one, other = (self._trace(candidate) for candidate in candidates[:2])
        apart = {
            point: worst_relative_error(one[point], other[point])
            for point in points(self.layers)
            if point in one and point in other and point not in self.shown
        }
        return max(apart, key=lambda point: apart[point]) if apart and max(apart.values()) > 0 else None


def joined(fits: Iterable[Fit]) -> Fit:
    """Return the fits of all segments as one."""
    fits = list(fits)
    candidate = Candidate()
    for fit in fits:
        candidate = candidate.with_(fit.candidate)
    candidate = replace(candidate, sites=tuple(dict.fromkeys(candidate.sites)))  # a fault may show in several segments
    return Fit(candidate, max((fit.error for fit in fits), default=0.0))
