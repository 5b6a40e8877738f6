"""Fit a number of one formula, such as a factor of the scores or of a branch, where no known one gives a program's values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.model import ACTIVATIONS
from gpt2.port.deadline import Deadline
from gpt2.port.diagnosis.hypotheses import right_scale, scale_faults
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.branch_variants import BRANCHES
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.moments import OWN, WAYS, Divided, Reading, every_reading
from gpt2.port.dump.norm_variants import moved
from gpt2.port.dump.sieve import Lens
from gpt2.port.dump.simulation import Program, Simulation, Stage, Stages
from gpt2.port.dump.variants import Variant, joined
from gpt2.port.golden_section import least

STEPS = 60  # of the search around the best of the numbers that are tried first
DIGITS = 3  # of a number that a program has
NEAR = 1e-4  # how far a fitted number may be from such a short one
NEAREST = 6  # families that are searched closer
TANH = math.sqrt(2 / math.pi)
Values = Sequence[float]


def _grid(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (number / (count - 1)) for number in range(count)]


FACTORS = _grid(1 / 32, 32.0, 24)
FEWER = _grid(1 / 20, 20.0, 13)
EPSILONS = _grid(1e-7, 3.0, 8)


@dataclass(frozen=True)
class Family:
    """A formula with one number: of the blocks, if it replaces the ``stage`` there, or outside them, if that is ``embed``.

    ``variant``: the fault with a number. ``values``: those that are tried first, in order, of one sign. ``ending``: what is
    replaced behind the blocks as well, where these go on to the logits; ``whole``: tried in all blocks together alone.
    """

    stage: str
    variant: Callable[[float], Variant]
    values: Values = tuple(FEWER)
    ending: Callable[[float], Variant] | None = None
    whole: bool = False

    def candidate(self, value: float, blocks: Sequence[int]) -> Candidate:
        one = self.variant(value)
        last = ((self.ending(value), None),) if self.ending else ()
        return Candidate(((one, None),)) if one.outside else Candidate((*((one, n) for n in blocks), *last))


def scaled(config: GPT2Config, layer: int, times: float) -> Variant:
    """Return the variant whose scores are multiplied by ``times`` what GPT-2 multiplies them with; the words are of ``layer``."""

    def replaced(simulation: Simulation, layer: int) -> Stages:
        factor = times * right_scale(config, layer)
        return {"attn.scores": lambda s: simulation.scores(s, layer, factor=factor)}

    shown = layer if config.scale_attn_by_inverse_layer_idx else 0  # a fitted factor has nothing to do with the layer
    return Variant.of(f"scale times {times:.6g}", scale_faults(config, shown, times * right_scale(config, shown)), replaced)


def families(simulation: Simulation, layer: int) -> Iterator[Family]:
    """Yield the formulas with one number, each a family of mistakes; ``layer``: the first block that is compared."""
    yield Family("attn.scores", partial(scaled, simulation.config, layer), FACTORS)
    for sign in (1, -1):
        some = [sign * one for one in FEWER]
        for stages, what in (
            (("mid",), "attention's result is"),
            (("",), "the feed-forward's result is"),
            (("mid", ""), "each branch's result is"),
        ):
            words = f"{what} multiplied by {{:.6g}} before it is added"
            yield Family(stages[-1], partial(_blocks, "residual-scaled", stages[-1], words, partial(_branch, stages)), some)
    for stages, what in ((("mid",), "attention's"), (("",), "the feed-forward's"), (("mid", ""), "each branch's")):
        words = f"the stream is multiplied by {{:.6g}} before {what} result is added"
        yield Family(stages[-1], partial(_blocks, "residual-scaled", stages[-1], words, partial(_stream, stages)))
    for parts, what in (((1, 0), "token embeddings"), ((0, 1), "position embeddings"), ((1, 1), "the embeddings, both,")):
        words = f"{what} are multiplied by {{:.6g}}"
        place = "wpe" if parts == (0, 1) else "wte"
        for sign in (1, -1):
            yield Family("embed", partial(_embedded, place, words, parts), [sign * one for one in FEWER])
    for words, masked in (
        ("scores of later tokens are {:.6g}, not minus infinity", _filled),
        ("{:.6g} is added to scores of later tokens, not minus infinity", _added),
    ):
        variant = partial(_blocks, "mask-multiplied", "attn", words, masked)
        yield Family("attn.weights", variant, [-one for one in _grid(0.1, 100.0, 12)])
    for words, (usual, formula) in ACTIVE.items():
        variant = partial(_blocks, "gelu-variant", "mlp.act", words, partial(_active, formula))
        yield Family("mlp.act", variant, [usual * one for one in FEWER])
    yield from _moved_norms(simulation)


def _moved_norms(simulation: Simulation) -> Iterator[Family]:
    """Yield norms over other axes, with any epsilon: all of a program, or those of its blocks."""
    given = simulation.config.layer_norm_epsilon
    every = every_reading((*simulation.ids.shape, simulation.config.n_embd), simulation.config.n_head)

    def one(words: str, reading: Reading, way: Divided, parts: Sequence[str], eps: float) -> Variant:
        return joined(f"{words} {way} {eps}", *(moved(part, words, reading, way, eps, given) for part in parts))

    for (words, reading), way in itertools.product(every.items(), WAYS):
        if words == OWN or words.startswith("the norm runs"):
            for parts in (("ln_1", "ln_2"), ("ln_1",), ("ln_2",)):
                ending = partial(moved, "ln_f", words, reading, way, given=given) if len(parts) == 2 else None
                for last in dict.fromkeys((ending, None)):
                    yield Family(parts[-1], partial(one, words, reading, way, parts), EPSILONS, last, True)


Activation = Callable[[Tensor], Tensor]
# A number's usual size, and what is computed with it; ``own`` is the checkpoint's activation.
ACTIVE: dict[str, tuple[float, Callable[[Activation, float, Tensor], Tensor]]] = {
    "a sigmoid GELU, x sigmoid({:.6g} x)": (1.0, lambda own, a, x: x * torch.sigmoid(a * x)),
    "a tanh GELU with {:.6g} for sqrt(2/pi)": (TANH, lambda own, a, x: _tanh(a, 0.044715, x)),
    "a tanh GELU with {:.6g} for 0.044715": (0.044715, lambda own, a, x: _tanh(TANH, a, x)),
    "leaky ReLU, slope {:.6g}": (0.1, lambda own, a, x: torch.where(x > 0, x, a * x)),
    "the activation's result is multiplied by {:.6g}": (1.0, lambda own, a, x: a * own(x)),
    "the activation's input is multiplied by {:.6g}": (1.0, lambda own, a, x: own(a * x)),
    "the activation's result is {:.6g} at most": (1.0, lambda own, a, x: own(x).clamp(max=a)),
}


def _tanh(root: float, cubic: float, x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(root * (x + cubic * x**3)))


Numbered = Callable[[float, Simulation, int], Stages]


def _blocks(id: str, part: str, words: str, replaced: Numbered, value: float) -> Variant:
    detail = words.format(value)
    return Variant.of(detail, [Fault(id, part, detail, fitted=True)], partial(replaced, value))


def _branch(stages: tuple[str, ...], value: float, simulation: Simulation, layer: int) -> Stages:
    def summed(branch: str, stream: str) -> Stage:
        return lambda s: s[stream] + value * s[branch]

    return {stage: summed(*BRANCHES[stage][:2]) for stage in stages}


def _stream(stages: tuple[str, ...], value: float, simulation: Simulation, layer: int) -> Stages:
    def summed(branch: str, stream: str) -> Stage:
        return lambda s: value * s[stream] + s[branch]

    return {stage: summed(*BRANCHES[stage][:2]) for stage in stages}


def _filled(value: float, simulation: Simulation, layer: int) -> Stages:
    return {"attn.weights": lambda s: s["attn.scores"].masked_fill(~simulation.seen, value).softmax(-1)}


def _added(value: float, simulation: Simulation, layer: int) -> Stages:
    return {"attn.weights": lambda s: (s["attn.scores"] + value * ~simulation.seen).softmax(-1)}


def _active(formula: Callable[[Activation, float, Tensor], Tensor], value: float, simulation: Simulation, layer: int) -> Stages:
    own = ACTIVATIONS[simulation.config.activation_function]
    return {"mlp.act": lambda s: formula(own, value, s["mlp.c_fc"])}


def _embedded(part: str, words: str, parts: tuple[int, int], value: float) -> Variant:
    def replaced(simulation: Simulation, layer: int) -> Stages:
        tables = simulation.state["wte.weight"][simulation.ids], simulation.state["wpe.weight"][: simulation.ids.shape[1]]
        token, position = (table * (value if one else 1.0) for table, one in zip(tables, parts, strict=True))
        return {"embed": lambda s: token + position}

    fault = Fault("embedding-scaled", part, words.format(value), fitted=True)
    return Variant(fault.detail, lambda layer: (fault,), replaced, outside=True)


def fitted(lens: Lens, blocks: Sequence[int], deadline: Deadline) -> Iterator[Candidate]:
    """Yield the nearest faults with a fitted number, in all ``blocks``, in one, or in the embeddings.

    Each as a short number if it is near one, and as fitted; behind the deadline, the nearest of those that were tried.
    """
    span = lens.span
    tried: list[tuple[float, Family, tuple[int, ...], int]] = []
    for family in families(lens.simulation, span.first):
        places: list[tuple[int, ...]]
        if family.stage == "embed":
            places = [] if span.entrance else [(0,)]
        else:
            computed = [n for n in blocks if span.computes(n, family.stage)]
            single = [] if family.whole else [(n,) for n in computed if len(computed) > 1]
            places = [tuple(computed), *single] if computed else []
            if family.ending and not (places and span.end in ("ln_f", "logits")):
                continue
        for some in places:
            errors = _errors(lens, [family.candidate(value, some) for value in family.values], deadline)
            tried.append((min(errors), family, some, errors.index(min(errors))))
    for _, family, some, place in sorted(tried, key=lambda one: (one[0], len(one[2])))[:NEAREST]:
        yield from _closer(lens, family, some, place, deadline)


def _errors(lens: Lens, candidates: Sequence[Candidate], deadline: Deadline) -> list[float]:
    near = lens.nearness([one.program(lens.simulation) or Program() for one in candidates], deadline)
    return [near[number].log if number in near else math.inf for number in range(len(candidates))]


def _closer(lens: Lens, family: Family, blocks: Sequence[int], place: int, deadline: Deadline) -> Iterator[Candidate]:
    """Yield the best number near the one at ``place``: its sign is that of all, and its size is searched as a logarithm."""
    sign = math.copysign(1.0, family.values[0])
    grid = [math.log(abs(one)) for one in family.values]
    step = grid[1] - grid[0]

    def error(logarithm: float) -> float:
        return _errors(lens, [family.candidate(sign * math.exp(logarithm), blocks)], deadline)[0]

    value = sign * math.exp(least(error, grid[place] - step, grid[place] + step, STEPS)[1])
    short = float(f"{value:.{DIGITS}g}")
    if math.isclose(value, short, rel_tol=NEAR):
        yield family.candidate(short, blocks)
    yield family.candidate(value, blocks)
