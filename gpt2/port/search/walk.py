"""Walk through the values that a program shows, block by block, and find which alternatives give its own numbers.

From the embeddings on, each node is computed from the program's numbers where these are found, by value. A block is explained
if its result is found, or what the next block makes of it. Where GPT-2's formulas do not explain a block, every alternative is
computed from the node that it changes; then those in texts that are read in calls. The one with which most is found is taken.
`blocks.py` computes and finds the nodes of a block, `explainer.py` explains one; here is what runs when, from ids to logits.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.checkpoint.keys import HEAD
from gpt2.errors import misfit
from gpt2.measure.metrics import FLOAT64_BOUND, Progress, silent, worst_relative_error
from gpt2.measure.tracing import OUTSIDE, point_at, points, trace
from gpt2.model import GPT2
from gpt2.port.alternatives.alternative import Alternative, schedules
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.fits.nodes import embedding_fit
from gpt2.port.fits.observed import dropped
from gpt2.port.graph import HIDDEN, NODES, ORDER, Model, Program
from gpt2.port.recording.pool import LOOSE, Pool
from gpt2.port.search.blamed import Blamed, traced
from gpt2.port.search.blocks import FIRST, WHOLE, Blocks, Trial
from gpt2.port.search.ending import LastPart
from gpt2.port.search.explainer import MOST_TRIED, Explainer
from gpt2.port.search.matching import Faults
from gpt2.port.search.observe import Observation
from gpt2.port.search.part import Part
from gpt2.port.terms.budget import Budget, Spent
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import Place
from gpt2.port.terms.report import Divergence
from gpt2.port.terms.tolerance import measured


@dataclass(frozen=True)
class Walked:
    """What a walk found: the faults, whether they explain the logits, and the first place that is not GPT-2's.

    ``rounded``: faults within float32's rounding, as of a constant. ``values``: the program's own numbers by traced point.
    ``lost``: the first point that is not explained, None if all are. ``ended``: what was not tried, where the budget was
    spent, in words. ``foretold``: the program's logits (B, T, V) of other ids, as the walk explains it; None if that is unknown.
    """

    causes: tuple[Cause, ...]
    explained: bool
    first: Divergence | None
    values: Mapping[str, Tensor]
    blocks: tuple[int, ...] = ()  # that run
    lost: str | None = None
    ended: str = ""
    rounded: tuple[Cause, ...] = ()
    foretold: Callable[[Tensor], Tensor | None] = lambda ids: None

    def edge(self, layers: int) -> str:
        """Say which point is the last that was recognised, and which is the first that was not."""
        order = points(layers)
        known = [point for point in order[: order.index(self.lost)] if point in self.values] if self.lost in order else []
        last = f"{known[-1]} is the last stage that was recognised" if known else "no stage was recognised"
        return f"{last}; {self.lost} is the first that was not"


@torch.no_grad()
def search(
    pool: Pool, own: Mapping[str, Tensor], reference: GPT2, right: Model, head: Tensor | None = None, progress: Progress = silent
) -> Walked:
    """Walk through the tensors in ``pool``, which a program computed on the ids of ``right``: B and T at least 2.

    ``own``: the program's weights by the checkpoint's names. ``reference``: our model in float64; ``right``: of its weights.
    ``head`` (V, D): a head that is not the token embedding. Where the pool's budget is spent the walk ends with what it found.
    """
    weights = {name: tensor.detach().double() for name, tensor in own.items()}
    if not bool(weights["wpe.weight"].any()):  # no positions: it may add the checkpoint's, others, or none
        weights["wpe.weight"] = right.state["wpe.weight"]
    if head is not None:
        weights[HEAD] = head.double()
    model = Model(weights, right.config, right.ids, budget=pool.budget)
    exact = right.always("exact", lambda: trace(reference, right.ids))
    rounding = right.always("rounding", lambda: measured(reference, right.ids, exact, torch.float32))
    return Search(pool, Blamed(model, exact, right, rounding), progress).run()


class Search:
    """A walk through ``pool``, with the weights and GPT-2's own values that ``blamed`` has, in which it notes what is wrong."""

    def __init__(self, pool: Pool, blamed: Blamed, progress: Progress = silent) -> None:
        self.blamed, self.model, self.exact, self.rounding = blamed, blamed.model, blamed.exact, blamed.rounding
        self.progress, self.ran, self.layers = progress, blamed.ran, self.model.config.n_layer
        self.observation = Observation(pool, self.model)
        self.blocks = Blocks(self.observation, self.model)
        self.explainer = Explainer(self.blocks, blamed.right is not None)
        self.ending = LastPart(self.blocks, self.blamed)
        self.values: dict[str, Tensor] = {}
        self.computed: dict[str, Tensor] = {}  # whether found or not
        self.lost: str | None = None
        self.last: Trial | None = None  # the block that is settled
        self.finished = False  # the logits follow from a stream before the last block

    def run(self) -> Walked:
        """Walk as far as the observed values are explained, or until the budget is spent."""
        explained, ended, pool = False, "", self.observation.pool
        try:
            explained = self._walk()
        except Spent:
            blocks = ([] if self.computed else ["other embeddings"]) + [f"the blocks from h.{len(self.ran)} on"]
            untried = [*(blocks if len(self.ran) < self.layers else []), "the last norm and the head"]
            ended, reached = pool.budget.ended(untried), self.explainer.reached
            if self.explainer.of_module and reached and reached.alternatives and reached.layer not in self.ran:
                self._settle(reached)
        lost = None if explained else self.lost or (point_at(len(self.ran), "") if len(self.ran) < self.layers else "logits")
        limit, pool.budget = pool.budget, Budget()  # what is left is soon done
        both = list(self.blamed.causes(explained))
        causes, rounded = (tuple(cause for cause, is_rounded in both if is_rounded == kind) for kind in (False, True))
        first = self._first(lost)
        pool.budget = limit
        values, foretold = self.values | self.ending.normed, self._foretold if explained else Walked.foretold
        return Walked(causes, explained, first, values, tuple(self.ran), lost, ended, rounded, foretold)

    def _foretold(self, ids: Tensor) -> Tensor | None:
        order = None if self.ran == list(range(self.layers)) else tuple(self.ran)
        program, model = Candidate(tuple(self.blamed.sites), order).program or Program(), self.model.on_ids(ids)
        model.budget, made = Budget(), torch.empty(0)
        with misfit():  # of another length, if it is read in calls
            made = made if self.blamed.faults else model.trace(program, every=False)["logits"]
        return made if made.shape[:2] == ids.shape else None

    def _first(self, lost: str | None) -> Divergence | None:
        """Return the first point whose value is not GPT-2's; before the first fault, by more than rounding to float32."""
        if self.blamed.first is not None and self.blamed.first.point in ("wte", "wpe", "embed"):
            return self.blamed.first
        pool, narrow = self.observation.pool, self.observation.pool.narrow
        least = LOOSE if narrow and not pool.allowance else FLOAT64_BOUND
        tolerance = self.rounding or pool.tolerance
        for point in points(self.layers):
            if self.blamed.first is not None and point == self.blamed.first.point:
                tolerance = pool.tolerance
            place, right = Place.of(point).part, self.exact.get(point)
            if point == lost and lost != "logits":  # of the array that is most like GPT-2's value
                seen = None if right is None else next(self.observation.unexplained(place, right, ()), None)
                return Divergence(point, math.inf if seen is None else worst_relative_error(seen.value, seen.right))
            if point in self.computed and right is not None and self.observation.find(place, right) is None:
                value = self.computed[point]
                error = worst_relative_error(value, right) if value.shape == right.shape else math.inf
                if error > least and error > (tolerance.points.get(point, 0.0) if tolerance else 0.0):
                    return Divergence(point, error)
        return self.blamed.first

    def _walk(self) -> bool:
        """Go from the embeddings to the logits; return whether all is explained."""
        x = self.computed["embed"] = self._embedded()
        while len(self.ran) <= 2 * self.layers:
            self.progress(f"following your values, in block {len(self.ran)}")
            if len(self.ran) >= self.layers and self.ending.explained(x, known=False):
                return self.lost is None
            if (trial := self._next(x)) is None:
                return self.finished and self.lost is None
            self._settle(trial)
            x = trial.state[""]
        return False

    # The embeddings

    def _embedded(self) -> Tensor:
        """Return the stream that enters the first block: GPT-2's, else of the known others the likeliest, else a fitted one.

        Of a dump, which may not show it, what the first block's norm and projections show counts; a module shows it in any case.
        """
        site = self.model.site(0)
        right = site.right("embed", {})
        seen = self.observation.find("embed", right)
        own = right if seen is None else seen.own
        self.observation.take([] if seen is None else [seen])
        if self.blocks.shown_behind(-1, own):
            return own
        options = list[tuple[tuple[object, ...], Alternative, Tensor]]()
        for candidate in self._other_embeddings(right):
            self.model.budget.check()
            x = self.model.embed(candidate.program)
            if x.shape != right.shape or torch.equal(x, right):
                continue
            found = self.observation.find("embed", x, fault=True)
            if found is None and self.explainer.of_module:  # which shows all that it computes
                continue
            x = x if found is None else found.own
            shown = self.blocks.shown_behind(-1, x)
            if not shown and self.explainer.of_module and torch.equal(x, site.words) and not self._enters(x):
                continue  # the tokens alone are there as well
            latest = max(found.entries, default=0) if found and self.explainer.of_module else 0
            if shown or (found is not None and seen is None):
                options.append(((not shown, found is None, -latest, candidate.order_of_naming), candidate.sites[0][0], x))
        best = min(options, key=lambda option: option[0], default=None)
        if best is None or best[0][0]:  # what is found may be something else's
            if self._enters(own):
                return own
            fitted = self._embedding_fitted(right)
            if fitted is not None or best is None or seen is not None:
                return own if fitted is None else fitted
        (_, is_new, *_), one, x = best
        follows = not is_new or self.blocks.goes_on(self.blocks.block(0, x))
        if not follows and self.explainer.explained(self.blocks.block(0, right)) is not None:
            return right  # one fault of the block, and not two
        self.blamed.alternative(one, None, "embed", {"embed": (x, right)}, {})
        return x

    def _embedding_fitted(self, right: Tensor) -> Tensor | None:
        """Return embeddings as what an array shows was computed; None if nothing fits that the first block shows."""
        wte, wpe = (self.model.state[f"{name}.weight"] for name in ("wte", "wpe"))
        for seen in itertools.islice(self.observation.unexplained("embed", right, ()), MOST_TRIED):
            self.model.budget.check()
            rows = seen.wrong_rows()
            fit = dropped(seen, rows, "embed") or embedding_fit(seen, self.model.ids, wte, wpe, rows)
            own = None if fit is None else self.observation.find("embed", fit.value)
            x = right if fit is None else fit.value if own is None else own.own
            if fit is not None and (self.blocks.shown_behind(-1, x) or self._enters(x)):
                part = fit.faults[0].place.part
                self.blamed.fitted(fit.faults, part if part in OUTSIDE else "embed", {"embed": (x, right)})
                return x
        return None

    def _enters(self, x: Tensor) -> bool:
        """Return whether ``x`` is read, with some fault: by the first block's first nodes, or behind blocks that do not run."""
        if not self.explainer.of_module:  # a dump shows few of its values
            return False
        if self.observation.are_logits(x, self.model.table) or self.ending.explained(x, known=False):
            return True
        base, first = self.blocks.block(0, x), set(FIRST)
        some = (one for one in self.explainer.inner if not first.isdisjoint(one.edits))
        trials = (self.blocks.tried(base, one) for one in self.blocks.screened(base, some, FIRST[-1]))
        return any(trial is not None and not first.isdisjoint(trial.seen) for trial in trials)

    def _other_embeddings(self, right: Tensor) -> Iterator[Candidate]:
        """Yield other embeddings: at once, in calls, and from each token on."""
        faults, tokens = Faults(Part(self.model, "embed", None, {"embed": right}, {})), self.model.ids.shape[1]
        later = [one for one in faults.steps if "embed" in one.outside]
        in_calls = (faults.everywhere(one, how) for how in schedules(self.model) for one in later)
        since = (one for start in range(1, tokens) for one in faults.since(start))
        every = itertools.chain(faults.singles(), in_calls, since)
        yield from (one for one in every if one.sites and one.program is not None)

    # From block to block

    def _next(self, x: Tensor) -> Trial | None:
        """Return the block that runs next on the stream ``x``, as the program computes it; None if nothing known explains it.

        In this order: the next block as GPT-2 has it; where its first nodes are not found, another block, or the end; the faults
        of an earlier block; the block before with its result changed; any other fault. Else it goes on behind, from an array.
        """
        expected = self.ran[-1] + 1 if self.ran else 0
        base = self.blocks.block(expected, x) if expected < self.layers else None
        if base is not None and self.blocks.goes_on(base):
            return base
        entered = base is not None and not base.seen.keys().isdisjoint(FIRST[1:])
        if not entered:  # another block may run, or none
            for layer in range(self.layers):
                other = self.blocks.block(layer, x) if layer != expected else None
                if other is not None and sum(node in other.seen for node in FIRST[1:]) >= 2:
                    right = other if self.blocks.goes_on(other) else None
                    return right or self.explainer.as_before(other) or self.explainer.explained(other)
            self.finished = self.ending.explained(x, fitted=base is None or len(self.ran) >= self.layers)
        if self.finished:
            return None
        trial, before = None, self.lost
        if base is not None:
            self.lost, trial = before or self._missing(base), self.explainer.as_before(base)  # where the budget may end
        if trial is None and not entered and self.last and (trial := self.explainer.changed_behind(self.last)):
            for each in (self.ran, self.blamed.ties):  # it is settled anew
                each.pop()
            self.blamed.forget(self.last.alternatives, self.last.faults)
        elif trial is None and base is not None:
            trial = self.explainer.explained(base)
        if base is None or trial is not None:
            self.lost = before
            return trial
        if self.explainer.of_module:  # its numbers fit by no chance
            base = self.explainer.reached or base
        self.values |= {point_at(len(self.ran), node): seen.own for node, seen in base.seen.items()}
        self.lost = before or self._missing(base)
        resumed = self._resumed(base)
        if resumed is None and base.alternatives:
            self._settle(base)  # what explains a part of a block; the walk ends there
        return resumed

    def _missing(self, base: Trial) -> str:
        """Return the first traced point of a block that is not found."""
        node = next((node for node in self.blocks.missing(base) if node not in (*HIDDEN, WHOLE)), "")
        return point_at(min(len(self.ran), self.layers - 1), traced(node))

    def _resumed(self, base: Trial) -> Trial | None:
        """Return a block that nothing explains with its result as an array that the next block confirms; None if none is."""
        if base.layer + 1 < self.layers:
            for seen in self.observation.unexplained("", base.state[""], base.seen.values()):
                self.model.budget.check()
                if self.blocks.shown_behind(base.layer, seen.value, base.alternatives):
                    self.observation.used |= self.observation.pool.again(seen.number)
                    self.explainer.resumed = True
                    return replace(base, state={**base.state, "": seen.value})
        return None

    def _settle(self, trial: Trial) -> None:
        """Take a block as a trial computes it."""
        number, self.last = len(self.ran), trial
        self.observation.pool.in_order.cache_clear()  # of arrays that are known now: of all blocks they take gigabytes
        self.ran.append(trial.layer)
        self.observation.take(trial.seen.values())
        self.values |= {point_at(number, node): seen.own for node, seen in trial.seen.items()}
        self.computed |= {point_at(number, node): x for node, x in trial.state.items() if node not in ("x", *HIDDEN)}
        self.computed[point_at(number, WHOLE)] = trial.state[WHOLE].tril()  # as our trace has them
        if trial.alternatives:
            self.blocks.known = [trial.alternatives, *(one for one in self.blocks.known if one != trial.alternatives)]

        def expected(node: str) -> Tensor:
            before = {n: trial.state[n] for n in ("x", *NODES[: ORDER[node]]) if n in trial.state}
            return self.model.site(trial.layer, before).right(node, before)

        if trial.faults:
            known = {node for one in trial.alternatives for node in one.edits}
            fits = {node: (trial.state[node], expected(node)) for node in trial.edits if node not in (*known, *HIDDEN)}
            self.blamed.fitted(trial.faults, point_at(number, traced(next(iter(fits), trial.faults[0].place.part))), fits)
        self.blamed.ties.append(trial.ties)
        for one in trial.alternatives:
            values = {node: (trial.state[node], expected(node)) for node in one.edits if node in trial.state}
            self.blamed.alternative(one, trial.layer, next(iter(one.edits)), values, trial.seen)
