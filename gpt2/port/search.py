"""Walk through the values that a program shows, block by block, and find which alternatives give its own numbers.

From the embeddings on, each node is computed from the program's numbers where these are found, by value. A block is explained
if its result is found, or what the next block makes of it. Where GPT-2's formulas do not explain a block, every alternative is
computed from the node that it changes; then those in texts that are read in calls. The one with which most is found is taken.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.checkpoint.keys import HEAD
from gpt2.measure.metrics import FLOAT64_BOUND, Progress, silent, worst_relative_error
from gpt2.measure.tracing import layer_of, point_at, points, trace
from gpt2.model import GPT2
from gpt2.port import graph
from gpt2.port.alternative import IN_PROMPT, IN_STEPS, Alternative, Schedule, in_calls, merged, scheduled
from gpt2.port.alternatives import table
from gpt2.port.alternatives.activations import SAME
from gpt2.port.alternatives.outside import SEQUENCE, sequence_faults, standing
from gpt2.port.alternatives.schedule import is_prompt, schedules, stepped
from gpt2.port.deadline import Deadline, TimeUp
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.places import OUTSIDE
from gpt2.port.diagnosis.report import LIKELY, SURE, Divergence
from gpt2.port.dump.candidates import Candidate, Site
from gpt2.port.dump.simulation import Simulation, stage_of
from gpt2.port.dump.tolerance import UNITS
from gpt2.port.fault import Fault
from gpt2.port.fits import ROUNDING, Fits
from gpt2.port.fits.ending import Ending
from gpt2.port.fits.lacking import dropped
from gpt2.port.fits.observed import Observed
from gpt2.port.fits.wiring import embedding_fit
from gpt2.port.graph import ATTENTION, HIDDEN, LAST, NODES, ORDER, READS, ROWS, Edits, Memory, State, run_block
from gpt2.port.observe import Observation, Seen
from gpt2.port.recording.pool import LOOSE, Pool

FIRST = ("ln_1", "attn.q", "attn.k", "attn.v")  # nodes that show a block's input
MOST_FAULTS = 4  # alternatives of one block
MOST_ARRAYS, MOST_TRIED = 3, 24  # that may be the value of a node, the likest first
LIKE = 0.5  # the least cosine of keys or values of a later block and GPT-2's
LAG = 2  # tokens behind the beginning of a call, until which a fault of later calls shows
TARGETS = 3  # nodes that are not found, the first ones
MIXED = (*NODES[ORDER["attn.weights"] :],)  # nodes that depend on how a text is read in calls
WHOLE = "attn.scores"  # a node whose program's numbers are not taken: what it hides is written in many ways


def _descendants() -> dict[str, frozenset[str]]:
    """Return the nodes that depend on each node."""
    out: dict[str, frozenset[str]] = {}
    for node in reversed(NODES):
        readers = [reader for reader in NODES if node in READS[reader]]
        out[node] = frozenset(readers).union(*(out[reader] for reader in readers))
    return out


BEHIND = _descendants()


@dataclass(frozen=True, eq=False)
class Trial:
    """A block as some alternatives compute it: its nodes, with the program's own numbers where they are ``seen``."""

    layer: int
    state: State
    seen: Mapping[str, Seen]
    alternatives: tuple[Alternative, ...] = ()
    edits: Edits = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()  # that were fitted
    again: int = 0  # whether the block's result is found, as another value's
    ties: tuple[Alternative, ...] = ()  # that explain as much as the only alternative

    @property
    def price(self) -> tuple[float, bool, int, bool]:
        """What says which of several explanations of a block is likelier, the least first."""
        return Candidate(tuple((one, self.layer) for one in self.alternatives), head=self.faults).order_of_naming


@dataclass(frozen=True)
class Walked:
    """What a walk found: the faults, whether they explain the logits, and the first place that is not GPT-2's.

    ``values``: the program's own numbers by traced point. ``lost``: the first point that is not explained, None if all are.
    ``timed_out``: the walk ended at its limit of time.
    """

    causes: tuple[PlacedCause, ...]
    explained: bool
    first: Divergence | None
    values: Mapping[str, Tensor]
    blocks: tuple[int, ...] = ()  # that run
    lost: str | None = None
    timed_out: bool = False

    def edge(self, layers: int) -> str:
        """Say which point is the last that was recognised, and which is the first that was not."""
        order = points(layers)
        known = [point for point in order[: order.index(self.lost)] if point in self.values] if self.lost in order else []
        last = f"{known[-1]} is the last stage that was recognised" if known else "no stage was recognised"
        return f"{last}; {self.lost} is the first that was not"


@torch.no_grad()
def search(
    pool: Pool,
    own: Mapping[str, Tensor],
    ids: Tensor,
    reference: GPT2,
    head: Tensor | None = None,
    progress: Progress = silent,
) -> Walked:
    """Walk through the tensors in ``pool``, which a program computed on ``ids`` (B, T), B and T at least 2.

    ``own``: the program's weights by the checkpoint's names. ``reference``: our model in float64. ``head`` (V, D): a head that is
    not the token embedding. At the pool's deadline the walk ends with what it has found.
    """
    weights = {name: tensor.detach().double() for name, tensor in own.items()}
    if not bool(weights["wpe.weight"].any()):  # no positions: it may add the checkpoint's, others, or none
        weights["wpe.weight"] = reference.wpe.weight.detach().double()
    if head is not None:
        weights[HEAD] = head.double()
    model = Simulation(weights, reference.config, ids)
    return Search(Observation(pool, model), model, trace(reference, ids), progress, of_module=True).run()


class Search:
    """A walk through an ``observation`` with the weights in ``model``; ``exact``: GPT-2's own values by traced point.

    ``of_module``: of a module, whose own weights these are, and which is given the whole text at once.
    """

    def __init__(
        self,
        observation: Observation,
        model: Simulation,
        exact: Mapping[str, Tensor],
        progress: Progress = silent,
        of_module: bool = False,
    ) -> None:
        self.observation, self.model, self.exact, self.progress = observation, model, exact, progress
        self.of_module = of_module
        self.widens = of_module and not observation.pool.narrow  # constants in float32 may be all that hides a fault
        self.layers = model.config.n_layer
        every = [one for one in table(model) if one.run is None and not one.crosses]
        every = [one for one in every if not (of_module and one.id == "not-loaded")]
        self.inner = [one for one in every if one.edits and not one.steps]
        self.in_steps = [one for one in every if one.edits and one.steps]
        self.embeddings = [one for one in every if "embed" in one.outside and not one.edits]
        self.ends = [one for one in every if one.outside and "embed" not in one.outside]
        self.states: list[State] = []
        self.fits = Fits(model, self.states, observation.check, self._later)
        self.ending = Ending(observation, model, self.fits.library, self.states)
        self.known: list[tuple[Alternative, ...]] = []  # of blocks so far, the last first
        self.sites: list[Site] = []
        self.ties: list[tuple[Alternative, ...]] = []  # by block: what explains it alike
        self.faults: list[Fault] = []  # of no alternative
        self.ran: list[int] = []
        self.evidence: dict[str, tuple[float, float]] = {}  # by label: the error of what is found, and of GPT-2's formula
        self.first: Divergence | None = None
        self.values: dict[str, Tensor] = {}
        self.computed: dict[str, Tensor] = {}  # whether found or not
        self.lost: str | None = None
        self.guessed = False  # the head is blamed, because all before it is right
        self.finished = False  # the logits follow from a stream before the last block

    def run(self) -> Walked:
        """Walk as far as the observed values are explained, or to the observation's limit of time."""
        explained = timed_out = False
        try:
            explained = self._walk()
        except TimeUp:
            timed_out = True
        lost = None if explained else self.lost or (point_at(len(self.ran), "") if len(self.ran) < self.layers else "logits")
        pool, limit = self.observation.pool, self.observation.pool.deadline
        pool.deadline = Deadline()  # what is left is soon done
        causes, first = tuple(self._causes(explained)), self._first(lost)
        pool.deadline = limit
        return Walked(causes, explained, first, self.values, tuple(self.ran), lost, timed_out)

    def _first(self, lost: str | None) -> Divergence | None:
        """Return the first point whose value is not GPT-2's."""
        if self.first is not None and self.first.point in ("wte", "wpe"):
            return self.first
        pool, narrow = self.observation.pool, self.observation.pool.narrow
        least = LOOSE if narrow and not pool.allowance else FLOAT64_BOUND
        for point in points(self.layers):
            if point == lost and lost != "logits":
                return Divergence(point, layer_of(point), self._departure(point))
            if point in self.computed and point in self.exact and self._found(_node(point), self.exact[point]) is None:
                value, right = self.computed[point], self.exact[point]
                error = worst_relative_error(value, right) if value.shape == right.shape else math.inf
                if error > max(pool.allowance.get(point, 0.0), least):
                    return Divergence(point, layer_of(point), error)
        return self.first

    def _departure(self, point: str) -> float:
        """Return how far the array that is most like GPT-2's value at a point is from it."""
        right = self.exact.get(point)
        seen = None if right is None else next(self.observation.unexplained(_node(point), right, ()), None)
        return math.inf if seen is None else worst_relative_error(seen.value, seen.right)

    def _walk(self) -> bool:
        x = self._embedded()
        while len(self.ran) <= 2 * self.layers:
            self.progress(f"following your values, in block {len(self.ran)}")
            if len(self.ran) >= self.layers and self._ended(x, known=False):
                return self.lost is None
            if (trial := self._next(x)) is None:
                return (self.finished or (len(self.ran) >= self.layers and self._ended(x))) and self.lost is None
            self._settle(trial)
            x = trial.state[""]
        return False

    # The embeddings

    def _embedded(self) -> Tensor:
        site = self.model.site(0)
        right = site.right("embed", {})
        seen = self._found("embed", right)
        own = right if seen is None else seen.own
        self.observation.take([] if seen is None else [seen])
        if self._shown_in(0, own):
            self.computed["embed"] = own
            return own
        best: tuple[tuple[object, ...], Alternative, Tensor, bool] | None = None
        for one in self._embedding_alternatives():
            self.observation.check()
            x = one.at(None)["embed"](site, {}).to(self.model.dtype)
            if x.shape != right.shape or torch.equal(x, right):
                continue
            found = self._found("embed", x, fault=True)
            theirs = x if found is None else found.own
            shown = self._shown_in(0, theirs)
            key = (not shown, found is None, Candidate(((one, None),)).order_of_naming)
            if (shown or (found is not None and seen is None)) and (best is None or key < best[0]):
                best = key, one, theirs, found is not None
        if best is None or best[0][0]:  # what is found may be something else's
            fitted = self._embedding_fitted(right)
            if fitted is not None or best is None or seen is not None:
                return own if fitted is None else fitted
        _, one, x, was_found = best
        if not was_found and not self._goes_on(self._block(0, x)) and self._explained(self._block(0, right)) is not None:
            return right  # one fault of the block, and not two
        self._blame(one, None, "embed", x, right)
        self.computed["embed"] = x
        return x

    def _embedding_fitted(self, right: Tensor) -> Tensor | None:
        """Return embeddings as what an array shows was computed; None if nothing fits that the first block shows."""
        wte, wpe = (self.model.state[f"{name}.weight"] for name in ("wte", "wpe"))
        for seen in itertools.islice(self.observation.unexplained("embed", right, ()), MOST_ARRAYS):
            self.observation.check()
            rows = seen.wrong_rows()
            fit = dropped(seen, rows, "embed") or embedding_fit(seen, self.model.ids, wte, wpe, rows)
            own = None if fit is None else self._found("embed", fit.value)
            x = right if fit is None else fit.value if own is None else own.own
            if fit is not None and self._shown_in(0, x):
                self.faults += fit.faults
                part = fit.faults[0].part if fit.faults else "embed"
                self._note(part if part in OUTSIDE else "embed", worst_relative_error(x, right))
                self.computed["embed"] = x
                return x
        return None

    def _embedding_alternatives(self) -> Iterator[Alternative]:
        """Yield other embeddings: at once, in calls, and from each token on."""
        tokens = self.model.ids.shape[1]
        yield from (one for one in self.embeddings if not one.steps)
        for how in schedules(self.model):
            for one in self.embeddings:
                if one.steps:
                    yield _in(one, how)
        for start in range(1, tokens):
            for one in (*self.embeddings, *standing(self.model)):
                if not (one.rare or one.steps):
                    calls = stepped(start, tokens) if one.sees else ((0, start), (start, tokens))
                    yield _in(one, Schedule(IN_STEPS.format(start), calls, "later"))

    # From block to block

    def _next(self, x: Tensor) -> Trial | None:
        """Return the block that runs next on the stream ``x``, as the program computes it; None if nothing known explains it."""
        expected = self.ran[-1] + 1 if self.ran else 0
        if expected < self.layers:
            base = self._block(expected, x)
            if self._goes_on(base):
                return base
            entered = any(node in base.seen for node in FIRST[1:])
        else:
            base, entered = None, False
        if not entered:
            for layer in range(self.layers):
                other = self._block(layer, x, ORDER["attn.v"]) if layer != expected else None
                if other is not None and sum(node in other.seen for node in FIRST[1:]) >= 2:
                    whole = self._block(layer, x)
                    return whole if self._goes_on(whole) else self._explained(whole)
            if self._ended(x, fitted=base is None):
                self.finished = True
                return None
            if base is not None and (stream := self._earlier(expected)) is not None:
                base = self._block(expected, stream)
                if self._goes_on(base):
                    return base
        trial = None if base is None else self._explained(base)
        if trial is None and not entered and (stream := self._changed_behind()) is not None:
            if base is None:
                self.finished = self._ended(stream)
            else:
                base = self._block(expected, stream)
                trial = base if self._goes_on(base) else self._explained(base)
        if base is None or trial is not None:
            return trial
        number = len(self.ran)
        self.values |= {point_at(number, node): seen.own for node, seen in base.seen.items()}
        nodes = [node for node in NODES if node not in (*HIDDEN, WHOLE)]
        lost = next(node for node in nodes if node not in base.seen and BEHIND[node].isdisjoint(base.seen))
        self.lost = self.lost or point_at(min(number, self.layers - 1), _traced(lost))
        return self._resumed(base)

    def _resumed(self, base: Trial) -> Trial | None:
        """Return a block that nothing explains with its result as an array that the next block confirms; None if none is."""
        if base.layer + 1 < self.layers:
            for seen in self.observation.unexplained("", base.state[""], base.seen.values()):
                self.observation.check()
                if self._shown_behind(base.layer, seen.value):
                    return replace(base, state={**base.state, "": seen.value})
        return None

    def _earlier(self, layer: int) -> Tensor | None:
        """Return an earlier stream that block ``layer`` takes, if its first nodes show it."""
        for number in reversed(range(len(self.states))):
            for node in ("mid", "x"):
                stream = self.states[number][node]
                if not self._shown_with(layer, stream, {}):
                    continue
                if node == "mid":
                    words = "a later block takes the stream behind attention: the feed-forward's result has no effect"
                    self.faults.append(Fault("residual-missing", "", words, layer=number))
                words = "a later block takes an earlier stream, so what this block gives has no effect"
                later = range(number if node == "x" else number + 1, layer)
                self.faults += [Fault("layer-missing", "", words, layer=one) for one in later]
                self._note(point_at(layer, "ln_1"), math.inf)
                return stream
        return None

    def _changed_behind(self) -> Tensor | None:
        """Return the last block's result as something changes it behind the recorded sum, if what follows shows it."""
        best: tuple[tuple[object, ...], Alternative, Tensor] | None = None
        for one in self.inner if self.ran else ():
            layer, state = self.ran[-1], self.states[-1]
            if set(edits := one.at(layer)) != {""}:
                continue
            self.observation.check()
            value = edits[""](self.model.site(layer, state), state)
            if not torch.equal(value, state[""]) and self._shown_behind(layer, value):
                key = Candidate(((one, layer),)).order_of_naming
                best = (key, one, value) if best is None or key < best[0] else best
        if best is None:
            return None
        _, one, value = best
        self._blame(one, self.ran[-1], "", value, self.states[-1][""])
        self.states[-1][""] = self.computed[point_at(len(self.ran) - 1, "")] = value
        return value

    def _settle(self, trial: Trial) -> None:
        """Take a block as a trial computes it."""
        number = len(self.ran)
        self.ran.append(trial.layer)
        self.states.append(trial.state)
        self.observation.take(trial.seen.values())
        self.values |= {point_at(number, node): seen.own for node, seen in trial.seen.items()}
        self.computed |= {point_at(number, node): x for node, x in trial.state.items() if node not in ("x", *HIDDEN)}
        self.computed[point_at(number, WHOLE)] = trial.state[WHOLE].tril()  # as our trace has them
        if trial.alternatives:
            self.known = [trial.alternatives, *(one for one in self.known if one != trial.alternatives)]
        right = run_block(self.model.site(trial.layer, trial.state), {"x": trial.state["x"]}, {}) if trial.alternatives else {}
        self.faults += trial.faults
        if trial.faults:
            self._note(point_at(number, trial.faults[0].part), math.inf)
        self.ties.append(trial.ties)
        for one in trial.alternatives:
            node = next(iter(one.edits))
            before = {n: trial.state[n] for n in ("x", *NODES[: ORDER[node]]) if n in trial.state}
            expected = graph.RIGHT[node](self.model.site(trial.layer, before), before) if node not in HIDDEN else right[node]
            self._blame(one, trial.layer, node, trial.state.get(node, expected), expected, trial.seen)

    def _blame(
        self,
        one: Alternative,
        layer: int | None,
        node: str,
        value: Tensor,
        right: Tensor,
        seen: Mapping[str, Seen] | None = None,
    ) -> None:
        self.sites.append((one, layer))
        missed = worst_relative_error(value, right) if value.shape == right.shape else math.inf
        shown = next((each.error for name, each in (seen or {}).items() if ORDER[name] >= ORDER[node]), 0.0)
        error, other = self.evidence.get(one.label, (0.0, 0.0))
        self.evidence[one.label] = max(error, shown), max(other, missed)
        part = next(iter(one.parts(None)), node)
        point = (part if part in OUTSIDE else node) if layer is None else point_at(len(self.ran) - 1, _traced(node))
        self._note(point, missed)

    def _note(self, point: str, error: float) -> None:
        if self.first is None:
            place = point.split(".")
            self.first = Divergence(point, int(place[1]) if place[0] == "h" else None, error)

    # In a block

    def _found(self, node: str, value: Tensor, fault: bool = False) -> Seen | None:
        return self.observation.find(node, value, fault)

    def _block(self, layer: int, x: Tensor, until: int = LAST) -> Trial:
        """Return GPT-2's own nodes of a block, with the program's numbers where they are found."""
        site, state, seen = self.model.site(layer, {"x": x}), {"x": x}, dict[str, Seen]()
        for node in NODES[: until + 1]:
            state[node] = site.right(node, state)
            self._look(node, state, seen)
        return Trial(layer, state, seen)

    def _look(self, node: str, state: State, seen: dict[str, Seen], fault: bool = False) -> None:
        """Find a node's value, and take the program's numbers for it."""
        value = state[node]
        if node in HIDDEN or any(
            one is value or (one.shape == value.shape and torch.equal(one, value)) for name, one in state.items() if name != node
        ):
            return  # it is found in any case
        found = self._found(node, value, fault)
        if found is None or any(one.own.shape == found.own.shape and torch.equal(one.own, found.own) for one in seen.values()):
            return  # another node's array shows nothing of this one
        seen[node] = found
        if node != WHOLE:
            state[node] = found.own

    def _goes_on(self, trial: Trial) -> bool:
        """Return whether a block is explained: its result is found, or what follows from it."""
        return "" in trial.seen or self._shown_behind(trial.layer, trial.state[""], trial.alternatives)

    def _shown_behind(self, layer: int, x: Tensor, own: Sequence[Alternative] = ()) -> bool:
        """Return whether what follows block ``layer`` shows its result ``x``, perhaps with faults of this block (``own``)."""
        following = layer + 1
        if following < self.layers:
            return self._shown_in(following, x, own)
        return self._gives(x, own)

    def _shown_in(self, layer: int, x: Tensor, own: Sequence[Alternative] = ()) -> bool:
        """Return whether the first nodes of a block are found as they follow from the stream ``x``."""
        return any(self._shown_with(layer, x, edits) for edits in self._as_elsewhere(layer, own))

    def _as_elsewhere(self, layer: int | None, own: Sequence[Alternative]) -> Iterator[Edits]:
        """Yield no edits, and those of this block's faults and of earlier blocks' in a block, or outside the blocks."""
        yield {}
        wanted = FIRST if layer is not None else ("ln_f",)
        for some in dict.fromkeys((tuple(own), *self.known)):
            every = (one.at(layer) for one in some if one.calls is None)
            edits = {node: formula for one in every for node, formula in one.items() if node in wanted}
            if edits:
                yield edits

    def _shown_with(self, layer: int, x: Tensor, edits: Edits) -> bool:
        site, state = self.model.site(layer, {"x": x}), {"x": x}
        for node in FIRST:
            state[node] = (edits.get(node) or site.rights[node])(site, state)
            if torch.equal(state[node], x):
                continue  # it is found in any case
            if self._found(node, state[node], fault=node in edits) is not None:
                return True
        return False

    def _explained(self, base: Trial) -> Trial | None:
        """Return a block with the alternatives that explain it, the likeliest; None if none do."""
        knowns = list(self._with_known(base))
        for trial in knowns:
            if self._goes_on(trial):
                return trial
        if any(fault.layer is not None for fault in self.faults):
            again = self._fitted(base)
            if again is not None and self._goes_on(again):
                return again
        for _ in range(MOST_FAULTS):
            whole, part = self._best(base, self.inner)
            if whole is None and not base.alternatives:  # one more fault may hide the known ones
                whole = next(filter(None, (self._best(trial, self.inner)[0] for trial in knowns)), None)
            whole = whole or self._widened(base) or self._both_hidden(base)
            if whole is None and not self.of_module:
                whole = self._in_calls(base)
            if whole is not None:
                return whole
            part = part or self._fitted(base)
            if part is None or self._goes_on(part):
                return part
            base = part
        return None

    def _with_known(self, base: Trial) -> Iterator[Trial]:
        """Yield a block with the faults of each earlier block, which may hide one another."""
        for known in self.known:
            trial: Trial | None = base
            for one in known:
                trial = None if trial is None else self._tried(trial, one, shown=False)
            if trial is not None:
                yield trial

    def _both_hidden(self, base: Trial) -> Trial | None:
        """Return a block with another factor of the scores and one more common fault of attention, which shows neither alone."""
        if base.alternatives or not set(FIRST[1:]) <= base.seen.keys() or not BEHIND["attn.scores"].isdisjoint(base.seen):
            return None
        common = [one for one in self.inner if not one.rare and set(one.edits) <= set(ATTENTION)]
        factors, others = ([one for one in common if (set(one.edits) == {WHOLE}) == of_scores] for of_scores in (True, False))
        trials = filter(None, (self._tried(base, one, shown=False) for one in factors))
        wholes = filter(None, (self._best(trial, others)[0] for trial in trials))
        return next((one for one in wholes if not one.seen.keys().isdisjoint(("attn.mixed", "attn.heads", "attn.c_proj"))), None)

    def _widened(self, base: Trial) -> Trial | None:
        """Return a block as explained to the precision of float32, in which a module may keep constants; None if it is not."""
        if not self.widens or base.alternatives or not any(node in base.seen for node in FIRST[1:]):
            return None
        self.widens, self.observation.pool.narrow = False, True
        base = self._block(base.layer, base.state["x"])
        trials = (trial for trial in (base, *self._with_known(base)) if self._goes_on(trial))
        whole = next(trials, None) or self._best(base, self.inner)[0]
        self.observation.pool.narrow = whole is not None
        return whole

    def _best(self, base: Trial, some: Iterable[Alternative]) -> tuple[Trial | None, Trial | None]:
        """Return the best trial that explains a block, and the best of those that explain more of it than ``base``."""
        wholes, parts = list[Trial](), list[Trial]()
        nodes = [node for node in NODES if node not in base.seen and BEHIND[node].isdisjoint(base.seen)]
        shown = ""  # the first node that an explanation shows: what does not change it is no better one
        for one in sorted(some, key=lambda one: not _changes(one, nodes[0] if nodes else "")):
            self.observation.check()
            if one in base.alternatives or self._is_refuted(base, one) or not _changes(one, shown):
                continue
            if (trial := self._tried(base, one)) is None:
                continue
            if self._goes_on(trial):
                wholes.append(trial)
                shown = min((*(trial.seen.keys() - base.seen.keys()), shown), key=ORDER.__getitem__)
            elif len(trial.seen) > len(base.seen):
                parts.append(trial)
        whole, part = (min(some, key=_likelihood, default=None) for some in (wholes, parts))
        if whole is not None and not base.alternatives:
            ties = tuple(one.alternatives[0] for one in wholes if _likelihood(one)[0] == _likelihood(whole)[0])
            whole = replace(whole, ties=ties)
        return whole, part

    def _is_refuted(self, base: Trial, one: Alternative) -> bool:
        """Return whether what follows from each node that an alternative changes is found as it is."""
        return all(not BEHIND[node].isdisjoint(base.seen) for node in one.edits)

    def _tried(self, base: Trial, one: Alternative, shown: bool = True) -> Trial | None:
        """Return ``base`` with one more alternative; None if it changes nothing, or nothing that it changes is ``shown``."""
        edits = one.at(base.layer)
        if not edits:
            return None
        if one.calls is not None:
            edits = in_calls(one.calls, edits)
        both = merged(base.edits, edits)
        if both is None:
            return None
        begin = min(ORDER[node] for node in edits)
        state = {node: value for node, value in base.state.items() if ORDER.get(node, -1) < begin}
        seen = {node: each for node, each in base.seen.items() if ORDER[node] < begin}
        site = self.model.site(base.layer, state)
        known = list(base.seen.values())
        changed, found, again = set[str](), False, 0
        for node in NODES[begin:]:
            if node not in both and changed.isdisjoint(READS[node]):
                state[node] = base.state[node]
                if node in base.seen:
                    seen[node] = base.seen[node]
                continue
            try:
                value = (both.get(node) or site.rights[node])(site, state)
            except RuntimeError:  # two alternatives that do not fit together, as of other numbers of heads
                return None
            old = base.state[node]
            if value.shape == old.shape and torch.equal(value, old):
                state[node] = old
                if node in base.seen:
                    seen[node] = base.seen[node]
                continue
            if not bool(value.isfinite().any()) or (node == "" and value.shape != old.shape):
                return None
            state[node] = value
            changed.add(node)
            same = next((one for one in known if one.own.shape == value.shape and torch.equal(value, one.own)), None)
            if same is not None:  # it is found in any case, and shows nothing of what follows
                if node == "":
                    again = 1
                else:
                    seen[node] = same
                continue
            self._look(node, state, seen, fault=node in edits)
            found |= node in seen
        if not changed:
            return None
        trial = Trial(base.layer, state, seen, (*base.alternatives, one), both, again=again)
        return trial if found or not shown or self._shown_behind(base.layer, state[""]) else None

    # In texts that are read in calls

    def _in_calls(self, base: Trial) -> Trial | None:
        """Return a block with an alternative in some calls that explains it; None if there is none."""
        targets = list(self._targets(base))
        found = (one for node, seen in targets for one in self._since(base, node, seen))
        for some in (found, self._by_call(base, [(node, seen) for node, seen in targets if node in MIXED])):
            tried = (self._tried(base, one) for one in some)
            trials = [trial for trial in tried if trial is not None and self._goes_on(trial)]
            if trials:
                return min(trials, key=_likelihood)
        return None

    def _targets(self, base: Trial, most: int = MOST_ARRAYS) -> Iterator[tuple[str, Observed]]:
        """Yield the first nodes that are not found with arrays that may be their values."""
        nodes = [node for node in NODES if node not in (*HIDDEN, WHOLE) and node not in base.seen]
        nodes = [node for node in nodes if BEHIND[node].isdisjoint(base.seen)]
        for node in nodes[:TARGETS]:
            arrays = self.observation.unexplained(node, base.state[node], base.seen.values())
            yield from ((node, seen) for seen in itertools.islice(arrays, most) if bool(seen.wrong_rows().any()))

    def _since(self, base: Trial, node: str, seen: Observed) -> Iterator[Alternative]:
        """Yield the alternatives that are ``seen`` at the wrong tokens alone: from one on, or up to one."""
        wrong = seen.wrong_rows().any(0)
        tokens, (first, *_, last) = len(wrong), [*wrong.nonzero().flatten().tolist()] * 2
        ways = [Schedule(IN_STEPS.format(first), stepped(first, tokens), "later")] if first else []
        if 1 < last + 1 < tokens:
            ways.append(Schedule(IN_PROMPT.format(last + 1), stepped(last + 1, tokens), "first"))
        for one in self.inner if ways else ():
            self.observation.check()
            edits = one.at(base.layer)
            if not edits or min(ORDER[name] for name in edits) > ORDER[node] or one.sees == ROWS or self._is_refuted(base, one):
                continue
            begin = min(ORDER[name] for name in edits)
            state = {name: value for name, value in base.state.items() if ORDER.get(name, -1) < begin}
            try:
                value = run_block(self.model.site(base.layer, state), state, edits, begin - 1, ORDER[node])[node]
            except RuntimeError:  # it does not fit to what is there
                continue
            if value.shape != seen.value.shape or not bool(value.isfinite().any()):
                continue
            agrees = _by_token(seen.agrees(value))
            for how in ways:
                inside = slice(how.calls[0][1], None) if how.which == "later" else slice(0, how.calls[0][1])
                if bool(agrees[:, inside].all()):
                    yield _in(one, how)

    def _by_call(self, base: Trial, targets: Sequence[tuple[str, Observed]]) -> Iterator[Alternative]:
        """Yield the alternatives that give one of ``targets`` in a text that is read in calls.

        What a call computes does not depend on later ones, so an alternative is left at the first call whose tokens it misses.
        """
        mixing = [one for one in self.inner if not set(one.edits).isdisjoint(ATTENTION) and one.sees != ROWS]
        mixing = [one for one in (*mixing, *self.in_steps) if one.at(base.layer) and not self._is_refuted(base, one)]
        wrong = [seen.wrong_rows().any(0).nonzero().flatten().tolist() for _, seen in targets]
        firsts: dict[int, list[Alternative]] = {}  # those that give the first call, by its length
        for how in schedules(self.model) if targets else ():
            end, second = how.calls[0][1], how.calls[min(1, len(how.calls) - 1)][1]
            if end not in firsts:
                alone = replace(how, calls=how.calls[:1])
                firsts[end] = [one for one in mixing if not one.steps and self._gives_all(base, targets, one, alone)]
            later = any(end <= some[0] < second + LAG for some in wrong)
            some = [one for one in mixing if one.steps and (later or one.at_once)]
            tried = [(one, "all") for one in (*firsts[end], *some)]
            if is_prompt(how) and end > 1:
                tried += [(one, "first") for one in firsts[end] if any(each[-1] < end <= each[-1] + LAG for each in wrong)]
                if any(end <= each[0] < end + LAG for each in wrong):
                    tried += [(one, "later") for one in mixing if not one.steps]
            for one, which in tried:
                seen_in = replace(how, which=which)
                if self._gives_all(base, targets, one, seen_in):
                    yield scheduled(one, seen_in)

    def _gives_all(self, base: Trial, targets: Sequence[tuple[str, Observed]], one: Alternative, how: Schedule) -> bool:
        """Return whether an alternative in calls gives one of ``targets``, call by call."""
        self.observation.check()
        memory: Memory = {}
        before = ORDER["attn.qh"] if set(one.edits) <= set(NODES[ORDER["attn.qh"] :]) else 0
        until = max(ORDER[node] for node, _ in targets)
        edits, alive = one.at(base.layer), list(targets)
        for begin, end in how.calls:
            site = graph.Site(self.model, base.layer, begin, end, memory)
            state = {name: base.state[name][:, begin:end] for name in ("x", *NODES[:before])}
            changes = how.which == "all" or (begin == 0) == (how.which == "first")
            try:
                state = run_block(site, state, edits if changes else {}, before - 1, until)
            except RuntimeError:  # it does not fit to what is there
                return False
            alive = [(node, seen) for node, seen in alive if seen.at(begin, end).matches(_widened(state[node], node, seen))]
            if not alive:
                return False
        return True

    # Free numbers

    def _fitted(self, base: Trial) -> Trial | None:
        """Return ``base`` with one more node as what its array shows was computed; None if nothing fits."""
        first: Trial | None = None
        for node, seen in self._likeliest(base):
            self.observation.check()
            try:
                fit = self.fits.fit(base.layer, node, base.state, seen)
            except RuntimeError:  # of a block with another number of heads
                fit = None
            if fit is None:
                continue
            given = Alternative("", "", {node: partial(_given, fit.value)})
            if (trial := self._tried(base, given)) is not None:
                faults = tuple(self._as_before(replace(fault, layer=base.layer)) for fault in fit.faults)
                trial = replace(trial, alternatives=base.alternatives, faults=(*base.faults, *faults))
                if self._goes_on(trial):
                    return trial
                first = first or trial
        return first

    def _later(self, layer: int) -> State | None:
        """Return the arrays that are most like GPT-2's keys and values in a later block, and their rounding."""
        state: State = {}
        for node in ("attn.k", "attn.v"):
            right = self.exact[point_at(layer, node)]
            right = right if right.ndim == 3 else graph.merge(right)
            if (seen := self._found(node, right)) is not None:
                state[node] = seen.own
            elif (some := next(self.observation.unexplained(node, right, ()), None)) is not None and _alike(some):
                state[node], unit = some.value, UNITS[self.observation.pool.dtypes[some.number]][0]
                state[ROUNDING] = torch.tensor(max(unit, float(state.get(ROUNDING, 0.0))))
            else:
                return None
        return state

    def _likeliest(self, base: Trial) -> Iterator[tuple[str, Observed]]:
        """Yield the targets that what follows confirms, or the likest of a node that has none such."""
        for node, some in itertools.groupby(self._targets(base, MOST_TRIED), key=lambda target: target[0]):
            arrays = [seen for _, seen in some]
            sure = [seen for seen in arrays if self._is_confirmed(base, node, seen)]
            yield from ((node, seen) for seen in sure or arrays[:MOST_ARRAYS])

    def _is_confirmed(self, base: Trial, node: str, seen: Observed) -> bool:
        """Return whether what follows is found as an array gives it, if it is the value of a node."""
        self.observation.check()
        trial = self._tried(base, Alternative("", "", {node: partial(_given, seen.value)}))
        if trial is None:
            return False
        shown = trial.seen.keys() - base.seen.keys()
        return not BEHIND[node].isdisjoint(shown) or self._goes_on(replace(trial, alternatives=base.alternatives))

    def _as_before(self, fault: Fault) -> Fault:
        """Return a fault in the words of one that an earlier block has, if they differ in a fitted number alone."""
        alike = (one for one in self.faults if (one.id, one.part) == (fault.id, fault.part))
        same = (one for one in alike if _plain(one.detail) == _plain(fault.detail))
        return replace(fault, detail=next((one.detail for one in same), fault.detail))

    # To the logits

    def _gives(self, x: Tensor, own: Sequence[Alternative] = ()) -> bool:
        """Return whether the logits follow from the last stream."""
        site, state = self.model.site(0, {"x": x}), {"x": x}
        for edits in self._as_elsewhere(None, own):
            normed = edits["ln_f"](site, state) if edits else self.model.norm("ln_f", x)
            if self._found("ln_f", normed, bool(edits)) is not None or self.observation.are_logits(normed, self.model.table):
                return True
        return False

    def _ended(self, x: Tensor, known: bool = True, fitted: bool = True) -> bool:
        """Return whether the logits follow from the last stream, by a ``known`` other norm or head, or by a ``fitted`` one."""
        site, state = self.model.site(0, {"x": x}), {"x": x}
        right = self.model.norm("ln_f", x)
        seen = self._found("ln_f", right)
        normed = right if seen is None else seen.own
        if seen is not None:
            self.values["ln_f"] = normed
        if self.observation.are_logits(normed, self.model.table) or self.observation.are_logits(right, self.model.table):
            return True
        if not known:
            return False
        earlier = [one for some in self.known for one in some if one.outside]
        best: tuple[tuple[object, ...], Alternative, Tensor] | None = None
        for one in (*earlier, *self.ends):
            self.observation.check()
            value = one.outside["ln_f"](site, state) if "ln_f" in one.outside else normed
            if value.shape != right.shape:
                continue
            found = self._found("ln_f", value, fault=True) if "ln_f" in one.outside else None
            head = one.outside["head"](site, state) if "head" in one.outside else self.model.table
            if self.observation.are_logits(value if found is None else found.own, head):
                key = (one not in earlier, found is None, Candidate(((one, None),)).order_of_naming)
                if best is None or key < best[0]:
                    best = key, one, value
        if best is not None:
            _, one, value = best
            self._blame(one, None, "ln_f" if "ln_f" in one.outside else "logits", value, right)
            return True
        if not fitted:
            return False
        if (ended := self.ending.read(x)) is None:
            asked = self.ending.logits.shape[:2] == x.shape[:2] and bool(self.ending.logits.isfinite().all())
            if seen is None or self.sites or self.faults or not asked:
                return False
            self.guessed = True
            self.faults.append(Fault("untied-head", "logits", "the head has weights other than wte's"))
            self._note("logits", math.inf)
            return True
        self.faults += ended.fit.faults
        missed = worst_relative_error(ended.fit.value, ended.right)
        self._note(ended.stage, missed or self.observation.logits_error(normed, self.model.table))
        return True

    # What was found

    def _causes(self, explained: bool) -> Iterator[PlacedCause]:
        sequence = sequence_faults(self.ran, self.layers, self.of_module) if explained else []
        whole = Candidate(tuple(self._widest()), head=(*self.faults, *sequence))
        for found in whole.found(self.layers):
            labels = [one.label for one, _ in self.sites if found.id in (one.id, *(id for id, _ in one.also))]
            labels = labels or [one.label for one, _ in self.sites]
            error, missed = map(max, zip(*(self.evidence[label] for label in labels), strict=True)) if labels else (0.0, 0.0)
            evidence = "computed so from your own values, it is what you have there"
            evidence += f", to {error:.0e}" if error else ""
            evidence += f"; GPT-2's formula is off by {missed:.0e}" if math.isfinite(missed) and missed else ""
            evidence += "; with all causes here, the walk ends at your own logits" if explained else ""
            if self.guessed and found.id == "untied-head":
                evidence = "what enters the head is right, and no known formula of the head gives your logits"
            if found.id in SEQUENCE:
                evidence = "your run holds each block's projections, with the weights of these blocks and in this order"
            fix = found.fix
            config = self.model.config
            if found.id == "layernorm-eps":
                fix = f"nn.LayerNorm(n_embd, eps={config.layer_norm_epsilon:g})"
            elif found.id == "gelu-variant" and SAME.get(config.activation_function, config.activation_function) != "gelu_new":
                fix = f"the checkpoint's activation is {config.activation_function}"
            yield PlacedCause(
                found.id, found.places, found.detail, evidence, SURE if explained and not self.guessed else LIKELY, fix
            )

    def _widest(self) -> Iterator[Site]:
        """Yield the sites; of several alternatives that explain a block alike, that which explains most blocks."""
        blocks = Counter(one for some in self.ties for one in some)
        for one, layer in self.sites:
            alike = self.ties[self.ran.index(layer)] if layer is not None else ()
            yield max((one, *alike), key=lambda other: blocks[other]) if one in alike else one, layer


def _changes(one: Alternative, node: str) -> bool:
    """Return whether an alternative changes a node; any does the last one."""
    return any(node == changed or node in BEHIND[changed] for changed in one.edits)


def _likelihood(trial: Trial) -> tuple[object, ...]:
    """Return what says which of several trials of a block is likelier, the least first."""
    return -len(trial.seen) - trial.again, trial.price


def _in(one: Alternative, how: Schedule) -> Alternative:
    """Return an alternative in calls, whose formulas give a whole text at once."""
    made = scheduled(one, how)
    outside = in_calls(how.calls, made.outside) if made.outside else made.outside
    return replace(made, outside=outside)


def _given(value: Tensor, c: graph.Site, s: State) -> Tensor:
    return value


def _plain(words: str) -> str:
    return re.sub(r"[0-9][0-9.e+-]*", "", words)


def _alike(seen: Observed) -> bool:
    return float(torch.cosine_similarity(seen.value.flatten(), seen.right.flatten(), 0)) >= LIKE


def _widened(value: Tensor, node: str, seen: Observed) -> Tensor:
    """Return weights (B, H, t, S) for as many keys as are ``seen``, zero for those of later calls."""
    return F.pad(value, (0, max(0, seen.value.shape[-1] - value.shape[-1]))) if node == "attn.weights" else value


def _by_token(agrees: Tensor) -> Tensor:
    """Return (B, T): whether all entries of a token agree, of (B, T, D) or (B, H, T, ...)."""
    return agrees.all(-1) if agrees.ndim == 3 else agrees.all(-1).all(1)


def _node(point: str) -> str:
    """Return the node of a traced point."""
    stage = stage_of(point)
    return point if stage is None else stage


def _traced(node: str) -> str:
    """Return the traced point of a block that shows a node first."""
    heads = {"attn.qh": "attn.q", "attn.kh": "attn.k", "attn.vh": "attn.v", "attn.ks": "attn.scores"}
    return {**heads, "attn.vs": "attn.heads", "attn.mixed": "attn.heads"}.get(node, node)
