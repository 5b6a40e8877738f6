"""Explain a program's numbers by faults: which known ones, switched on in our own forward pass, give the same numbers.

A program may show one tensor a block, or only its logits. Between two streams that it shows, every known fault is tried; the
search goes on behind an explained part with our own values, and ends where nothing explains a part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.measure.metrics import Progress, silent, worst_relative_error
from gpt2.measure.tracing import layer_of, point_at, points
from gpt2.port.alternatives.candidates import FITTED, Candidate
from gpt2.port.dump.known import scopes
from gpt2.port.dump.matching import PartSearch
from gpt2.port.dump.part import Fitting, Part
from gpt2.port.graph import NODES, ORDER, Entrance, Model, Program, State, stage_of
from gpt2.port.terms.budget import Budget
from gpt2.port.terms.causes import Cause

SAME = 1e-9  # programs whose values differ by less are one function
ENDS, STREAMS = ("embed", "logits"), ("", "mid")  # points, and stages of a block, behind which a search begins anew
MAX_OFFERED = 8  # explanations that are reported
MOST = {True: 6, False: 2}  # explanations of a part that are tried in other blocks, by whether the model is small


@dataclass(frozen=True)
class Hypothesis:
    """Faults that together explain a program; ``error`` is the largest relative error of its values at the points that it shows.

    ``same``: faults that are the same function on this model and these ids, so that nothing can tell them apart.
    """

    faults: tuple[Cause, ...]
    error: float
    same: tuple[Cause, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What explains a program's values.

    ``right``: GPT-2 itself does. ``hypotheses``: every set of faults that does, the simplest first; faults of what lies before,
    if a point is ``unexplained``: the first one that no fault gives. None, if each part is explained and no faults explain all
    together. ``decisive``: the traced point that would tell the first two apart. ``last_right``: the last shown point that is
    explained, None if there is none; ``first_wrong``: the first one that is not GPT-2's. ``untried``: the kinds of faults
    of which not all were tried before the budget was spent.
    """

    right: bool
    hypotheses: tuple[Hypothesis, ...]
    decisive: str | None
    last_right: str | None
    first_wrong: str | None
    unexplained: str | None
    untried: tuple[str, ...]
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

    It follows the shown points from one stream to the next, and widens the faults that explain a part to other blocks.

    Args:
        evidence: by traced point, float64, as :func:`gpt2.measure.tracing.trace` has them; of the logits (B, T', V') perhaps only
            the last position, and a padded vocabulary.
        tolerance: the relative error that rounding explains, by point.
        budget: of the search.
        stages: of a block, such as "attn.c_proj": where they are shown, the search begins anew behind them.
    """

    def __init__(
        self,
        model: Model,
        evidence: Mapping[str, Tensor],
        tolerance: Mapping[str, float],
        budget: Budget,
        progress: Progress = silent,
        stages: Collection[str] = STREAMS,
    ) -> None:
        self.model, self.layers = model, model.config.n_layer
        self.budget, self.progress = budget, progress
        self.order, self.tolerance = points(self.layers), tolerance
        self.shown = {point: evidence[point] for point in self.order if point in evidence}
        if "logits" in self.shown:
            self.shown["logits"] = self.shown["logits"][..., : model.config.vocab_size]
        self.ends = [point for point in self.shown if point in ENDS or stage_of(point) in stages]
        if "logits" not in self.ends and "ln_f" in self.shown:
            self.ends.append("ln_f")
        self.whole = Part(model, [*self.shown][-1], None, self.shown, tolerance)

    @torch.no_grad()
    def explanation(self) -> Explanation:
        first_wrong = wrong = self.whole.first_wrong
        found, untried, last_right = [Fitting(Candidate(), 0.0)], tuple[str, ...](), None
        while wrong is not None:
            end = next((end for end in self.ends if self.order.index(end) >= self.order.index(wrong)), self.ends[-1])
            before = self.ends[: self.ends.index(end)]
            last_right = before[-1] if before else None
            part = self._part(end, last_right, found[0].candidate)
            search = PartSearch(part, self.budget, self.progress)
            fits = [] if part.first_wrong is None else search.fits()
            untried = search.untried
            reach, wider = self._widened(found, fits, part) if fits else (-1, [])
            if reach <= self.order.index(wrong):
                break
            found, wrong = wider, next(iter(self.order[reach:]), None)
        if wrong is None:
            last_right = self.ends[-1]
        some = [one for one in found if not one.candidate.is_right]
        described = self._described(some if wrong is None else some[:1])
        decisive = self._decisive(*(values for _, values in described[:2])) if len(described) > 1 else None
        values = described[0][1] if described and wrong is None else {}
        hypotheses = tuple(one for one, _ in described)
        return Explanation(first_wrong is None, hypotheses, decisive, last_right, first_wrong, wrong, untried, values)

    def _part(self, end: str, before: str | None, known: Candidate) -> Part:
        """Return the part between two shown points, of a program with the faults that are known."""
        inside = self.order[0 if before is None else self.order.index(before) + 1 : self.order.index(end) + 1]
        entrance = None
        if before is not None:
            layer, stage = layer_of(before), stage_of(before)
            values = self.model.stages(known.program or Program(), 0, self.layers)
            if layer is None or not stage:  # the embeddings, or a block's result
                entrance = Entrance(0 if layer is None else layer + 1, {"x": values[before]})
            else:
                state = {node: values[point_at(layer, node)] for node in NODES[: ORDER[stage] + 1]}
                entrance = Entrance(layer, {"x": values[point_at(layer - 1, "") if layer else "embed"], **state}, ORDER[stage])
        shown = {point: self.shown[point] for point in inside if point in self.shown}
        return Part(self.model, end, entrance, shown, self.tolerance)

    def _widened(self, bases: Sequence[Fitting], fits: Sequence[Fitting], part: Part) -> tuple[int, list[Fitting]]:
        """Return the faults of a part on top of those before it, the likeliest first: in other blocks too, if more follows so.

        Before them, the number of the first point that they do not explain, of all points if they do.
        """
        options = dict[object, tuple[int, Fitting]]()
        some = MOST[self.model.small]
        for base, fit in itertools.product(bases[:some], fits[:some]):
            rounding = dict.fromkeys(part.shown, fit.error)  # what numbers that are rounded otherwise leave
            narrow = self._reached(base.candidate.with_(fit.candidate), rounding)
            options.setdefault(narrow[1].candidate.key, narrow)
            for one in self._elsewhere(fit.candidate, part):
                wide = self._reached(base.candidate.with_(one), rounding)
                if wide[0] > narrow[0]:
                    options.setdefault(wide[1].candidate.key, wide)
        most = max(reach for reach, _ in options.values())
        best = sorted((fit for reach, fit in options.values() if reach == most), key=lambda fit: fit.candidate.order_of_naming)
        price = best[0].candidate.price + FITTED  # another fault that is not needed is none
        return most, [fit for fit in best if fit.candidate.price < price][:MAX_OFFERED]

    def _reached(self, candidate: Candidate, rounding: Mapping[str, float]) -> tuple[int, Fitting]:
        """Return the number of the first shown point that faults do not explain, of all points if they do; and their fit."""
        whole = replace(candidate, sites=tuple(dict.fromkeys(candidate.sites)))
        if not whole.head and whole.program is None:
            return -1, Fitting(whole, math.inf)
        errors = self.whole.errors(self.whole.values(whole))
        allowed = {point: max(self.whole.allowed(point), rounding.get(point, 0.0)) for point in errors}
        wrong = (self.order.index(point) for point, error in errors.items() if not error <= allowed[point])
        return next(wrong, len(self.order)), Fitting(whole, max(errors.values()))

    def _elsewhere(self, candidate: Candidate, part: Part) -> Iterator[Candidate]:
        """Yield the faults of a part of the blocks in all of them, and in some."""
        inside = list(dict.fromkeys(one for one, layer in candidate.sites if layer is not None))
        if part.all_blocks or not inside or self.layers == 1:
            return
        outside = tuple(site for site in candidate.sites if site[1] is None)
        ends = tuple((one, None) for one in inside if one.outside and (one, None) not in outside)
        for some in (range(self.layers), *scopes(self.layers)):
            sites = (*((one, n) for n in some for one in inside), *outside)
            yield replace(candidate, sites=sites)
            if ends:
                yield replace(candidate, sites=(*sites, *ends))

    def _described(self, fits: list[Fitting]) -> list[tuple[Hypothesis, State]]:
        """Return hypotheses with their values; those that are one function, or the same faults at the same places, are one."""
        out: list[tuple[Hypothesis, State]] = []
        last = "logits" if self.whole.is_last else self.whole.end
        for fit in fits:
            values, faults = self.whole.values(fit.candidate), fit.candidate.causes(self.layers)
            places = [(one.id, one.places) for one in faults]
            for number, (one, known) in enumerate(out):
                if [(two.id, two.places) for two in one.faults] == places or worst_relative_error(
                    values[last], known[last]
                ) < SAME:
                    new = tuple(
                        fault for fault in faults if fault.detail not in {other.detail for other in (*one.faults, *one.same)}
                    )
                    out[number] = replace(one, same=(*one.same, *new)), known
                    break
            else:
                out.append((Hypothesis(faults, fit.error), values))
        return out

    def _decisive(self, one: State, other: State) -> str | None:
        """Return the traced point at which two programs differ most."""
        hidden = [point for point in self.order if point in one and point in other and point not in self.shown]
        apart = {point: worst_relative_error(one[point], other[point]) for point in hidden}
        return max(apart, key=lambda point: apart[point]) if apart and max(apart.values()) > 0 else None
