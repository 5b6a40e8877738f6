"""List the known faults of a block's wiring: the options of the walk's generators, found by their labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from gpt2.port.diagnosis.norms import Hypothesis, Norms
from gpt2.port.diagnosis.search import Fault, Option
from gpt2.port.diagnosis.wiring import Branch, inputs, outputs, residuals
from gpt2.port.dump.simulation import Simulation, Stages, State
from gpt2.port.dump.variants import Replaced, Variant, joined
from gpt2.port.recording.pool import Pool

MOVED_NORMS = ("right", "no affine")  # hypotheses that are tried for a norm where GPT-2 has none
Options = Callable[[Simulation, int, State], Iterable[Option]]


class Unrecorded(Pool):
    """A pool without tensors: the factors that a program may multiply with are the usual ones."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        width, layers = simulation.config.n_embd, simulation.config.n_layer
        roots = [math.sqrt(0.5), math.sqrt(2.0), 1 / math.sqrt(2 * layers), 1 / math.sqrt(layers), math.sqrt(width)]
        usual = [0.5, 2.0, 0.1, *roots, 1 / math.sqrt(width), 1 / layers, 1 / (2 * layers)]
        self.usual = [factor for factor in dict.fromkeys(usual) if not math.isclose(factor, 1.0)]

    @classmethod
    def on(cls, simulation: Simulation) -> Unrecorded:
        return simulation.remember("unrecorded", simulation.config, lambda: cls(simulation))

    def factors(self, value: Tensor, *axes: int) -> list[float]:
        return self.usual


class UsualNorms(Norms):
    """The norms that programs put where GPT-2 has none."""

    @classmethod
    def of(cls, simulation: Simulation) -> UsualNorms:
        norms = simulation.norms
        return simulation.remember("usual norms", norms, lambda: cls(norms.config, norms.own))

    def at(self, name: str) -> list[Hypothesis]:
        return [one for one in super().at(name) if one.label in MOVED_NORMS]


def all_faults(option: Option) -> tuple[Fault, ...]:
    """Return an option's faults and those of the options that it starts from."""
    return (*(() if option.base is None else all_faults(option.base)), *option.faults)


def _after_attention(simulation: Simulation, layer: int, s: State) -> Iterable[Option]:
    attention = Branch(True, s["x"], s["ln_1"], True, [])
    return residuals(
        UsualNorms.of(simulation), Unrecorded.on(simulation), layer, attention, Option.known("branch", s["attn.c_proj"])
    )


def _into_feed_forward(simulation: Simulation, layer: int, s: State) -> Iterable[Option]:
    attention = Branch(True, s["x"], s["ln_1"], True, [])
    return inputs(UsualNorms.of(simulation), layer, attention, [])


def _after_feed_forward(simulation: Simulation, layer: int, s: State) -> Iterable[Option]:
    attention = Branch(True, s["x"], s["ln_1"], True, [Option.known("attention", s["attn.c_proj"])])
    feed_forward = Branch(False, s["mid"], s["ln_2"], True, [])
    result = Option.known("branch", s["mlp.c_proj"])
    return outputs(UsualNorms.of(simulation), Unrecorded.on(simulation), layer, attention, feed_forward, False, result)


def _by_option(simulation: Simulation, stage: str, options: Options) -> Iterator[Variant]:
    """Yield a variant for each wrong option of a stage."""
    for option in options(simulation, 0, simulation.right_state(0)):
        faults = all_faults(option)
        if faults:
            yield Variant.of(
                " ".join((stage or "out", *option.path)), faults, _chosen(stage, options, option.path), len(faults) > 1
            )


def _chosen(stage: str, options: Options, path: tuple[str, ...]) -> Replaced:
    """Return the stage computed by the option with ``path``; by GPT-2's formula if there is none."""

    def replaced(simulation: Simulation, layer: int) -> Stages:
        def formula(s: State) -> Tensor:
            source = s["attn.c_proj" if stage == "mid" else "ln_1" if stage == "ln_2" else "mlp.c_proj"]
            made, others = simulation.remember((options, layer), source, lambda: _none_made(options(simulation, layer, s)))
            while path not in made and (one := next(others, None)) is not None:
                made[one.path] = one
            return made[path].make() if path in made else simulation.right(layer)[stage](s)

        return {stage: formula}

    return replaced


def _none_made(options: Iterable[Option]) -> tuple[dict[tuple[str, ...], Option], Iterator[Option]]:
    return {}, iter(options)


def wiring_variants(simulation: Simulation, bare: Sequence[Variant]) -> Iterator[Variant]:
    """Yield the known faults of a block's sums and of the feed-forward's input; ``bare``: no norm before each branch."""
    mids = {one.label.removeprefix("mid "): one for one in _by_option(simulation, "mid", _after_attention)}
    outs = {one.label.removeprefix("out "): one for one in _by_option(simulation, "", _after_feed_forward)}
    yield from mids.values()
    yield from outs.values()
    yield from _by_option(simulation, "ln_2", _into_feed_forward)
    for label, one in mids.items():
        if label in outs:
            yield joined(f"both {label}", one, outs[label])
        exchanged = label.replace("after 0", "after 1") if "after 0" in label else label
        if exchanged != label and exchanged in outs:
            yield joined(f"both {label}, exchanged", one, outs[exchanged])
    for label in [label for label in mids if "after " in label and label in outs]:
        yield joined(f"moved {label}", *bare, mids[label], outs[label])
