"""List every known fault of a block or of what surrounds the blocks, as formulas that replace stages of a simulation.

The wrong formulas are those of the walk (:mod:`..diagnosis.hypotheses`, ``activations``, ``norms``, ``wiring``, ``attending``),
found there by their labels; misread weights are in :mod:`.misloading`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.activations import activation_faults
from gpt2.port.diagnosis.attending import MERGED, NO_PROJECTION
from gpt2.port.diagnosis.hypotheses import SCALES, right_scale, scale_faults, weighings
from gpt2.port.diagnosis.norms import RMS, layer_norm
from gpt2.port.diagnosis.scores import Layout, Scoring, wrong_scorings
from gpt2.port.diagnosis.search import Fault, Formula, Option
from gpt2.port.diagnosis.weighing import MIXED
from gpt2.port.diagnosis.wiring import Embeddings
from gpt2.port.dump.norm_variants import SOURCES, more_norm_variants, name_of
from gpt2.port.dump.simulation import Simulation, Stage, Stages, State
from gpt2.port.dump.variants import Blame, Replaced, Tops, Variant, joined, on_top
from gpt2.port.dump.wiring_variants import Unrecorded, UsualNorms, all_faults, wiring_variants

Scale = Callable[[GPT2Config, int], float]
MOST_SHIFTS = 33
TWINS = ("relu6",)  # activations that give most numbers what a commoner one gives
SHIFTS = (1, 2, 3)  # by how much positions are tried to be off, if embeddings are not shown


def norm_replaced(part: str, label: str, simulation: Simulation, layer: int) -> Stages:
    """Return the stage ``part`` (``ln_1``, ``ln_2``, ``ln_f``), if its norm has the hypothesis ``label`` there."""
    formula = next((one.formula for one in simulation.norms.at(name_of(part, layer)) if one.label == label), None)
    return {} if formula is None else {part: _then(formula, SOURCES[part])}


def _then(formula: Formula, source: str) -> Stage:
    return lambda s: formula(s[source])


def norm_variants(simulation: Simulation, part: str) -> list[Variant]:
    """Return the known faults of one norm: ``ln_1``, ``ln_2``, or ``ln_f`` outside the blocks."""
    out = []
    for one in simulation.norms.at(part if part == "ln_f" else f"h.0.{part}"):
        rare = len(one.faults) > 1 or one.label.startswith(("outside", "by ", "centred over", "rms outside"))
        if one.faults:
            replaced = partial(norm_replaced, part, one.label)
            out.append(Variant.of(f"{part} {one.label}", one.faults, replaced, rare, one.mixes_rows))
    return [*out, _without_norm(simulation, part), *more_norm_variants(simulation, part)]


def _without_norm(simulation: Simulation, part: str) -> Variant:
    stream = Option.known("stream", simulation.norms.own["wte.weight"][:1])
    words = {
        "ln_1": "attention takes the stream as it is, without a norm before it",
        "ln_2": "the feed-forward takes the stream as it is, without a norm before it",
        "ln_f": "the head takes the stream as it is, without the last norm",
    }[part]
    none = next(one for one in simulation.norms.before(part if part == "ln_f" else f"h.0.{part}", stream, words) if one.silent)
    source = SOURCES[part]
    return Variant.of(f"{part} no norm", none.faults, lambda simulation, layer: {part: lambda s: s[source]})


def block_variants(simulation: Simulation) -> list[Variant]:
    """Return the known faults of a block's formulas."""
    return [
        *norm_variants(simulation, "ln_1"),
        *norm_variants(simulation, "ln_2"),
        *_activations(simulation),
        *_weighings(simulation),
        *_scales(simulation),
        *_layouts(),
        *_comparisons(simulation),
        *_mixtures(),
        *wiring_variants(simulation, [_without_norm(simulation, part) for part in ("ln_1", "ln_2")]),
    ]


def _activations(simulation: Simulation) -> Iterator[Variant]:
    for label, formula, fault in activation_faults(simulation.config):
        yield Variant.of(f"act {label}", [fault], _by_formula("mlp.act", formula, "mlp.c_fc"), label in TWINS)
    behind = Fault("gelu-variant", "mlp.act", "the activation stands behind the second linear layer, not before it")
    yield Variant.of("act behind", [behind], _activated_late)


def _activated_late(simulation: Simulation, layer: int) -> Stages:
    right = simulation.right(layer)

    def result(s: State) -> Tensor:
        return right["mlp.act"]({"mlp.c_fc": right["mlp.c_proj"](s)})

    return {"mlp.act": lambda s: s["mlp.c_fc"], "mlp.c_proj": result}


def _weighings(simulation: Simulation) -> Iterator[Variant]:
    sizes = {1: simulation.config.n_head, 0: len(simulation.ids)}
    for one in weighings():
        if one.faults and sizes.get(one.axis, 2) > 1:
            replaced = _by_formula("attn.weights", one.formula, "attn.scores")
            yield Variant.of(f"weights {one.label}", one.faults, replaced, len(one.faults) > 1, one.axis == 0)


def _by_formula(stage: str, formula: Formula, source: str) -> Replaced:
    return lambda simulation, layer: {stage: _then(formula, source)}


# Attention


def _scales(simulation: Simulation) -> Iterator[Variant]:
    for label, scale in SCALES.items():

        def blame(layer: int, scale: Scale = scale, label: str = label) -> tuple[Fault, ...]:
            config = simulation.config
            return scale_faults(config, layer, scale(config, layer), inverse_first=label == "by the layer")

        def top(simulation: Simulation, layer: int, scale: Scale = scale) -> Mapping[str, Formula]:
            times = scale(simulation.config, layer) / right_scale(simulation.config, layer)
            return {} if math.isclose(times, 1.0) else {"attn.scores": lambda value: times * value}

        def replaced(simulation: Simulation, layer: int, top: Tops = top) -> Stages:
            right = simulation.right(layer)
            return {stage: on_top(formula, right[stage]) for stage, formula in top(simulation, layer).items()}

        yield Variant(f"scale {label}", blame, replaced, top=top)


def _mixed(layout: Layout, source: str) -> Stage:
    return lambda s: s["attn.weights"] @ layout.split(s[source], s["attn.weights"].shape[1])


def _layouts() -> Iterator[Variant]:
    for layout in Layout:
        if layout is Layout.RIGHT:
            continue
        cut, merged = Fault("head-layout", "attn", layout.value), Fault("head-layout", "attn", MERGED)

        def split(simulation: Simulation, layer: int, layout: Layout = layout) -> Stages:
            return {
                "attn.scores": lambda s: simulation.scores(s, layer, layout),
                "attn.mixed": _mixed(layout, "attn.v"),
            }

        def kept(simulation: Simulation, layer: int, layout: Layout = layout) -> Stages:
            right, heads = simulation.right(layer), simulation.config.n_head
            parts = {name: right[name] for name in ("attn.q", "attn.k", "attn.v")}
            return {name: on_top(lambda y: Layout.RIGHT.merge(layout.split(y, heads)), stage) for name, stage in parts.items()}

        def merge(simulation: Simulation, layer: int, layout: Layout = layout) -> Stages:
            return {"attn.heads": lambda s: layout.merge(s["attn.mixed"])}

        mixes_rows = layout is Layout.TIME_FIRST
        cutting = replace(Variant.of(f"split {layout.name}", [cut], split, mixes_rows=mixes_rows), kept=kept)
        yield cutting
        yield Variant.of(f"merge {layout.name}", [merged], merge, mixes_rows=mixes_rows)
        yield joined(f"layout {layout.name}", cutting, Variant.of("", [], merge))
    reversed_heads = Fault("head-layout", "attn", "heads are put side by side in reverse order")
    yield Variant.of(
        "merge reversed",
        [reversed_heads],
        lambda simulation, layer: {"attn.heads": lambda s: Layout.RIGHT.merge(s["attn.mixed"].flip(1))},
    )


def _comparisons(simulation: Simulation) -> Iterator[Variant]:
    """Yield the ways to compare tokens that have one fault: another number of heads, other pairs, keys that are shared."""

    def scorings(s: State) -> list[Scoring]:
        parts = {name: s[f"attn.{name}"] for name in "qk"}
        return [one for one in wrong_scorings(parts, simulation.config) if len(one.faults) == 1 and not one.cosine]

    heads = simulation.config.n_head
    for number, one in enumerate(scorings(simulation.right_state(0))):
        for kept in (False, True) if one.heads != heads else (True,):

            def replaced(simulation: Simulation, layer: int, number: int = number, kept: bool = kept) -> Stages:
                def scores(s: State) -> Tensor:
                    found = scorings(s)[number]
                    return found.value * (right_scale(simulation.config, layer) if kept else found.usual_factor)

                return {"attn.scores": scores}

            rare, mixes_rows = one.heads not in (1, heads, 2 * heads), one.faults[0].id == "batch-dependent"
            scaled = f", with the factor of {heads} heads" if kept and one.heads != heads else ""
            faults = [replace(fault, detail=fault.detail + scaled) for fault in one.faults]
            yield Variant.of(f"compared {faults[0].detail}", faults, replaced, rare, mixes_rows)


def _mixtures() -> Iterator[Variant]:
    sources = {"k": "attn.k", "q": "attn.q", "input": "ln_1", "stream": "x"}
    for source, words in MIXED.items():
        if words:
            wrong = Fault("value-projection-wrong", "attn", words)

            def replaced(simulation: Simulation, layer: int, source: str = sources[source]) -> Stages:
                return {"attn.mixed": _mixed(Layout.RIGHT, source)}

            yield Variant.of(f"mixed {source}", [wrong], replaced)
    yield Variant.of("no projection", [NO_PROJECTION], lambda simulation, layer: {"attn.c_proj": lambda s: s["attn.heads"]})
    yield Variant.of("projection unused", [NO_PROJECTION], lambda simulation, layer: {"mid": lambda s: s["x"] + s["attn.heads"]})
    words = "the heads are normalised before the output projection"
    for label, how in (("layer norm", {}), ("rms", RMS)):
        normed = partial(layer_norm, **how)

        def extra(simulation: Simulation, layer: int, normed: Formula = normed) -> Stages:
            return {"attn.heads": lambda s: normed(Layout.RIGHT.merge(s["attn.mixed"]))}

        yield Variant.of(f"heads {label}", [Fault("extra-norm", "attn", words)], extra)


# Outside the blocks


def embedding_variants(simulation: Simulation, shifts: tuple[int, ...] = ()) -> Iterator[Variant]:
    """Yield what may enter the first block; positions are off by ``shifts``, or the usual ones, of a small model any."""
    shifts = shifts or (tuple(range(1, min(simulation.config.n_positions, MOST_SHIFTS))) if simulation.small else SHIFTS)

    def options(simulation: Simulation) -> dict[tuple[str, ...], Option]:
        embeddings = Embeddings(Unrecorded.on(simulation), UsualNorms.of(simulation), simulation.ids)
        key = "embeddings", shifts
        return simulation.remember(key, None, lambda: {one.path: one for one in embeddings.unrecorded(shifts)})

    def replaced(path: tuple[str, ...], simulation: Simulation, layer: int) -> Stages:
        option = options(simulation).get(path)
        return {} if option is None else {"embed": lambda s: option.value}

    for option in options(simulation).values():
        faults = all_faults(option)
        if faults:
            rare = len(faults) > 1
            yield Variant(" ".join(("embed", *option.path)), _always(faults), partial(replaced, option.path), True, rare)


def standing(row: int) -> Variant:
    """Return the fault of a program that gives every token the position ``row``."""
    fault = Fault("position-offset", "wpe", f"every token is given position {row}")

    def replaced(simulation: Simulation, layer: int) -> Stages:
        return {"embed": lambda s: simulation.state["wte.weight"][simulation.ids] + simulation.state["wpe.weight"][row]}

    return Variant(fault.detail, _always((fault,)), replaced, True)


def _always(faults: tuple[Fault, ...]) -> Blame:
    return lambda layer: faults
