"""Other layer norms: formulas, axes, numbers and repetitions, each in all norms, in one of each block, or in the last.

Formulas with other epsilons, divisors and weights are those of :mod:`.norm_formulas`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, family
from gpt2.port.alternatives.moments import AXES, OWN, WAYS, Divided, Reading, readings
from gpt2.port.alternatives.norm_formulas import NormFormula, known_norms, layer_norm
from gpt2.port.graph import ROWS, TEXT, Formula, Model, Site

SOURCES = {"ln_1": "x", "ln_2": "mid", "ln_f": "x"}  # what each norm takes
OTHERS = {"ln_1": "ln_2", "ln_2": "ln_1"}
RARE = ("outside", "by ", "centred over", "rms outside")  # how labels of rare formulas begin
Norming = Callable[[Site, Tensor, str], Tensor]  # from a norm's input and its part
Numbers = tuple[Tensor, Tensor]  # weight and bias (D,)


def normed(part: str, make: Norming) -> Formula:
    """Return the formula of the norm ``part``."""
    source = SOURCES[part]
    return lambda c, s: make(c, s[source], part)


def in_norms(one: Alternative, make: Norming, parts: tuple[str, ...] = tuple(SOURCES)) -> Iterator[Alternative]:
    """Yield the alternative ``one`` with ``make`` for a norm: in all ``parts`` together, and in those of a block alone."""
    edits = {part: normed(part, make) for part in parts if part != "ln_f"}
    last = {"ln_f": normed("ln_f", make)} if "ln_f" in parts else {}
    yield replace(one, edits=edits, outside=last)
    for part, formula in edits.items() if len(edits) > 1 or (edits and last) else ():
        yield replace(one, edits={part: formula})


def hypotheses(model: Model, name: str) -> Mapping[str, NormFormula]:
    """Return the known formulas of the norm ``name`` by their labels."""
    return model.always(("norms", name), lambda: {one.label: one for one in known_norms(model.config, model.state, name)})


def _known(label: str) -> Norming:
    def make(c: Site, x: Tensor, part: str) -> Tensor:
        found = hypotheses(c.model, c.full(part)).get(label)
        return c.right(part, {SOURCES[part]: x}) if found is None else found.formula(x)

    return make


@family
def formulas(model: Model) -> Iterator[Alternative]:
    """Yield the formulas of that table, and norms that are left out."""
    found: dict[str, list[str]] = {}
    known: dict[str, NormFormula] = {}
    for part, name in (("ln_1", "h.0.ln_1"), ("ln_2", "h.0.ln_2"), ("ln_f", "ln_f")):
        for label, one in hypotheses(model, name).items():
            swapped = any(fault.id == "norms-swapped" for fault in one.faults)
            if one.faults and (not label.startswith("axes") or "no affine" in label):  # those are among the readings
                found.setdefault(f"{label} {part}" if swapped else label, []).append(part)
                known.setdefault(f"{label} {part}" if swapped else label, one)
    for key, one in known.items():
        rare = len(one.faults) > 1 or one.label.startswith(RARE)
        sees = ROWS if one.mixes_rows else TEXT if one.label.startswith("axes") else ""
        also = tuple((fault.id, fault.detail) for fault in one.faults[1:])
        first = one.faults[0]
        alternative = Alternative(first.id, first.detail, also=also, rare=rare, sees=sees, key=one.label)
        yield from in_norms(alternative, _known(one.label), tuple(found[key]))
    words = {"ln_1": "attention takes", "ln_2": "the feed-forward takes", "ln_f": "the head takes"}
    for part, who in words.items():
        edits = {part: lambda c, s, source=SOURCES[part]: s[source]}
        if part == "ln_f":
            yield Alternative("final-norm-missing", f"{who} the stream as it is, without the last norm", outside=edits)
        else:
            yield Alternative("norm-missing", f"{who} the stream as it is, without a norm before it", edits)
    both = {part: (lambda c, s, source=SOURCES[part]: s[source]) for part in OTHERS}
    yield Alternative("norm-missing", "both branches take the stream as it is, without norms before them", both)


@family
def axes(model: Model) -> Iterator[Alternative]:
    """Yield norms with the mean and the variance of other entries."""
    shape, eps = (*model.ids.shape, model.config.n_embd), model.config.layer_norm_epsilon
    for (words, reading), way in itertools.product(readings(shape, model.config.n_head).items(), WAYS[:2]):
        yield from in_norms(moved(words, way, eps, eps), of_moments(reading, way, eps))


def of_moments(reading: Reading, way: Divided, eps: float) -> Norming:
    def make(c: Site, x: Tensor, part: str) -> Tensor:
        weight, bias = c.numbers(part)
        return way.normed(x, reading(x), eps) * weight + bias

    return make


def moved(words: str, way: Divided, eps: float, given: float) -> Alternative:
    """Return the norm that runs over other entries, in ``words``; ``given``: the checkpoint's epsilon."""
    causes = [("layernorm-axis", words)] * (words != OWN) + [(one.id, one.detail) for one in way.faults("", eps, given)]
    rows = any(name in words for dims, name in AXES.items() if 0 in dims)
    (id, detail), *also = causes or [("layernorm-eps", OWN)]
    return Alternative(id, detail, also=tuple(also), rare=True, shared=True, sees=ROWS if rows else TEXT)


@family
def numbers(model: Model) -> Iterator[Alternative]:
    """Yield norms with other weights and biases."""
    last = model.config.n_layer - 1
    ways: dict[str, tuple[str, Callable[[Site, str], Numbers], tuple[str, ...]]] = {
        "cut to the first number, for all features": ("wrong-tensor", _each(lambda one: one[:1].expand_as(one)), tuple(SOURCES)),
        "taken from each other": ("wrong-tensor", lambda c, part: c.numbers(part)[::-1], tuple(SOURCES)),
        "applied twice": ("wrong-tensor", _twice, tuple(SOURCES)),
        "in reverse order": ("wrong-tensor", _each(lambda one: one.flip(0)), tuple(SOURCES)),
        "taken from the other norm of the block": ("wrong-tensor", lambda c, part: c.numbers(OTHERS[part]), tuple(OTHERS)),
    }
    for name in dict.fromkeys(("h.0.ln_1", f"h.{last}.ln_2", "ln_f")):
        parts = tuple(part for part in SOURCES if part != name)
        ways[f"taken from {name}"] = "wrong-tensor", lambda c, part, name=name: c.numbers(name), parts
    for step, other in itertools.product((1, -1), (False, True)):
        which = f"the {'next block' if step > 0 else 'block before'}"
        lender = "of the other norm of" if other else "of the same norm of"
        ways[f"those {lender} {which}"] = "wrong-tensor", _neighbours(step, other, last), tuple(OTHERS)
    for words, (id, change, parts) in ways.items():
        for leaves, what in (((0,), "the weight is"), ((1,), "the bias is"), ((0, 1), "weight and bias are")):
            one = Alternative(id, f"{what} {words}", rare=True, shared=True)
            yield from in_norms(one, _applied(change, leaves), parts)
    words = "the bias is added before the weight is applied"
    first = Alternative("layernorm-without-affine", words, rare=True, shared=True)
    yield from in_norms(first, _applied(lambda c, part: (c.numbers(part)[0], c.numbers(part)[0] * c.numbers(part)[1]), (1,)))
    words = "the parameters of ln_1 and ln_2 have changed places"
    exchanged = {part: normed(part, _applied(lambda c, p: c.numbers(OTHERS[p]), (0, 1))) for part in OTHERS}
    yield Alternative("norms-swapped", words, exchanged)


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[Site, str], Numbers]:
    return lambda c, part: (change(c.numbers(part)[0]), change(c.numbers(part)[1]))


def _twice(c: Site, part: str) -> Numbers:
    weight, bias = c.numbers(part)
    return weight.square(), 2 * bias


def _neighbours(step: int, other: bool, last: int) -> Callable[[Site, str], Numbers]:
    """Return the numbers of a norm of the next block or the one before; of the block itself at either end."""
    return lambda c, part: c.at(min(max(c.layer + step, 0), last)).numbers(OTHERS[part] if other else part)


def _applied(change: Callable[[Site, str], Numbers], leaves: tuple[int, ...]) -> Norming:
    def make(c: Site, x: Tensor, part: str) -> Tensor:
        own, other = c.numbers(part), change(c, part)
        weight, bias = (other[leaf] if leaf in leaves else own[leaf] for leaf in (0, 1))
        return torch.layer_norm(x, weight.shape, weight, bias, c.config.layer_norm_epsilon)

    return make


@family
def repeated(model: Model) -> Iterator[Alternative]:
    """Yield several norms where there is one; "" has neither weight nor bias."""
    orders: dict[str, Callable[[str], tuple[str, ...]]] = {
        "the norm runs twice, the second time on its own result": lambda part: (part, part),
        "a norm without weight and bias runs before it": lambda part: ("", part),
        "a norm without weight and bias runs behind it": lambda part: (part, ""),
        "the other norm of the block runs before it": lambda part: (OTHERS[part], part),
        "the other norm of the block runs behind it": lambda part: (part, OTHERS[part]),
        "ln_f runs behind it": lambda part: (part, "ln_f"),
    }
    for words, order in orders.items():

        def make(c: Site, x: Tensor, part: str, order: Callable[[str], tuple[str, ...]] = order) -> Tensor:
            for name in order(part):
                x = c.norm(x, name) if name else layer_norm(x, eps=c.config.layer_norm_epsilon)
            return x

        parts = tuple(OTHERS) if "other" in words or "ln_f" in words else tuple(SOURCES)
        yield from in_norms(Alternative("extra-norm", words, rare=True, shared=True), make, parts)
