"""List faults of one norm as stages of a simulation: what it runs over, whose numbers it applies, how often it runs.

A norm is written once and called everywhere, so most are tried in all norms, or in one of each block, but not in a single block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpt2.port.diagnosis.norms import layer_norm
from gpt2.port.diagnosis.search import Fault, Formula
from gpt2.port.dump.moments import AXES, OWN, WAYS, Divided, Reading, readings
from gpt2.port.dump.simulation import Simulation, Stages, State
from gpt2.port.dump.variants import Variant

SOURCES = {"ln_1": "x", "ln_2": "mid", "ln_f": "x"}  # what each norm takes
OTHERS = {"ln_1": "ln_2", "ln_2": "ln_1"}
Numbers = tuple[Tensor, Tensor]  # weight and bias (D,)


def name_of(part: str, layer: int) -> str:
    return part if part == "ln_f" else f"h.{layer}.{part}"


def numbers_of(simulation: Simulation, name: str) -> Numbers:
    return simulation.state[f"{name}.weight"], simulation.state[f"{name}.bias"]


def more_norm_variants(simulation: Simulation, part: str) -> Iterator[Variant]:
    """Yield faults of the norm ``part`` (``ln_1``, ``ln_2``, ``ln_f``), beside those of :class:`..diagnosis.norms.Norms`."""
    for words, reading in readings((*simulation.ids.shape, simulation.config.n_embd), simulation.config.n_head).items():
        for way in WAYS[:2]:
            yield moved(part, words, reading, way, simulation.config.layer_norm_epsilon)
    for words, change in _changes(simulation, part).items():
        for leaves, what in (((0,), "the weight is"), ((1,), "the bias is"), ((0, 1), "weight and bias are")):
            fault = Fault("wrong-tensor", part, f"{what} {words}")
            yield _variant(part, fault.detail, (fault,), partial(_applied, part, change, leaves))
    words = "the bias is added before the weight is applied"
    yield _variant(
        part, words, (Fault("layernorm-without-affine", part, words),), partial(_applied, part, partial(_bias_first, part), (1,))
    )
    for words, order in _orders(part).items():
        yield _variant(part, words, (Fault("extra-norm", part, words),), partial(_repeated, part, order))


def _bias_first(part: str, simulation: Simulation, layer: int) -> Numbers:
    weight, bias = numbers_of(simulation, name_of(part, layer))
    return weight, weight * bias


def moved(part: str, words: str, reading: Reading, way: Divided, eps: float, given: float | None = None) -> Variant:
    """Return the norm ``part`` that runs over ``reading``; ``given``: the checkpoint's epsilon, if ``eps`` is another one."""
    axis = () if words == OWN else (Fault("layernorm-axis", part, words),)
    faults = *axis, *way.faults(part, eps, eps if given is None else given)
    own = _variant(part, f"{words} {way} {eps:g}", faults, partial(_moved, part, reading, way, eps))
    return replace(own, mixes_rows=any(axes in words for dims, axes in AXES.items() if 0 in dims))


def _variant(part: str, label: str, faults: tuple[Fault, ...], replaced: Callable[[Simulation, int], Stages]) -> Variant:
    outside = part == "ln_f"
    return Variant(f"{part} {label}", lambda layer: faults, replaced, outside, rare=True, all_tokens=True, shared=True)


def _moved(part: str, reading: Reading, way: Divided, eps: float, simulation: Simulation, layer: int) -> Stages:
    weight, bias = numbers_of(simulation, name_of(part, layer))

    def normed(s: State) -> Tensor:
        x = s[SOURCES[part]]
        return way.normed(x, reading(x), eps) * weight + bias

    return {part: normed}


def _changes(simulation: Simulation, part: str) -> Mapping[str, Callable[[Simulation, int], Numbers]]:
    """Return by words other numbers that weight and bias may be."""
    last = simulation.config.n_layer - 1
    own: Callable[[Simulation, int], Numbers] = lambda simulation, layer: numbers_of(simulation, name_of(part, layer))  # noqa: E731
    lenders = {f"taken from {name}": name for name in ("h.0.ln_1", f"h.{last}.ln_2", "ln_f") if name != part}
    found: dict[str, Callable[[Simulation, int], Numbers]] = {
        "cut to the first number, for all features": lambda s, n: _each(own(s, n), lambda one: one[:1].expand_as(one)),
        "taken from each other": lambda s, n: own(s, n)[::-1],
        "applied twice": lambda s, n: (own(s, n)[0].square(), 2 * own(s, n)[1]),
        "in reverse order": lambda s, n: _each(own(s, n), lambda one: one.flip(0)),
        **{words: partial(lambda name, s, n: numbers_of(s, name), name) for words, name in lenders.items()},
    }
    if part in OTHERS:
        other = OTHERS[part]
        found[f"taken from {other} of the block"] = lambda s, n: numbers_of(s, name_of(other, n))
        for step, lender in itertools.product((1, -1), (part, other)):
            which = f"taken from {lender} of the {'next block' if step > 0 else 'block before'}"
            found[which] = partial(_neighbours, lender, step)
    return found


def _neighbours(part: str, step: int, simulation: Simulation, layer: int) -> Numbers:
    """Return the numbers of a norm of the next block or the one before; of the block itself at either end."""
    return numbers_of(simulation, name_of(part, min(max(layer + step, 0), simulation.config.n_layer - 1)))


def _each(numbers: Numbers, change: Formula) -> Numbers:
    return change(numbers[0]), change(numbers[1])


def _applied(
    part: str,
    change: Callable[[Simulation, int], Numbers],
    leaves: tuple[int, ...],
    simulation: Simulation,
    layer: int,
) -> Stages:
    eps = simulation.config.layer_norm_epsilon
    own, other = numbers_of(simulation, name_of(part, layer)), change(simulation, layer)
    weight, bias = (other[leaf] if leaf in leaves else own[leaf] for leaf in (0, 1))
    return {} if all(map(torch.equal, own, (weight, bias))) else {part: lambda s: layer_norm(s[SOURCES[part]], weight, bias, eps)}


def _orders(part: str) -> Mapping[str, tuple[str, ...]]:
    """Return by words the norms that run one after the other in the place of one; "" has neither weight nor bias."""
    found = {
        "the norm runs twice, the second time on its own result": (part, part),
        "a norm without weight and bias runs before it": ("", part),
        "a norm without weight and bias runs behind it": (part, ""),
    }
    if part in OTHERS:
        found[f"{OTHERS[part]} runs before it"] = (OTHERS[part], part)
        found[f"{OTHERS[part]} runs behind it"] = (part, OTHERS[part])
        found["ln_f runs behind it"] = (part, "ln_f")
    return found


def _repeated(part: str, order: tuple[str, ...], simulation: Simulation, layer: int) -> Stages:
    def formula(name: str) -> Formula:
        eps = simulation.config.layer_norm_epsilon
        weight, bias = numbers_of(simulation, name_of(name, layer)) if name else (1.0, 0.0)
        return lambda x: layer_norm(x, weight, bias, eps)

    formulas = [formula(name) for name in order]

    def normed(s: State) -> Tensor:
        x = s[SOURCES[part]]
        for one in formulas:
            x = one(x)
        return x

    return {part: normed}
