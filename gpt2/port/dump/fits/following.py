"""Follow a program's recorded values operator by operator; where one is not GPT-2's, fit what it computed from its inputs.

Nothing but values is compared. A stage that is not recorded is right if a later one that it enters is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import Progress, worst_relative_error
from gpt2.measure.tracing import point_at
from gpt2.port.alternatives import loading, precision, table
from gpt2.port.deadline import TimeUp
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.places import Place, collapsed, forward_rank
from gpt2.port.diagnosis.report import LIKELY, SURE, Divergence
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.fits.ending import Ending
from gpt2.port.dump.fits.library import Library
from gpt2.port.dump.fits.observed import Fit, Observed
from gpt2.port.dump.fits.operators import Operators
from gpt2.port.dump.fits.partial import dropped
from gpt2.port.dump.fits.placing import placed
from gpt2.port.dump.fits.recorded import Arrays
from gpt2.port.dump.fits.wiring import embedding_fit
from gpt2.port.dump.pool import DumpPool
from gpt2.port.dump.simulation import LINEAR, NEEDS, STAGES, Simulation, State
from gpt2.port.dump.tolerance import UNITS

MOST_FAULTS = 10  # of one block
MOST_TRIED = 12  # arrays that may be a stage's value and that nothing confirms, the likest first
LIKELIEST = 2  # that are tried before any is confirmed
FOLLOWED = 4  # stages that are computed from such an array, to confirm it
QKV = ("attn.q", "attn.k", "attn.v")
BEHIND = ("ln_1", *QKV)  # stages of the next block that show its input
ONE_DECISION = ("reduced-precision", "dropout-active")  # of a program's author, that shows in many places


@dataclass(frozen=True)
class Followed:
    """What following found: the causes, whether they explain the logits, and the first stage that is not GPT-2's."""

    causes: tuple[PlacedCause, ...]
    explained: bool
    first: Divergence | None


class Following:
    """Follows the arrays of ``pool`` on ``ids`` (B, T) with the checkpoint ``state``, in float64."""

    def __init__(self, pool: DumpPool, state: Mapping[str, Tensor], config: GPT2Config, ids: Tensor, progress: Progress) -> None:
        self.pool, self.config, self.ids, self.progress = pool, config, ids, progress
        self.simulation = Simulation(state, config, ids)
        self.library = Library(self.simulation.state, config)
        self.library.in_time = lambda: pool.deadline.check()
        self.arrays = Arrays(pool, self.simulation)
        self.operators = Operators(self.simulation, self.library, self.arrays)
        self.earlier = self.operators.earlier
        self.ending = Ending(self.simulation, self.library, self.arrays, self.earlier)
        self.faults: list[Fault] = []
        self.guessed: set[tuple[int | None, str]] = set()  # places whose value is the dump's, and nothing else gives it
        self.first: Divergence | None = None
        self.is_first_row_embedded = False  # right, and another row of the batch is not

    def run(self) -> Followed:
        explained = False
        with suppress(TimeUp), self.pool.kept():
            explained = self._follow()
        return Followed(tuple(self._causes(explained)), explained, self.first)

    def _follow(self) -> bool:
        """Return whether the logits are explained."""
        self.arrays.set_aside()
        x = self._embedded()
        for layer in range(self.config.n_layer):
            self.progress(f"fitting what your block {layer} computes")
            state = self._block(layer, self._entered(layer, x))
            if state is None:
                return False
            self.earlier.append(state)
            x = state[""]
        return self._ended(x)

    def _embedded(self) -> Tensor:
        """Return the embeddings as the program computes them."""
        right = self.simulation.embed()
        if (own := self.arrays.recorded("embed", right)) is not None:
            return own
        wte, wpe = (self.simulation.state[f"{name}.weight"] for name in ("wte", "wpe"))
        for seen in itertools.islice(self.arrays.observed("embed", right), MOST_TRIED):
            self.library.in_time()
            rows = seen.wrong_rows()
            fit = dropped(seen, rows, "embed") or embedding_fit(seen, self.ids, wte, wpe, rows)
            if fit is not None:
                self.is_first_row_embedded = not bool(rows[0].any())
                return self._kept(None, "embed", seen, fit)
        if (fit := placed(self.arrays, self.simulation, self.ids, right, self.library.in_time)) is None:
            return right
        self._departs(None, "embed", fit.value, right)
        self.faults += fit.faults
        return fit.value

    def _entered(self, layer: int, x: Tensor) -> Tensor:
        """Return the stream that block ``layer`` takes: ``x``, or an earlier one, if the block's first stages show it."""
        if layer == 0 or self._shown_in(layer, x):
            return x
        for n, stage in itertools.product(reversed(range(layer)), ("mid", "x")):
            if not self._shown_in(layer, self.earlier[n][stage]):
                continue
            self._departs(layer, "ln_1", self.earlier[n][stage], x)
            if stage == "mid":
                words = "a later block takes the stream behind attention: the feed-forward's result has no effect"
                self.faults.append(Fault("residual-missing", "", words, layer=n))
            words = "a later block takes an earlier stream, so what this block gives has no effect"
            later = range(n if stage == "x" else n + 1, layer)
            self.faults += [Fault("layer-missing", "", words, layer=one) for one in later]
            return self.earlier[n][stage]
        return x

    def _shown_in(self, layer: int, x: Tensor) -> bool:
        """Return whether the first stages of block ``layer`` are recorded as they follow from the stream ``x``."""
        state: State = {"x": x}
        for stage in BEHIND:
            state[stage] = self.simulation.stages_of(layer)[stage](state)
        return any(self.arrays.shows(stage, state[stage]) for stage in BEHIND)

    def _kept(self, layer: int | None, stage: str, seen: Observed, fit: Fit) -> Tensor:
        """Note a fit's faults, and return its value with the program's own digits."""
        self.arrays.used.add(seen.number)
        self._departs(layer, stage, fit.value, seen.right)
        faults = [replace(fault, layer=layer) for fault in fit.faults]
        if any(fault.id == "qkv-order" for fault in faults) and stage == "attn.weights":  # each array was taken for another
            biases = [one for one in self.faults if one.layer == layer and one.part in QKV and one.leaf == "bias"]
            self.faults = [one for one in self.faults if one not in biases]
            faults = [replace(one, detail=f"{one.detail}; the biases stay") if biases else one for one in faults]
        self.faults += faults
        exact = seen.number >= 0 and UNITS[self.pool.dtypes[seen.number]][0] < 1e-4
        return seen.value.contiguous() if exact else fit.value

    def _departs(self, layer: int | None, stage: str, made: Tensor, right: Tensor) -> None:
        """Note the point where a value is not GPT-2's, if none before it is known."""
        point, order = stage if layer is None else point_at(layer, stage), self.config.n_layer
        if self.first is None or forward_rank(Place.of(point), order) < forward_rank(Place.of(self.first.point), order):
            self.first = Divergence(point, layer, worst_relative_error(made, right))

    def _ended(self, x: Tensor) -> bool:
        """Return whether the logits follow from the last stream, perhaps by a last norm or a head that is fitted."""
        if (found := self.ending.read(x)) is None:
            return False
        if found.seen is not None:
            self._kept(None, found.stage, found.seen, found.fit)
        elif found.fit.faults:
            self._departs(found.layer, found.stage, found.fit.value, found.right)
            self.faults += found.fit.faults
        return True

    # Inside a block

    def _block(self, layer: int, x: Tensor) -> State | None:
        """Return the block's stages as the program computes them; None if some stage is not explained."""
        fixed: dict[str, Tensor] = {}
        for _ in range(MOST_FAULTS):
            state, known = self._stages(layer, x, fixed)
            waiting = [stage for stage in STAGES if stage not in known and stage not in ("attn.scores",)]
            if "" in known or not waiting or self._shown_behind(layer, state):
                return state
            ways = itertools.product((self._fitted, self._skipped, self._unknown, self._hidden), waiting)
            found = ((stage, look(layer, stage, state, known)) for look, stage in ways)
            stage, value = next(((stage, value) for stage, value in found if value is not None), ("", None))
            if value is None:
                return None
            fixed[stage] = value
        return None

    def _stages(self, layer: int, x: Tensor, fixed: Mapping[str, Tensor]) -> tuple[State, set[str]]:
        """Return the stages of a block, and those that are known: recorded or fitted, or what enters such a one."""
        state: State = {"x": x}
        known: set[str] = set()
        for stage, formula in self.simulation.stages_of(layer).items():
            value = fixed[stage] if stage in fixed else formula(state)
            own = None if stage in fixed or stage == "attn.scores" else self.arrays.recorded(stage, value)
            state[stage] = value if own is None else own
            if stage in fixed or own is not None:
                known |= {stage, *_ancestors(stage)}
        return state, known

    def _shown_behind(self, layer: int, state: State) -> bool:
        """Return whether the block's result is right, as the next block or the logits show."""
        if layer + 1 == self.config.n_layer:
            normed = self.simulation.norm("ln_f", state[""])
            return self.arrays.shows("ln_f", normed) or self.ending.gives(normed)
        return self._shown_in(layer + 1, state[""])

    def _fitted(self, layer: int, stage: str, state: State, known: set[str]) -> Tensor | None:
        """Return a stage's value as the program computes it, from arrays that no known operator gave; None if nothing fits."""
        every = list(self._candidates(stage, state))
        likely, rest = every[:LIKELIEST], every[LIKELIEST:]
        sure = (seen for seen in rest if self._confirmed(layer, stage, state, seen.value, seen.number))
        for seen in itertools.chain(likely, sure, rest[:MOST_TRIED]):
            rows = seen.wrong_rows()
            fit = self.operators.fit(layer, stage, state, seen, rows) if bool(rows.any()) else None
            if fit is None or (stage in LINEAR and self._is_input(layer, stage, state, seen)):
                continue
            return self._kept(layer, stage, seen, fit)
        return None

    def _is_input(self, layer: int, stage: str, state: State, seen: Observed) -> bool:
        """Return whether an array holds a layer's input again, in another layout, and not the layer's result."""
        source = state[NEEDS[stage][0]]
        same = source.shape == seen.value.shape and bool(replace(seen, right=source).agrees(source).all())
        return same and not self._confirmed(layer, stage, state, seen.value, seen.number)

    def _skipped(self, layer: int, stage: str, state: State, known: set[str]) -> Tensor | None:
        """Return the stream without a branch whose result is not added, if what follows is recorded so."""
        if stage not in ("mid", ""):
            return None
        value, branch = (state["x"], "attention") if stage == "mid" else (state["mid"], "the feed-forward")
        after = {**state, stage: value}
        if not (self._confirmed(layer, stage, state, value) if stage == "mid" else self._shown_behind(layer, after)):
            return None
        self._departs(layer, stage, value, state[stage])
        self.faults.append(Fault("residual-missing", stage, f"the result of {branch} is not added to the stream", layer=layer))
        return value

    def _sure(self, layer: int, stage: str, state: State) -> list[Observed]:
        """Return the arrays that are a stage's value, because what follows is recorded as they give it."""
        return [seen for seen in self._candidates(stage, state) if self._confirmed(layer, stage, state, seen.value, seen.number)]

    def _unknown(self, layer: int, stage: str, state: State, known: set[str]) -> Tensor | None:
        """Return the value of a linear layer with a known input, whose weights are not the checkpoint's in any known way."""
        for seen in self._sure(layer, stage, state)[:1] if stage in LINEAR and known.issuperset(NEEDS[stage]) else ():
            linear = self.operators.linear(layer, stage, state)
            if (fit := linear.unknown(seen, state[NEEDS[stage][0]], seen.wrong_rows())) is not None:
                self.guessed.add((layer, fit.faults[0].part))
                return self._kept(layer, stage, seen, fit)
        return None

    def _hidden(self, layer: int, stage: str, state: State, known: set[str]) -> Tensor | None:
        """Return the value of a linear layer that is not recorded, with weights from which what follows is as recorded."""
        if stage not in LINEAR or not known.union({"x"}).issuperset(NEEDS[stage]) or self._sure(layer, stage, state):
            return None
        for faults, rounding, value in self._readings(layer, stage, state):
            self.library.in_time()
            if self._confirmed(layer, stage, state, value):
                self.library.rounding = rounding or self.library.rounding
                self._departs(layer, stage, value, state[stage])
                self.faults += faults
                return value
        return None

    def _readings(self, layer: int, stage: str, state: State) -> Iterator[tuple[tuple[Fault, ...], str, Tensor]]:
        """Yield what a linear layer gives with each weight and bias that a program may read by mistake, and the faults.

        Also how the weight is rounded, "" if it is not; first as others are that were found.
        """
        linear, x = self.operators.linear(layer, stage, state), state[NEEDS[stage][0]]

        def read(id: str, words: str, make: Callable[[], Tensor]) -> tuple[tuple[Fault, ...], str, Tensor]:
            fault = Fault(id, linear.where, f"the weight {words}", layer=layer)
            return (fault,), words if id == "reduced-precision" else "", x @ make() + linear.bias

        rounded = (
            read("reduced-precision", f"holds the checkpoint's values {words}", make) for words, make in linear.roundings()
        )
        yield from itertools.islice(rounded, 1 if self.library.rounding else 0)
        for one in table(self.simulation, loading, precision):
            if (wrong := one.at(layer).get(stage)) is not None:
                yield one.faults(layer), "", wrong(self.simulation.site(layer, state), state)
        yield from (read("wrong-tensor", words, make) for words, make in linear.elsewhere(layer))
        yield from rounded

    def _confirmed(self, layer: int, stage: str, state: State, value: Tensor, number: int | None = None) -> bool:
        """Return whether a stage has this value, because the right formulas of what follows give recorded arrays from it.

        ``number``: of the array that it is, -1 for a difference of arrays.
        """
        after, changed = {**state, stage: value}, {stage}
        for later in STAGES[STAGES.index(stage) + 1 :]:
            if changed.isdisjoint(NEEDS[later]) or later == "attn.scores":
                if later == "attn.scores" and not changed.isdisjoint(NEEDS[later]):
                    after[later] = self.simulation.stages_of(layer)[later](after)
                    changed.add(later)
                continue
            after[later] = self.simulation.stages_of(layer)[later](after)
            changed.add(later)
            is_sum = number == -1 and later in ("mid", "")  # of which the candidate is a difference
            if not is_sum and self.arrays.shows(later, after[later], number):
                return True
            if len(changed) > FOLLOWED:
                return False
        return False

    def _candidates(self, stage: str, state: State) -> Iterator[Observed]:
        yield from self.arrays.observed(stage, state[stage])
        source = {"attn.c_proj": ("mid", "x"), "mlp.c_proj": ("", "mid")}.get(stage)
        if source is not None:  # the sum behind a branch shows the branch's result
            for seen in self.arrays.observed(source[0], state[source[0]]):
                yield Observed(seen.value - state[source[1]], seen.slack, seen.bound, state[stage], -1)
        if stage == "attn.v":  # what attention mixed shows its values
            weights = state["attn.weights"]
            if float(weights.diagonal(dim1=-2, dim2=-1).abs().min()) > 1e-6 and bool((weights.triu(1) == 0).all()):
                inverse = torch.linalg.inv(weights)
                for seen in self.arrays.observed("attn.mixed", state["attn.mixed"]):
                    loose = seen.slack + seen.bound * seen.value.square().mean().sqrt()
                    value, slack = (Layout.RIGHT.merge(one) for one in (inverse @ seen.value, inverse.abs() @ loose))
                    yield Observed(value, slack, seen.bound, state[stage], -1)

    def _causes(self, explained: bool) -> Iterator[PlacedCause]:
        groups: dict[tuple[str, str, str], list[Fault]] = {}
        finds_cache = self.is_first_row_embedded and any(
            one.id == "batch-dependent" and one.layer is not None for one in self.faults
        )
        for fault in self.faults:
            if finds_cache and fault.id == "position-offset":  # positions go on with the cache that a row finds
                continue
            if fault.id in ONE_DECISION:
                groups.setdefault((fault.id, "", fault.detail if fault.id == "reduced-precision" else ""), []).append(fault)
            else:
                groups.setdefault((fault.id, fault.part, fault.detail if fault.layer is None else ""), []).append(fault)
        for (id, _, _), same in groups.items():
            places = collapsed(dict.fromkeys(fault.place for fault in same), self.config.n_layer)
            evidence = "computed so from the values that your dump holds before it, this is what it holds here"
            if guessed := any((fault.layer, fault.part) in self.guessed for fault in same):
                evidence = "your dump holds this layer's input and its result, and what follows is computed from that result"
            evidence += "; with all causes here, your own logits follow" if explained else ""
            confidence = SURE if explained and not guessed else LIKELY
            yield PlacedCause(id, places, same[0].detail, evidence, confidence, None, f"{id} {same[0].part}")


def _ancestors(stage: str) -> set[str]:
    """Return the stages of a block from which a stage is computed."""
    return {one for need in NEEDS[stage] if need != "x" for one in (need, *_ancestors(need))}
