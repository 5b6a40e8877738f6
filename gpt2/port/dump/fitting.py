"""Fit a number of one formula, such as a factor of the scores or of a branch, where no known one gives a program's values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.model import ACTIVATIONS
from gpt2.port.alternative import Alternative, Changed
from gpt2.port.alternatives.attention import scale_faults
from gpt2.port.alternatives.moments import OWN, WAYS, Divided, Reading, every_reading
from gpt2.port.alternatives.norms import in_norms, moved, of_moments
from gpt2.port.alternatives.wiring import summed
from gpt2.port.deadline import Deadline
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.evaluate import Evaluator
from gpt2.port.dump.lenses import Lens, Span
from gpt2.port.graph import Edits, Model, Program, Site, State, right_scale

POINTS, ROUNDS = 17, 14  # of the search around the best of the numbers that are tried first; each round is 8 times finer
DIGITS = 3  # of a number that a program has
NEAR = 1e-4  # how far a fitted number may be from such a short one
NEAREST = 6  # families that are searched closer
TANH = math.sqrt(2 / math.pi)
Values = Sequence[float]
PLACES = {("mid",): "attention's", ("",): "the feed-forward's", ("mid", ""): "each branch's"}


def _grid(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (number / (count - 1)) for number in range(count)]


FACTORS = _grid(1 / 32, 32.0, 24)
FEWER = _grid(1 / 20, 20.0, 13)
EPSILONS = _grid(1e-7, 3.0, 8)


@dataclass(frozen=True)
class Family:
    """A formula with one number: of the blocks, if it replaces the ``stage`` there, or outside them, if that is ``embed``.

    ``one``: the fault with a number. ``values``: those that are tried first, in order, of one sign. ``ending``: what it replaces
    behind the blocks counts, where these go on to the logits; ``whole``: tried in all blocks together alone.
    """

    stage: str
    one: Callable[[float], Alternative]
    values: Values = tuple(FEWER)
    ending: bool = False
    whole: bool = False

    def candidate(self, value: float, blocks: Sequence[int]) -> Candidate:
        one = self.one(value)
        sites = tuple((one, n) for n in blocks) if one.edits else ()
        return Candidate((*sites, *[(one, None)] * (self.ending or not one.edits)))


def scaled(config: GPT2Config, layer: int, times: float) -> Alternative:
    """Return the alternative whose scores are multiplied by ``times`` GPT-2's factor; the words are of ``layer``."""
    shown = layer if config.scale_attn_by_inverse_layer_idx else 0  # a fitted factor has nothing to do with the layer
    faults = scale_faults(config, shown, times * right_scale(config, shown))
    id, words = (faults[0].id, faults[0].detail) if faults else ("scale-wrong", "the scores have another factor")
    return Alternative(id, words, {"attn.scores": Changed("attn.scores", lambda c, y: times * y)}, key=f"{times:.6g}")


def families(model: Model, layer: int) -> Iterator[Family]:
    """Yield the formulas with one number, each a family of mistakes; ``layer``: the first block that is compared."""
    yield Family("attn.scores", partial(scaled, model.config, layer), FACTORS)
    for sign in (1, -1):
        some = [sign * one for one in FEWER]
        for nodes, what in PLACES.items():
            words = f"{what} result is multiplied by {{:.6g}} before it is added"
            branch = partial(_numbered, "residual-scaled", nodes[-1], words, partial(_sum, nodes, 1))
            yield Family(nodes[-1], branch, some)
    for nodes, what in PLACES.items():
        words = f"the stream is multiplied by {{:.6g}} before {what} result is added"
        yield Family(nodes[-1], partial(_numbered, "residual-scaled", nodes[-1], words, partial(_sum, nodes, 0)))
    for parts, what in (((1, 0), "token embeddings"), ((0, 1), "position embeddings"), ((1, 1), "the embeddings, both,")):
        words = f"{what} are multiplied by {{:.6g}}"
        place = "wpe" if parts == (0, 1) else "wte"
        for sign in (1, -1):
            yield Family("embed", partial(_embedded, place, words, parts), [sign * one for one in FEWER])
    for words, added in (
        ("scores of later tokens are {:.6g}, not minus infinity", False),
        ("{:.6g} is added to scores of later tokens, not minus infinity", True),
    ):
        masked = partial(_numbered, "mask-multiplied", "attn", words, partial(_masked, added))
        yield Family("attn.weights", masked, [-one for one in _grid(0.1, 100.0, 12)])
    for words, (usual, formula) in ACTIVE.items():
        active = partial(_numbered, "gelu-variant", "mlp.act", words, partial(_active, formula))
        yield Family("mlp.act", active, [usual * one for one in FEWER])
    yield from _moved_norms(model)


def _moved_norms(model: Model) -> Iterator[Family]:
    """Yield norms over other axes, with any epsilon: all of a program, or those of its blocks."""
    given = model.config.layer_norm_epsilon
    every = every_reading((*model.ids.shape, model.config.n_embd), model.config.n_head)

    def one(words: str, reading: Reading, way: Divided, number: int, eps: float) -> Alternative:
        norm = moved(words, way, eps, given)
        return list(in_norms(replace(norm, key=f"{eps}"), of_moments(reading, way, eps)))[number]

    for (words, reading), way in itertools.product(every.items(), WAYS):
        if words == OWN or words.startswith("the norm runs"):
            for number, part in enumerate(("ln_2", "ln_1", "ln_2")):  # both, and one of them
                for ending in dict.fromkeys((number == 0, False)):
                    yield Family(part, partial(one, words, reading, way, number), EPSILONS, ending, True)


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


def _numbered(id: str, part: str, words: str, edits: Callable[[float], Edits], value: float) -> Alternative:
    return Alternative(id, words.format(value), edits(value), part, fitted=True)


def _sum(nodes: tuple[str, ...], which: int, value: float) -> Edits:
    """Return sums whose stream (0) or branch (1) is multiplied."""
    factors = (value, 1.0) if which == 0 else (1.0, value)
    return {node: summed(node, lambda c, t, n: factors[0] * t[0] + factors[1] * t[1]) for node in nodes}


def _masked(added: bool, value: float) -> Edits:
    def weights(c: Site, s: State) -> Tensor:
        scores, hidden = s["attn.scores"], ~c.visible(s["attn.scores"].shape[-1])
        return (scores + value * hidden if added else scores.masked_fill(hidden, value)).softmax(-1)

    return {"attn.weights": weights}


def _active(formula: Callable[[Activation, float, Tensor], Tensor], value: float) -> Edits:
    return {"mlp.act": lambda c, s: formula(ACTIVATIONS[c.config.activation_function], value, s["mlp.c_fc"])}


def _embedded(part: str, words: str, parts: tuple[int, int], value: float) -> Alternative:
    def embed(c: Site, s: State) -> Tensor:
        tables = c.model.state["wte.weight"][c.model.ids[:, c.begin : c.end]], c.model.state["wpe.weight"][c.begin : c.end]
        token, position = (table * (value if one else 1.0) for table, one in zip(tables, parts, strict=True))
        return token + position

    return Alternative("embedding-scaled", words.format(value), where=part, outside={"embed": embed}, fitted=True)


Tried = tuple[Family, tuple[int, ...]]  # a family in some blocks


def fitted(lens: Lens, blocks: Sequence[int], deadline: Deadline) -> Iterator[Candidate]:
    """Yield the nearest faults with a fitted number, in all ``blocks``, in one, or in the embeddings.

    Each as a short number if it is near one, and as fitted; behind the deadline, the nearest of those that were tried.
    """
    tried = [(family, some) for family in families(lens.model, lens.span.first) for some in _places(lens.span, family, blocks)]
    errors = _errors(lens, tried, [family.values for family, _ in tried], deadline)
    nearest = sorted(range(len(tried)), key=lambda number: (min(errors[number]), len(tried[number][1])))[:NEAREST]
    places = [min(range(len(errors[number])), key=errors[number].__getitem__) for number in nearest]
    for (family, some), value in _closer(lens, [tried[number] for number in nearest], places, deadline):
        short = float(f"{value:.{DIGITS}g}")
        if math.isclose(value, short, rel_tol=NEAR):
            yield family.candidate(short, some)
        yield family.candidate(value, some)


def _places(span: Span, family: Family, blocks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the blocks that a family is tried in: all, and each alone."""
    if family.stage == "embed":
        return [] if span.entrance else [(0,)]
    computed = [n for n in blocks if span.computes(n, family.stage)]
    if not computed or (family.ending and span.end not in ("ln_f", "logits")):
        return []
    return [tuple(computed), *((n,) for n in computed if len(computed) > 1 and not family.whole)]


def _errors(lens: Lens, tried: Sequence[Tried], values: Sequence[Values], deadline: Deadline) -> list[list[float]]:
    """Return the error of each value of each family, all run together; infinity behind the deadline."""
    some = [family.candidate(value, places) for (family, places), own in zip(tried, values, strict=True) for value in own]
    near = Evaluator(lens, [one.program or Program() for one in some], deadline).nearness()
    errors = (near[number].log if number in near else math.inf for number in range(len(some)))
    return [list(itertools.islice(errors, len(own))) for own in values]


def _closer(lens: Lens, tried: Sequence[Tried], places: Sequence[int], deadline: Deadline) -> list[tuple[Tried, float]]:
    """Return the best number of each family near that at its place: of one sign, its size is searched as a logarithm."""
    best = [family.values[n] for (family, _), n in zip(tried, places, strict=True)]
    steps = [math.log(family.values[1] / family.values[0]) for family, _ in tried]
    ranges = [(math.log(abs(value)) - step, math.log(abs(value)) + step) for value, step in zip(best, steps, strict=True)]
    signs = [math.copysign(1.0, family.values[0]) for family, _ in tried]
    for _ in range(ROUNDS):
        points = [[low + (high - low) * n / (POINTS - 1) for n in range(POINTS)] for low, high in ranges]
        values = [[sign * math.exp(point) for point in some] for sign, some in zip(signs, points, strict=True)]
        for number, errors in enumerate(_errors(lens, tried, values, deadline)):
            n = min(range(POINTS), key=errors.__getitem__)
            best[number] = values[number][n]
            ranges[number] = points[number][max(n - 1, 0)], points[number][min(n + 1, POINTS - 1)]
    return list(zip(tried, best, strict=True))
