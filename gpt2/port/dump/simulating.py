"""Simulate what a dump does not record: which known faults, switched on in our own forward pass, give its arrays and logits.

A program may show one tensor a block, or only its logits. Right values are recognised by value; streams that are wrong are put in
order by what each block would make of the one before it. Between two streams, every known fault is tried; the search goes on
behind an explained part with our own values, and ends where nothing explains a part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gpt2.measure.metrics import Progress, silent, worst_relative_error
from gpt2.measure.tracing import layer_of, point_at, points
from gpt2.port.alternatives.candidates import FITTED, Candidate
from gpt2.port.dump.arrays import recognised
from gpt2.port.dump.dumped import THIRDS, Dumped
from gpt2.port.graph import NODES, ORDER, Entrance, Model, Program, State, run_block, stage_of
from gpt2.port.search.matching import PartSearch, scopes
from gpt2.port.search.observe import Observation
from gpt2.port.search.part import Fitting, Part
from gpt2.port.terms.budget import Budget
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import Place
from gpt2.port.terms.tolerance import stored

SAME = 1e-9  # programs whose values differ by less are one function
ENDS, STREAMS = ("embed", "logits"), ("", "mid")  # points, and stages of a block, behind which a search begins anew
MAX_OFFERED = 8  # explanations that are reported
MOST = {True: 6, False: 2}  # explanations of a part that are tried in other blocks, by whether the model is small
MAX_PLACEMENTS = 3  # places in a block that unknown arrays are tried at
EXCHANGED = ("attn.q", "attn.k", "attn.v", "attn.heads")  # points whose right numbers may be used as others
RECORDED: tuple[tuple[str, ...], ...] = (  # one tensor a block, or two
    *((stage,) for stage in ("", "mid", "mlp.c_proj", "attn.c_proj", "ln_1", "ln_2", "attn.heads")),
    ("mid", ""),
    ("attn.c_proj", "mlp.c_proj"),
    ("ln_1", "ln_2"),
)
LEAST_LIKENESS = 0.1  # of a stream and what the right block makes of the one before it, as a cosine
BY_CHANCE = 4.0  # standard deviations of such a cosine for an array that has nothing to do with the model


Evidence = dict[str, Tensor]  # a program's values by traced point


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

    ``hypotheses``: every set of faults that does, the simplest first; faults of what lies before, if a point is ``unexplained``:
    the first one that no fault gives. None, if each part is explained and no faults explain all together. ``decisive``: the
    traced point that would tell the first two apart. ``last_right``: the last shown point that is explained, None if there is
    none; ``first_wrong``: the first one that is not GPT-2's. ``untried``: the kinds of faults of which not all were tried before
    the budget was spent. ``values``: of the first hypothesis, by traced point, if it explains everything.
    """

    hypotheses: tuple[Hypothesis, ...]
    decisive: str | None
    last_right: str | None
    first_wrong: str | None
    unexplained: str | None
    untried: tuple[str, ...]
    values: Mapping[str, Tensor]

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
    ``evidence``: by traced point; of the logits (B, T', V') perhaps only the last position, and a padded vocabulary.
    ``tolerance``: the relative error that rounding explains, by point. ``stages``: of a block, such as "attn.c_proj": where they
    are shown, the search begins anew behind them.
    """

    def __init__(
        self,
        model: Model,
        evidence: Evidence,
        tolerance: Mapping[str, float],
        progress: Progress = silent,
        stages: Collection[str] = STREAMS,
    ) -> None:
        self.model, self.layers, self.progress = model, model.config.n_layer, progress
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
            last_right = next(iter(self.ends[: self.ends.index(end)][::-1]), None)
            part = self._part(end, last_right, found[0].candidate)
            search = PartSearch(part, self.progress)
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


@dataclass(frozen=True)
class Placement:
    """Arrays of a dump at traced points; ``stages``: the stages of a block that these points are, "" for its result."""

    stages: tuple[str, ...] = ()
    values: Mapping[str, Tensor] = field(default_factory=dict)
    likeness: float = 0.0


class Simulating:
    """A search for faults that give what ``dumped`` holds, until the budget is spent."""

    def __init__(self, dumped: Dumped, budget: Budget, progress: Progress) -> None:
        self.dumped, self.budget, self.progress = dumped, budget, progress
        self.model = Model(dumped.reference.state_dict(), dumped.config, dumped.ids, budget=budget)

    def explanation(self, known: Mapping[str, Tensor]) -> tuple[Explanation, Evidence]:
        """Return what explains the dump best, with its arrays at one place of a block or another, and this evidence.

        ``known``: recorded values by traced point, as a walk found them.
        """
        exact = self.dumped.exact
        right = self._without_thirds({point: exact[point] for point in self.dumped.held if point not in ("wte", "wpe")})
        walked = self._without_thirds(right | dict(known))
        nowhere = Placement()  # without a place for the other arrays: the logits decide
        bases = [(right, one) for one in self._placements(right)[:MAX_PLACEMENTS]]
        if walked.keys() != right.keys():  # what a walk found, which is perhaps not so
            bases = [(walked, nowhere)]
        bases.append((right, nowhere))
        roles = {point: value for point, value in right.items() if Place.of(point).part not in EXCHANGED}
        if roles.keys() != right.keys():
            bases.append((roles, nowhere))  # right numbers that the program perhaps uses as others
        ways: list[tuple[Evidence, Placement, Collection[str]]] = []
        if len(bases) > 1:  # one fault of all, not one in each part, comes first
            ways += [(base, one, {*STREAMS, *one.stages} if one.stages else ()) for base, one in bases]
        several = len(ways)
        ways += [(base, one, STREAMS) for base, one in (bases[0], *([(right, nowhere)] if bases[0][0] is not right else []))]
        done: list[tuple[Placement, Evidence, Explanation]] = []
        explained: list[tuple[Placement, Evidence, Explanation]] = []
        for number, (base, placed, stages) in enumerate(ways):
            if done and (self.budget.spent or (explained and number >= several)):
                break
            evidence = {**base, **placed.values, "logits": self.dumped.output.logits.double()}
            explainer = DumpExplainer(self.model, evidence, self._allowed(evidence), self.progress, stages)
            done.append((placed, evidence, explainer.explanation()))
            explained = [one for one in done if one[2].explains]
            if explained and explained[-1][2].faults == 1:
                break
        placed, evidence, found = min(explained or done[several:][:1] or done[-1:], key=lambda one: one[2].faults)
        if not placed.stages and found.explains:  # arrays that are values of a program with these faults
            values = {point: value for point, value in found.values.items() if point in exact}
            seen = {point: values[point] for point in recognised(self.dumped.pool, values, self.dumped.config)}
            parts, allowed = {Place.of(point).part for point in seen}, self._allowed(values)
            shown = (point for point in self.dumped.order if Place.of(point).part in parts and point in values)
            wrong = (one for one in shown if worst_relative_error(values[one], exact[one]) > allowed[one])
            return replace(found, first_wrong=next(wrong, found.first_wrong)), evidence | seen
        return found, evidence

    def _without_thirds(self, values: Evidence) -> Evidence:
        """Return the values without q, k and v that show as thirds of c_attn's result alone: heads may be cut otherwise."""
        names = {point: self.dumped.held.get(point, ()) for point in values}
        thirds = {point for point, some in names.items() if some and all(name.endswith(THIRDS) for name in some)}
        return {point: value for point, value in values.items() if point not in thirds}

    def _allowed(self, evidence: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the allowed errors with the rounding of storage."""
        points, coarsest = self.dumped.tolerance.points, self.dumped.coarsest
        most = max(points.values())
        return points | {point: points.get(point, most) + stored(value, coarsest) for point, value in evidence.items()}

    def _placements(self, held: Collection[str]) -> list[Placement]:
        """Return what unknown arrays of a stream's size may be, the likeliest first: results of blocks, of norms, of branches."""
        pool, known = self.dumped.pool, {name for names in self.dumped.held.values() for name in names}
        used = {number for number, name in enumerate(pool.names) if name in known}
        if self.dumped.is_walkable:  # a block's result, written again as the next one's input, is no other value
            used = set[int]().union(*map(pool.again, used))
        found = [self._placed(stages, held, used) for stages in RECORDED] if self.dumped.arrays else []
        return sorted((one for one in found if one.values), key=lambda one: -one.likeness)

    def _placed(self, stages: tuple[str, ...], held: Collection[str], used: set[int]) -> Placement:
        """Return arrays at these stages, each as that which is most like what a block makes of the arrays before it.

        So where one block alone is wrong, everything else is exact. ``held``: points whose right value is recorded.
        """
        observation, values, likeness, x = Observation(self.dumped.pool, self.model), Evidence(), 0.0, self.model.embed()
        observation.used = set(used)
        layers, order = self.model.config.n_layer, self.dumped.order
        least = max(LEAST_LIKENESS, BY_CHANCE / x.numel() ** 0.5)
        behind = max((order.index(one) for one in held if one == "ln_f" or stage_of(one) in STREAMS), default=-1)
        for layer in range(layers):
            state, after = {"x": x}, -1
            for stage in (*stages, "") if stages[-1] else stages:
                state = run_block(self.model.site(layer, state), state, {}, after, ORDER[stage])
                point, after = point_at(layer, stage), ORDER[stage]
                if stage not in stages or (point not in held and order.index(point) < behind):
                    continue  # what a right stream was made of is right
                likest = None if point in held else next(observation.unexplained(stage, state[stage], ()), None)
                if likest is not None and likest.likeness >= least:
                    observation.used.add(likest.number)
                    state[stage] = values[point] = likest.value
                    likeness += likest.likeness
                likeness += point in held
            x = state[""]
        streams = sum(entry.numel() == x.numel() for number, entry in enumerate(self.dumped.pool.entries) if number not in used)
        recorded = sum(stage_of(point) in {one for some in RECORDED for one in some} for point in held) + streams
        return Placement(stages, values, likeness / max(len(stages) * layers, recorded))
