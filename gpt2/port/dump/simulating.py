"""Simulate what a dump does not record: which known faults, switched on in our own forward pass, give its arrays and logits.

Between two shown values, every known fault is tried; behind an explained part the search goes on with our own values.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.measure.metrics import Progress, silent, worst_relative_error
from gpt2.measure.tracing import point_at, points
from gpt2.port.alternatives.candidates import FITTED, Candidate
from gpt2.port.graph import NODES, ORDER, Entrance, Model, Program, State
from gpt2.port.search.matching import PartSearch
from gpt2.port.search.part import Fitting, Part
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import Place

SAME = 1e-9  # programs whose values differ by less are one function
MOST = {True: 6, False: 2}  # explanations of a part that are tried with those of the next, by whether the model is small

Evidence = dict[str, Tensor]  # a program's values by traced point


@dataclass(frozen=True)
class Hypothesis:
    """Faults that together explain a program; ``error`` is the largest relative error of its values at the points that it shows.

    ``same``: faults that are the same function on this model and these ids, so that nothing can tell them apart.
    """

    faults: tuple[Cause, ...]
    error: float
    same: tuple[Cause, ...] = ()


class Explanation(NamedTuple):
    """What explains a program's values; ``hypotheses``: every set of faults that does, the simplest first.

    Where a point is ``unexplained`` (the first one that no fault gives), faults of what lies before it.
    """

    hypotheses: tuple[Hypothesis, ...]
    decisive: str | None  # the traced point that would tell the first two apart
    last_right: str | None  # the last shown point that is explained
    first_wrong: str | None  # the first one that is not GPT-2's
    unexplained: str | None
    untried: tuple[str, ...]  # the kinds of faults of which not all were tried before the budget was spent
    values: Mapping[str, Tensor]  # of the first hypothesis, by traced point, if it explains everything

    @property
    def faults(self) -> int:
        """How many faults the first hypothesis has."""
        return len(self.hypotheses[0].faults) if self.hypotheses else 0

    @property
    def explains(self) -> bool:
        """Whether faults were found that give every shown value."""
        return bool(self.hypotheses) and self.unexplained is None


class DumpExplainer:
    """Looks for what explains ``evidence``, a program's values on the ids and with the weights of ``model``, in float64.

    It follows the shown points from one to the next; ``at_once``: from the embeddings to the logits is one part.
    ``evidence``: by traced point; of the logits (B, T', V') perhaps only the last position, and a padded vocabulary.
    ``tolerance``: the relative error that rounding explains, by point.
    """

    def __init__(
        self, model: Model, evidence: Evidence, tolerance: Mapping[str, float], progress: Progress = silent, at_once: bool = False
    ) -> None:
        self.model, self.layers, self.progress = model, model.config.n_layer, progress
        self.order, self.tolerance = points(self.layers), tolerance
        self.shown = {point: evidence[point] for point in self.order if point in evidence}
        self.shown["logits"] = self.shown["logits"][..., : model.config.vocab_size]
        self.ends = [point for point in self.shown if point in ("embed", "logits") or (not at_once and point != "ln_f")]
        self.whole = Part(model, "logits", None, self.shown, tolerance)

    @torch.no_grad()
    def explanation(self) -> Explanation:
        first_wrong = wrong = self.whole.first_wrong
        found, untried, last_right = [Fitting(Candidate(), 0.0)], tuple[str, ...](), None
        while wrong is not None:
            end = next(end for end in self.ends if self.order.index(end) >= self.order.index(wrong))
            last_right = next(iter(self.ends[: self.ends.index(end)][::-1]), None)
            part = self._part(end, last_right, found[0].candidate)
            search = PartSearch(part, self.progress, [one for fit in found for one, _ in fit.candidate.sites])
            reach, wider = self._together(found, [] if part.first_wrong is None else search.fits(), part)
            untried = search.untried
            if reach <= self.order.index(wrong):
                break
            found, wrong = wider, next(iter(self.order[reach:]), None)
        if wrong is None:
            last_right = self.ends[-1]
        some = [one for one in found if not one.candidate.is_right]
        described = self._described(some if wrong is None else some[:1])
        decisive, values = None, described[0][1] if described and wrong is None else {}
        if len(described) > 1:
            one, two = described[0][1], described[1][1]
            hidden = [point for point in self.order if point in one and point in two and point not in self.shown]
            decisive = max(hidden, key=lambda point: worst_relative_error(one[point], two[point]), default=None)
        hypotheses = tuple(one for one, _ in described)
        return Explanation(hypotheses, decisive, last_right, first_wrong, wrong, untried, values)

    def _part(self, end: str, before: str | None, known: Candidate) -> Part:
        """Return the part between two shown points, of a program with the faults that are known."""
        inside = self.order[0 if before is None else self.order.index(before) + 1 : self.order.index(end) + 1]
        entrance = None
        if before is not None:
            layer, stage = Place.of(before).layer, Place.of(before).part
            values = self.model.stages(known.program or Program(), 0, 0 if layer is None else layer + 1)
            if layer is None or not stage:  # the embeddings, or a block's result
                entrance = Entrance(0 if layer is None else layer + 1, {"x": values[before]})
            else:
                state = {node: values[point_at(layer, node)] for node in NODES[: ORDER[stage] + 1]}
                entrance = Entrance(layer, {"x": values[point_at(layer - 1, "") if layer else "embed"], **state}, ORDER[stage])
        shown = {point: self.shown[point] for point in inside if point in self.shown}
        return Part(self.model, end, entrance, shown, self.tolerance)

    def _together(self, bases: Sequence[Fitting], fits: Sequence[Fitting], part: Part) -> tuple[int, list[Fitting]]:
        """Return the faults of a part on top of those before it which explain most, the likeliest first.

        Before them, the number of the first point that they do not explain, of all points if they do.
        """
        options, some = dict[Candidate, tuple[int, Fitting]](), MOST[self.model.small]
        for base, fit in itertools.product(bases[:some], fits[:some]):
            outside = [site for site in fit.candidate.sites if site[1] is None]
            inside = dict.fromkeys(one for one, layer in fit.candidate.sites if layer is not None)
            everywhere = replace(fit.candidate, sites=(*((one, n) for one in inside for n in range(self.layers)), *outside))
            rounding = dict.fromkeys(part.shown, fit.error)  # what numbers that are rounded otherwise leave
            least = -1
            for one in (fit.candidate, everywhere) if inside and self.layers > 1 else (fit.candidate,):
                before, sites = base.candidate, tuple(dict.fromkeys((*base.candidate.sites, *one.sites)))
                whole = Candidate(sites, before.order or one.order, (*before.head, *one.head))
                if whole not in options and (whole.head or whole.program):
                    errors = self.whole.errors(self.whole.values(whole))
                    allowed = {point: max(self.whole.allowed(point), rounding.get(point, 0.0)) for point in errors}
                    wrong = (self.order.index(point) for point, error in errors.items() if not error <= allowed[point])
                    if (reach := next(wrong, len(self.order))) > least:  # in other blocks too, if more follows so
                        least, options[whole] = reach, (reach, Fitting(whole, max(errors.values())))
        most = max((reach for reach, _ in options.values()), default=-1)
        best = sorted((fit for reach, fit in options.values() if reach == most), key=lambda fit: fit.candidate.order_of_naming)
        price = best[0].candidate.price + FITTED if best else 0.0  # another fault that is not needed is none
        return most, [fit for fit in best if fit.candidate.price < price]

    def _described(self, fits: list[Fitting]) -> list[tuple[Hypothesis, State]]:
        """Return hypotheses with their values; those that are one function, or the same faults at the same places, are one."""
        out: list[tuple[Hypothesis, State]] = []
        for fit in fits:
            values, faults = self.whole.values(fit.candidate), fit.candidate.causes(self.layers)
            places, end = [(one.id, one.places) for one in faults], values[self.whole.end]
            for number, (one, other) in enumerate(out):
                alike = places == [(two.id, two.places) for two in one.faults]
                if alike or worst_relative_error(end, other[self.whole.end]) < SAME:
                    known = {two.detail for two in (*one.faults, *one.same)}
                    same = (*one.same, *(fault for fault in faults if fault.detail not in known))
                    out[number] = replace(one, same=same), other
                    break
            else:
                out.append((Hypothesis(faults, fit.error), values))
        return out
