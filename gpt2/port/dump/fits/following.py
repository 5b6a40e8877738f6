"""Follow a program's recorded values operator by operator; where one is not GPT-2's, fit what it computed from its inputs.

Nothing but values is compared. A stage that is not recorded is right if a later one that it enters is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import Progress, worst_relative_error
from gpt2.measure.tracing import point_at
from gpt2.port.deadline import TimeUp
from gpt2.port.diagnosis.attending import GRID
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.hypotheses import right_scale
from gpt2.port.diagnosis.places import Place, collapsed, forward_rank
from gpt2.port.diagnosis.projecting import HEADS
from gpt2.port.diagnosis.report import LIKELY, SURE, Divergence
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault
from gpt2.port.diagnosis.wiring import STREAM
from gpt2.port.dump.fits.attention import Mixed, Weights
from gpt2.port.dump.fits.linear import Library, Linear
from gpt2.port.dump.fits.normalising import Norm
from gpt2.port.dump.fits.observed import Fit, Observed, laid
from gpt2.port.dump.fits.wiring import activation_fit, embedding_fit, sum_fit
from gpt2.port.dump.holdings import LINEAR, Held, Holdings
from gpt2.port.dump.pool import DumpPool
from gpt2.port.dump.simulation import NEEDS, STAGES, Simulation, State
from gpt2.port.dump.tolerance import UNITS

MOST_FAULTS = 10  # of one block
MOST_TRIED = 12  # arrays that may be a stage's value and that nothing confirms, the likest first
LIKELIEST = 2  # that are tried before any is confirmed
FOLLOWED = 4  # stages that are computed from such an array, to confirm it
BEHIND = ("ln_1", "attn.q", "attn.k", "attn.v")  # stages of the next block that show its input


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
        self.faults: list[Fault] = []
        self.guessed: set[tuple[int | None, str]] = set()  # places whose value is the dump's, and nothing else gives it
        self.first: Divergence | None = None
        self.used: set[int] = set()
        self.earlier: list[State] = []  # of the blocks before
        self.sizes = {"b": ids.shape[0], "t": ids.shape[1]}

    def run(self) -> Followed:
        lost: str | None = "embed"
        with suppress(TimeUp):
            lost = self._follow()
        return Followed(tuple(self._causes(lost is None)), lost is None, self.first)

    def _follow(self) -> str | None:
        """Return the first stage that is not explained; None if the logits are."""
        self._set_aside()
        x = self._embedded()
        for layer in range(self.config.n_layer):
            self.progress(f"fitting what your block {layer} computes")
            if x is None:
                return "embed"
            state = self._block(layer, x)
            if isinstance(state, str):
                return point_at(layer, state)
            self.earlier.append(state)
            x = state[""]
        return None if x is not None and self._ended(x) else "logits"

    def _set_aside(self) -> None:
        """Note the arrays that hold GPT-2's own values of this run, which are never the result of a wrong operator."""
        for point, value in self.simulation.trace(self.simulation.base).items():
            if point in ("x", "end", "logits") or ".scores" in point:
                continue
            self._recorded(point.split(".", 2)[2] if point.count(".") > 1 else "", value)

    # What is recorded

    def _recorded(self, stage: str, value: Tensor) -> Tensor | None:
        """Return the program's own numbers for a stage's value, if recorded."""
        axes: tuple[int, ...] = STREAM
        if stage in ("attn.q", "attn.k", "attn.v", "attn.heads"):
            value, axes = Layout.RIGHT.split(value, self.config.n_head), HEADS
        elif stage == "attn.mixed":
            axes = HEADS
        elif stage == "attn.weights":
            axes = GRID
        if not bool(value.any()) or (match := self.pool.find_at(stage, value, *axes)) is None:
            return None
        self.used |= set(match.entries)
        own = self.pool.adopt(value, match)
        return own if stage != "attn.heads" and stage not in ("attn.q", "attn.k", "attn.v") else Layout.RIGHT.merge(own)

    def _observed(self, stage: str, right: Tensor) -> Iterator[Observed]:
        """Yield the arrays that may be a stage's value, laid out like it, those most like GPT-2's value first."""
        batch, tokens = self.ids.shape
        heads = self.config.n_head
        size = {"attn.weights": {"h": heads, "t": tokens, "s": tokens}, "attn.mixed": {"h": heads, "t": tokens, "k": -1}}.get(
            stage
        )
        if size is None:
            width = right.shape[-1]
            size = (
                {"t": tokens, "d": width} if width % heads or width != self.config.n_embd else {"t": tokens, "h": heads, "k": -1}
            )
        sizes = {"b": batch} | {name: right.numel() // (batch * heads * tokens) if n < 0 else n for name, n in size.items()}
        found: list[tuple[float, int, Observed]] = []
        for number, entry in enumerate(self.pool.entries):
            if entry.numel() != right.numel() or number in self.used or not bool(entry.isfinite().all()):
                continue
            unit, smallest = UNITS[self.pool.dtypes[number]]
            for value in laid(entry, sizes):
                value = value.reshape(right.shape)
                likeness = float((value * right).sum() / (value.norm() * right.norm()).clamp(min=1e-300))
                slack = unit * value.abs() + smallest
                found.append((-abs(likeness), number, Observed(value, slack, self.pool.tolerance_at(stage), right, number)))
        found.sort(key=lambda one: one[:2])
        yield from (one for _, _, one in found)

    # Outside the blocks

    def _embedded(self) -> Tensor | None:
        right = self.simulation.embed()
        if (own := self._recorded("embed", right)) is not None:
            return own
        wte, wpe = (self.simulation.state[f"{name}.weight"] for name in ("wte", "wpe"))
        for seen in self._observed("embed", right):
            rows = seen.wrong_rows()
            if (fit := embedding_fit(seen, self.ids, wte, wpe, rows)) is not None:
                return self._kept(None, "embed", seen, fit)
        return right  # perhaps not recorded

    def _kept(self, layer: int | None, stage: str, seen: Observed, fit: Fit) -> Tensor:
        """Note a fit's faults, and return its value with the program's own digits."""
        self.used.add(seen.number)
        self._departs(layer, stage, fit.value, seen.right)
        self.faults += [replace(fault, layer=layer) for fault in fit.faults]
        exact = seen.number >= 0 and UNITS[self.pool.dtypes[seen.number]][0] < 1e-4
        return seen.value.contiguous() if exact else fit.value

    def _departs(self, layer: int | None, stage: str, made: Tensor, right: Tensor) -> None:
        """Note the point where a value is not GPT-2's, if none before it is known."""
        point, order = stage if layer is None else point_at(layer, stage), self.config.n_layer
        if self.first is None or forward_rank(Place.of(point), order) < forward_rank(Place.of(self.first.point), order):
            self.first = Divergence(point, layer, worst_relative_error(made, right))

    def _ended(self, x: Tensor) -> bool:
        """Return whether the logits follow from the last stream, perhaps by a last norm or a head that is fitted."""
        wte = self.simulation.state["wte.weight"]
        right = self.simulation.norm("ln_f", x)
        logits = self.pool.logits[..., : len(wte)]
        normed = self._recorded("ln_f", right)
        for value in (normed, right) if normed is not None else (right,):
            if self._is_logits(value @ wte.T):
                return True
        for n, state in enumerate(self.earlier):
            if self._is_logits(self.simulation.norm("ln_f", state["x"]) @ wte.T):
                words = f"the head takes the stream that enters h.{n}: what follows has no effect"
                self._departs(n, "", state["x"], state[""])
                self.faults += [Fault("layer-missing", "", words, layer=later) for later in range(n, self.config.n_layer)]
                return True
        vectors = self.library.vectors
        unit, smallest = UNITS[self.pool.logits_dtype]
        for seen in [*self._observed("ln_f", right), *self._solved(logits, wte, right)] if normed is None else ():
            own = Norm("ln_f", vectors["ln_f.weight"], vectors["ln_f.bias"], self.config.layer_norm_epsilon, vectors, {})
            fit = own.fit(seen, x, seen.wrong_rows())
            if fit is not None and self._is_logits(fit.value @ wte.T):
                self._kept(None, "ln_f", seen, fit)
                return True
        x = right if normed is None else normed
        if logits.shape[:2] != x.shape[:2]:
            return False
        seen = Observed(logits, unit * logits.abs() + smallest, self.pool.tolerance_at("logits"), x @ wte.T, -1)
        head = Linear(self.library, "wte.weight", "logits", wte.T, torch.zeros(len(wte), dtype=x.dtype), {})
        fit = head.fit(seen, x, seen.wrong_rows())
        if fit is not None:
            self._kept(None, "logits", seen, fit)
        return fit is not None

    def _is_logits(self, made: Tensor) -> bool:
        given = self.pool.logits[..., : made.shape[-1]]
        return self.pool.logits_error(made[:, -given.shape[1] :], given) <= self.pool.tolerance_at("logits")

    def _solved(self, logits: Tensor, wte: Tensor, right: Tensor) -> Iterator[Observed]:
        """Yield the normed stream that the logits show: there are more tokens in the vocabulary than features."""
        if len(wte) < wte.shape[1] or logits.shape[:2] != right.shape[:2]:
            return
        inverse = torch.linalg.pinv(wte.T)
        value, (unit, smallest) = logits @ inverse, UNITS[self.pool.logits_dtype]
        slack = (
            unit * logits.abs() + smallest + self.pool.tolerance_at("logits") * logits.square().mean().sqrt()
        ) @ inverse.abs()
        yield Observed(value, slack, self.pool.tolerance_at("ln_f"), right, -1)

    # Inside a block

    def _block(self, layer: int, x: Tensor) -> State | str:
        """Return the block's stages as the program computes them; the first stage that is not explained, if there is one."""
        fixed: dict[str, Tensor] = {}
        for _ in range(MOST_FAULTS):
            state, known = self._stages(layer, x, fixed)
            waiting = [stage for stage in STAGES if stage not in known and stage not in ("attn.scores",)]
            if "" in known or not waiting or self._shown_behind(layer, state):
                return state
            ways = itertools.product((self._fitted, self._unknown, self._hidden), waiting)
            found = ((stage, look(layer, stage, state, known)) for look, stage in ways)
            stage, value = next(((stage, value) for stage, value in found if value is not None), ("", None))
            if value is None:
                return waiting[0]
            fixed[stage] = value
        return waiting[0]

    def _stages(self, layer: int, x: Tensor, fixed: Mapping[str, Tensor]) -> tuple[State, set[str]]:
        """Return the stages of a block, and those that are known: recorded or fitted, or what enters such a one."""
        state: State = {"x": x}
        known: set[str] = set()
        for stage, formula in self.simulation.right(layer).items():
            value = fixed[stage] if stage in fixed else formula(state)
            own = None if stage in fixed or stage == "attn.scores" else self._recorded(stage, value)
            state[stage] = value if own is None else own
            if stage in fixed or own is not None:
                known |= {stage, *_ancestors(stage)}
        return state, known

    def _shown_behind(self, layer: int, state: State) -> bool:
        """Return whether the block's result is right, as the next block or the logits show."""
        if layer + 1 == self.config.n_layer:
            normed = self.simulation.norm("ln_f", state[""])
            return self._recorded("ln_f", normed) is not None or self._is_logits(normed @ self.simulation.state["wte.weight"].T)
        following: State = {"x": state[""]}
        for stage in BEHIND:
            following[stage] = self.simulation.right(layer + 1)[stage](following)
        return any(self._recorded(stage, following[stage]) is not None for stage in BEHIND)

    def _fitted(self, layer: int, stage: str, state: State, known: set[str]) -> Tensor | None:
        """Return a stage's value as the program computes it, from arrays that no known operator gave; None if nothing fits."""
        every = list(self._candidates(stage, state))
        likely, rest = every[:LIKELIEST], every[LIKELIEST:]
        sure = (seen for seen in rest if self._confirmed(layer, stage, state, seen))
        for seen in itertools.chain(likely, sure, rest[:MOST_TRIED]):
            rows = seen.wrong_rows()
            if bool(rows.any()) and (fit := self._fit(layer, stage, state, seen, rows)) is not None:
                return self._kept(layer, stage, seen, fit)
        return None

    def _sure(self, layer: int, stage: str, state: State) -> list[Observed]:
        """Return the arrays that are a stage's value, because what follows is recorded as they give it."""
        return [seen for seen in self._candidates(stage, state) if self._confirmed(layer, stage, state, seen)]

    def _unknown(self, layer: int, stage: str, state: State, known: set[str]) -> Tensor | None:
        """Return the value of a linear layer with a known input, whose weights are not the checkpoint's in any known way."""
        for seen in self._sure(layer, stage, state)[:1] if stage in LINEAR and known.issuperset(NEEDS[stage]) else ():
            linear = self._linear(layer, stage, state)
            if (fit := linear.unknown(seen, state[NEEDS[stage][0]], seen.wrong_rows())) is not None:
                self.guessed.add((layer, fit.faults[0].part))
                return self._kept(layer, stage, seen, fit)
        return None

    def _hidden(self, layer: int, stage: str, state: State, known: set[str]) -> Tensor | None:
        """Return the value of a linear layer that is not recorded, with weights from which what follows is as recorded."""
        if stage not in LINEAR or not known.union({"x"}).issuperset(NEEDS[stage]) or self._sure(layer, stage, state):
            return None
        others = (n for n in range(self.config.n_layer) if n != layer)
        linear, holdings = self._linear(layer, stage, state), Holdings(self.simulation.state, self.config)
        x, holds = state[NEEDS[stage][0]], "the weight holds the checkpoint's values "
        listed = [*holdings.biases(layer, stage), *holdings.weights(layer, stage, others), *linear.strided(layer)]
        rounded = (Held(make(), linear.bias, "reduced-precision", ".weight", holds + words) for words, make in linear.roundings())
        first = [next(rounded)] if self.library.rounding else []
        for held in itertools.chain(first, listed, rounded):
            self.library.in_time()
            if self._hides(layer, stage, state, held, x):
                if held.words.startswith(holds):
                    self.library.rounding = held.words.removeprefix(holds)
                return x @ held.weight + held.bias
        return None

    def _hides(self, layer: int, stage: str, state: State, held: Held, x: Tensor) -> bool:
        """Return whether what follows is as recorded if the layer holds ``held``, and note the fault."""
        value = x @ held.weight + held.bias
        if not self._confirmed(layer, stage, state, Observed(value, value, 0.0, value, 0)):
            return False
        part = stage if stage in ("attn.q", "attn.k", "attn.v") else f"{stage}{held.leaf}"
        self._departs(layer, stage, value, state[stage])
        self.faults += [Fault(id, part, held.words, layer=layer) for id in held.id.split()]
        return True

    def _confirmed(self, layer: int, stage: str, state: State, seen: Observed) -> bool:
        """Return whether an array is a stage's value, because the right formulas of what follows give recorded arrays from it."""
        after, changed = {**state, stage: seen.value}, {stage}
        for later in STAGES[STAGES.index(stage) + 1 :]:
            if changed.isdisjoint(NEEDS[later]) or later == "attn.scores":
                if later == "attn.scores" and not changed.isdisjoint(NEEDS[later]):
                    after[later] = self.simulation.right(layer)[later](after)
                    changed.add(later)
                continue
            after[later] = self.simulation.right(layer)[later](after)
            changed.add(later)
            is_sum = seen.number < 0 and later in ("mid", "")  # of which the candidate is a difference
            if not is_sum and self._recorded(later, after[later]) is not None:
                return True
            if len(changed) > FOLLOWED:
                return False
        return False

    def _candidates(self, stage: str, state: State) -> Iterator[Observed]:
        yield from self._observed(stage, state[stage])
        source = {"attn.c_proj": ("mid", "x"), "mlp.c_proj": ("", "mid")}.get(stage)
        if source is not None:  # the sum behind a branch shows the branch's result
            for seen in self._observed(source[0], state[source[0]]):
                yield Observed(seen.value - state[source[1]], seen.slack, seen.bound, state[stage], -1)
        if stage == "attn.v":  # what attention mixed shows its values
            weights = state["attn.weights"]
            if float(weights.diagonal(dim1=-2, dim2=-1).abs().min()) > 1e-6 and bool((weights.triu(1) == 0).all()):
                inverse = torch.linalg.inv(weights)
                for seen in self._observed("attn.mixed", state["attn.mixed"]):
                    loose = seen.slack + seen.bound * seen.value.square().mean().sqrt()
                    value, slack = (Layout.RIGHT.merge(one) for one in (inverse @ seen.value, inverse.abs() @ loose))
                    yield Observed(value, slack, seen.bound, state[stage], -1)

    def _fit(self, layer: int, stage: str, state: State, seen: Observed, rows: Tensor) -> Fit | None:
        if stage not in ("mid", "") and (fit := self._stale(stage, seen, rows)) is not None:
            return fit
        own, split = self.simulation.weights(layer), self._split
        if stage in ("ln_1", "ln_2"):
            eps, vectors = self.config.layer_norm_epsilon, self.library.vectors
            inputs = (
                {} if stage == "ln_1" else {"attention's result": state["attn.c_proj"], "the stream before attention": state["x"]}
            )
            norm = Norm(stage, own[f"{stage}.weight"], own[f"{stage}.bias"], eps, vectors, inputs)
            return norm.fit(seen, state["x" if stage == "ln_1" else "mid"], rows)
        if stage == "attn.weights":
            keys = {f"the keys of block {n}": one["attn.k"] for n, one in enumerate(self.earlier)}
            if not bool(rows[:, :2].any()):  # in steps, perhaps of a cache that other blocks write as well
                keys |= dict(self._shown(state, "attn.k"))
            scale = right_scale(self.config, layer)
            return Weights(state["attn.q"], state["attn.k"], self.config.n_head, scale, keys).fit(seen, rows)
        if stage == "attn.mixed":
            others = {"the keys": "attn.k", "the queries": "attn.q", "attention's inputs": "ln_1", "the streams": "x"}
            values = {words: split(state[name]) for words, name in others.items()}
            values |= {f"the values of block {n}": split(one["attn.v"]) for n, one in enumerate(self.earlier)}
            if not bool(rows[:, :2].any()):
                values |= {words: split(value) for words, value in self._shown(state, "attn.v")}
            return Mixed(state["attn.weights"], split(state["attn.v"]), values).fit(seen, rows)
        if stage == "attn.heads":
            flat = replace(seen, value=split(seen.value), slack=split(seen.slack), right=split(seen.right))
            same = torch.eye(rows.shape[1], dtype=seen.value.dtype).expand(*rows.shape[:1], self.config.n_head, -1, -1)
            fit = Mixed(same, state["attn.mixed"], {}).fit(flat, rows)
            return None if fit is None else Fit(fit.faults, Layout.RIGHT.merge(fit.value))
        if stage == "mlp.act":
            return activation_fit(seen, state["mlp.c_fc"], rows)
        if stage in ("mid", ""):
            return sum_fit(seen, self._terms(layer, stage, state), rows, stage)
        return self._linear(layer, stage, state).fit(seen, state[NEEDS[stage][0]], rows)

    def _stale(self, stage: str, seen: Observed, rows: Tensor) -> Fit | None:
        """Return the fit of GPT-2's value plus those of earlier blocks, as in a buffer that is not cleared."""
        for first in range(len(self.earlier)):
            value = seen.right + sum((state[stage] for state in self.earlier[first:]), torch.zeros_like(seen.right))
            words = f"the values of h.{first} to h.{len(self.earlier) - 1} are added: a buffer that is not cleared"
            id = {"attn.mixed": "value-projection-wrong", "attn.weights": "softmax-missing"}.get(stage, "residual-scaled")
            part = "attn" if stage in ("attn.mixed", "attn.weights", "attn.heads") else stage
            if (fit := seen.fitted(value, rows, Fault(id, part, words))) is not None:
                return fit
        return None

    def _shown(self, state: State, own: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the arrays of the size of a block's keys, laid out as (B, T, D), under their names."""
        heads = {"b": self.ids.shape[0], "t": self.ids.shape[1], "h": self.config.n_head, "k": self.config.head_dim}
        for number, entry in enumerate(self.pool.entries):
            if entry.numel() == state[own].numel() and bool(entry.isfinite().all()):
                for turn, value in enumerate(laid(entry, heads)):
                    yield f"your {self.pool.names[number]}{', its axes in another order' * turn}", value.reshape(state[own].shape)

    def _split(self, y: Tensor) -> Tensor:
        return Layout.RIGHT.split(y, self.config.n_head)

    def _linear(self, layer: int, stage: str, state: State) -> Linear:
        own = self.simulation.weights(layer)
        part = "attn.c_attn" if stage in ("attn.q", "attn.k", "attn.v") else stage
        weight, bias = own[f"{part}.weight"], own[f"{part}.bias"]
        if part != stage:
            share = "qkv".index(stage[-1])
            weight, bias = weight.chunk(3, 1)[share], bias.chunk(3)[share]
        inputs = {
            "attn.c_attn": {"the stream, without a norm": state["x"]},
            "mlp.c_fc": {"the stream, without a norm": state.get("mid", state["x"]), "attention's input": state["ln_1"]},
            "mlp.c_proj": {"what enters the activation": state.get("mlp.c_fc", state["x"])},
            "attn.c_proj": {"the values": state["attn.v"], "attention's input": state["ln_1"]},
        }[part]
        return Linear(self.library, f"h.{layer}.{part}.weight", stage, weight, bias, inputs)

    def _terms(self, layer: int, stage: str, state: State) -> dict[str, Tensor]:
        """Return what a sum may hold, GPT-2's two terms first."""
        if stage == "mid":
            terms = {"x": state["x"], "attention's result": state["attn.c_proj"], "its normed input": state["ln_1"]}
        else:
            terms = {
                "x after attention": state["mid"],
                "the feed-forward's result": state["mlp.c_proj"],
                "x before attention": state["x"],
            }
            terms |= {
                "attention's result": state["attn.c_proj"],
                "the normed input": state["ln_2"],
                "attention's normed input": state["ln_1"],
            }
        if layer:
            terms |= {"the embeddings": self.earlier[0]["x"], "the last block's feed-forward": self.earlier[-1]["mlp.c_proj"]}
            terms |= {
                "the last block's attention": self.earlier[-1]["attn.c_proj"],
                "the last block's input": self.earlier[-1]["x"],
            }
        return terms

    def _causes(self, explained: bool) -> Iterator[PlacedCause]:
        groups: dict[tuple[str, str, str], list[Fault]] = {}
        for fault in self.faults:
            groups.setdefault((fault.id, fault.part, fault.detail if fault.layer is None else ""), []).append(fault)
        for (id, _, _), same in groups.items():
            places = collapsed(dict.fromkeys(fault.place for fault in same), self.config.n_layer)
            evidence = "computed so from the values that your dump holds before it, this is what it holds here"
            evidence += "; with all causes here, your own logits follow" if explained else ""
            sure = explained and not any((fault.layer, fault.part) in self.guessed for fault in same)
            yield PlacedCause(id, places, same[0].detail, evidence, SURE if sure else LIKELY, None, f"{id} {same[0].part}")


def _ancestors(stage: str) -> set[str]:
    """Return the stages of a block from which a stage is computed."""
    return {one for need in NEEDS[stage] if need != "x" for one in (need, *_ancestors(need))}
