"""List numbers that a whole program keeps in fewer bits: inputs of products, the stream, weights in groups; as stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from gpt2.checkpoint.keys import head_name
from gpt2.port.diagnosis.hypotheses import right_scale
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault, Formula
from gpt2.port.dump.fits.rounding import in_eight_bits, mantissa, quantised
from gpt2.port.dump.misloading import INPUTS, MATRICES, READERS, misread
from gpt2.port.dump.simulation import LINEAR, Simulation, Stage, Stages, State, affine
from gpt2.port.dump.variants import Variant

NARROW: dict[str, Formula] = {
    "bfloat16": partial(mantissa, 7, False),
    "float16": partial(mantissa, 10, False),  # and TF32, which has as many bits
    "bfloat16, cut off": partial(mantissa, 7, True),
    "float16, cut off": partial(mantissa, 10, True),
}
BITS = ("in 8 bits", "in 4 bits", "in 5 bits", "in 6 bits")
HALF = "scales in float16"


def narrow_variants(simulation: Simulation) -> Iterator[tuple[Variant, Variant | None]]:
    """Yield variants of all blocks, each with what else of it is outside them, if anything is."""
    for dtype, narrow in NARROW.items():
        for what, attention, weights in (
            ("both factors of every product are", True, True),
            ("both factors of every product with a matrix are", False, True),
            ("the input of every linear layer is", False, False),
        ):
            words = f"{what} rounded to {dtype}"
            fault = Fault("reduced-precision", "", words)
            inside = _shared(words, fault, partial(_products, narrow, attention, weights))
            yield inside, _outside(f"{words}, the head's too", replace(fault, part="logits"), partial(_head, narrow, weights))
            yield inside, None
        fault = Fault("reduced-precision", "", f"the stream is rounded to {dtype} behind each sum")
        inside = _shared(fault.detail, fault, partial(_stream, narrow))
        yield inside, _outside(f"embedded in {dtype}", replace(fault, part="embed"), partial(_embedded, narrow))
        yield inside, None
    words = "the input of every linear layer is rounded to 8 bits, a scale for each token"
    eight_bits = partial(_products, partial(in_eight_bits, (-1,)), False, False)
    yield _shared(words, Fault("reduced-precision", "", words), eight_bits), None


def _shared(label: str, fault: Fault, stages: Callable[[Simulation, int], Stages]) -> Variant:
    return replace(Variant.of(label, [fault], stages, True), shared=True)


def _outside(label: str, fault: Fault, stages: Callable[[Simulation, int], Stages]) -> Variant:
    return Variant(label, lambda layer: (fault,), stages, outside=True, rare=True)


def _products(narrow: Formula, attention: bool, weights: bool, simulation: Simulation, layer: int) -> Stages:
    stages: dict[str, Stage] = {}
    held = simulation.weights(layer)
    for module in MATRICES:
        count, source = len(READERS[module]), INPUTS.get(module, "ln_1")
        shares = zip(held[f"{module}.weight"].chunk(count, 1), held[f"{module}.bias"].chunk(count), strict=True)
        for stage, (weight, bias) in zip(READERS[module], shares, strict=True):

            def linear(s: State, weight: Tensor = weight, bias: Tensor = bias, source: str = source) -> Tensor:
                return affine(narrow(s[source]), narrow(weight) if weights else weight, bias)

            stages[stage] = linear
    if not attention:
        return stages

    def scores(s: State) -> Tensor:
        q, k = (narrow(Layout.RIGHT.split(s[f"attn.{one}"], simulation.config.n_head)) for one in "qk")
        return q @ k.mT * right_scale(simulation.config, layer)

    def mixed(s: State) -> Tensor:
        return narrow(s["attn.weights"]) @ narrow(Layout.RIGHT.split(s["attn.v"], s["attn.weights"].shape[1]))

    return stages | {"attn.scores": scores, "attn.mixed": mixed}


def _head(narrow: Formula, weights: bool, simulation: Simulation, layer: int) -> Stages:
    def normed(s: State) -> Tensor:
        return narrow(simulation.norm("ln_f", s["x"]))

    table = simulation.table
    return {"ln_f": normed} | ({"head": lambda s: narrow(table)} if weights else {})


def _stream(narrow: Formula, simulation: Simulation, layer: int) -> Stages:
    right = simulation.right(layer)
    return {"mid": lambda s: narrow(right["mid"](s)), "": lambda s: narrow(right[""](s))}


def _embedded(narrow: Formula, simulation: Simulation, layer: int) -> Stages:
    return {"embed": lambda s: narrow(simulation.embed())}


def quantised_variants(simulation: Simulation) -> Iterator[tuple[Variant, Variant]]:
    """Yield the blocks' matrices in integers, with scales of every known kind; and beside each, the token table so."""
    table, held = Quantised(), simulation.weights(0)
    for words in dict.fromkeys(words for part in MATRICES for words, _ in quantised(held[f"{part}.weight"])):
        rare = HALF in words and not words.startswith(BITS[:2])  # other formats than those of eight and four bits
        if words.startswith(BITS) and not rare:
            fault = Fault("reduced-precision", "", f"the matrices are {words}")
            inside = replace(misread(words, fault, partial(_block_quantised, table, words), *LINEAR, rare=True), shared=True)
            changed = partial(_table_quantised, table, words)
            yield inside, _outside(f"wte {words}", replace(fault, part="wte"), changed)


class Quantised:
    """The ways to quantise each matrix, listed once."""

    def __init__(self) -> None:
        self._ways: dict[int, tuple[Tensor, dict[str, Callable[[], Tensor]]]] = {}

    def made(self, weight: Tensor, words: str) -> Tensor:
        """Return the matrix (I, O) in these integers; as it is, if it is too small for such groups."""
        key = weight.data_ptr()
        if key not in self._ways:
            self._ways[key] = weight, dict(quantised(weight))
        make = self._ways[key][1].get(words)
        return weight if make is None else make()


def _block_quantised(table: Quantised, words: str, weights: Mapping[str, Tensor], config: object) -> Mapping[str, Tensor]:
    names = [f"{part}.weight" for part in MATRICES]
    return {name: table.made(weights[name], words) for name in names}


def _table_quantised(table: Quantised, words: str, simulation: Simulation, layer: int) -> Stages:
    ids, positions = simulation.ids, simulation.state["wpe.weight"]

    def made(name: str) -> Tensor:
        return simulation.remember(f"quantised {name}", words, lambda: table.made(simulation.state[name].t(), words).t())

    head = head_name(simulation.state)
    return {"embed": lambda s: made("wte.weight")[ids] + positions[: ids.shape[1]], "head": lambda s: made(head)}
