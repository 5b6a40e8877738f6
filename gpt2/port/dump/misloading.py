"""List the known faults of loading a block: weights held otherwise than in the checkpoint, as stages of a simulation.

How a tensor is misread comes from :mod:`..diagnosis.entries`, and narrow dtypes from :mod:`..diagnosis.weights`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis import entries
from gpt2.port.diagnosis.search import Fault
from gpt2.port.diagnosis.weights import NARROW
from gpt2.port.dump.fits.rounding import CUT, SCALED, narrowed
from gpt2.port.dump.simulation import Simulation, Stage, Stages, State, affine
from gpt2.port.dump.variants import Variant, joined

# The stages that read each module's tensors.
READERS = {
    "ln_1": ("ln_1",),
    "attn.c_attn": ("attn.q", "attn.k", "attn.v"),
    "attn.c_proj": ("attn.c_proj",),
    "ln_2": ("ln_2",),
    "mlp.c_fc": ("mlp.c_fc",),
    "mlp.c_proj": ("mlp.c_proj",),
}
MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
PARTS = (MATRICES, MATRICES[1:], MATRICES[:2], MATRICES[2:])
SOME_MATRICES: tuple[tuple[str, ...], ...] = ((), *((one,) for one in MATRICES), *PARTS)
QKV = READERS["attn.c_attn"]
ALL = tuple(stage for stages in READERS.values() for stage in stages)
INPUTS = {"attn.c_proj": "attn.heads", "mlp.c_fc": "ln_2", "mlp.c_proj": "mlp.act"}
MAX_BLOCKS = 4  # beyond that, a tensor of another block is of a neighbour or of the first
Change = Callable[[Mapping[str, Tensor], GPT2Config], Mapping[str, Tensor]]  # a block's tensors -> those that differ


def reading(simulation: Simulation, layer: int, stage: str, changed: Callable[[], Mapping[str, Tensor]]) -> Stage:
    """Return a stage of a block that holds ``changed`` tensors, by their names in the block, in place of the checkpoint's."""
    module = next(module for module, readers in READERS.items() if stage in readers)
    share = "qkv".index(stage[-1]) if module == "attn.c_attn" else None

    def formula(s: State) -> Tensor:
        held = {**simulation.weights(layer), **changed()}
        weight, bias = (held[f"{module}.{leaf}"].to(simulation.dtype) for leaf in ("weight", "bias"))
        if module.startswith("ln_"):
            return normed(simulation, "x" if module == "ln_1" else "mid", weight, bias)(s)
        if share is not None:
            return affine(s["ln_1"], weight.chunk(3, 1)[share], bias.chunk(3, 0)[share])
        return affine(s[INPUTS[module]], weight, bias)

    return formula


def normed(simulation: Simulation, source: str, weight: Tensor, bias: Tensor) -> Stage:
    """Return the layer norm of the value ``source``, with other weights."""
    eps = simulation.config.layer_norm_epsilon
    return lambda s: torch.layer_norm(s[source], weight.shape, weight, bias, eps)


def misread(label: str, fault: Fault, change: Change, *stages: str, rare: bool = False) -> Variant:
    """Return the variant of a block whose tensors ``change`` replaces where ``stages`` read them; computed when they run."""

    def replaced(simulation: Simulation, layer: int) -> Stages:
        this = object()

        def changed() -> Mapping[str, Tensor]:
            return simulation.remember("changed", this, lambda: change(simulation.weights(layer), simulation.config))

        return {stage: reading(simulation, layer, stage, changed) for stage in stages}

    return Variant.of(label, [fault], replaced, rare)


def loading_variants(simulation: Simulation) -> list[Variant]:
    """Return the known faults of loading in a block."""
    config, weights = simulation.config, simulation.weights(0)
    return [
        *_orders(weights, config),
        *_shares(weights, config),
        *_matrices(weights, config),
        *_biases(config.n_head),
        *_exchanged(),
        *_others(config),
        *_rounded(),
    ]


def _reordered(index: Tensor, leaves: tuple[str, ...]) -> Change:
    names = [f"attn.c_attn.{leaf}" for leaf in leaves]
    return lambda weights, config: {name: weights[name].index_select(-1, index) for name in names}


def _nth_cut(number: int) -> Change:
    name = "attn.c_attn.weight"
    return lambda weights, config: {name: list(entries.cut_c_attn(weights[name]))[number].tensor}


def _cut_without_bias(number: int) -> Change:
    cut, bias = _nth_cut(number), "attn.c_attn.bias"
    return lambda weights, config: {**cut(weights, config), bias: torch.zeros_like(weights[bias])}


def _orders(weights: Mapping[str, Tensor], config: GPT2Config) -> Iterator[Variant]:
    """Yield c_attn's weight cut otherwise, and orders of its columns, of weight and bias or of one of them alone."""
    name = "attn.c_attn.weight"
    for number, one in enumerate(entries.cut_c_attn(weights[name])):
        words = f"c_attn's weight {one.words}"
        cut = misread(words, Fault(one.id, name, words), _nth_cut(number), *QKV)
        yield cut
        for lack, stages in (("values", QKV[2:]), ("queries, keys and values", (QKV[0], QKV[2]))):  # a key's bias changes nothing
            without = misread(lack, Fault("", "", ""), _cut_without_bias(number), *stages)
            faults = [Fault(one.id, name, words), Fault("missing-bias", "attn.c_attn", f"the {lack} have no bias")]
            yield Variant.of(f"{words}, {lack} without bias", faults, joined("", cut, without).replaced)
    for number, order in enumerate(entries.orders_of_c_attn(config)):
        if torch.equal(order.index, torch.arange(len(order.index))):
            continue  # GPT-2's own
        part = "attn.c_attn"
        for leaves, what in ((("weight", "bias"), "c_attn"), (("weight",), "c_attn's weight"), (("bias",), "c_attn's bias")):
            fault = Fault(order.id, part, f"{what} {order.words}")
            yield misread(f"{what} {number} {order.words}", fault, _reordered(order.index, leaves), *QKV)


def _third(share: int, leaves: tuple[str, ...], number: int) -> Change:
    """Return the change of q, k or v by the ``number``-th misreading of its weight (and of its bias, among its orders)."""

    def change(weights: Mapping[str, Tensor], config: GPT2Config) -> Mapping[str, Tensor]:
        out = {}
        for leaf in leaves:
            name = f"attn.c_attn.{leaf}"
            thirds = list(weights[name].chunk(3, -1))
            ways = list(entries.misread(name, thirds[share], config))
            if (place := number - (0 if leaf == "weight" else 2)) >= 0:
                thirds[share] = ways[place].tensor
            out[name] = torch.cat(thirds, -1)
        return out

    return change


def _shares(weights: Mapping[str, Tensor], config: GPT2Config) -> Iterator[Variant]:
    """Yield misreadings of the queries', keys' and values' projections, each alone and together."""
    name = "attn.c_attn.weight"
    for number, one in enumerate(entries.misread(name, weights[name].chunk(3, -1)[0], config)):
        every = []
        for share, letter in enumerate("qkv"):
            words = f"the projection to {letter} {one.words}"
            leaves = ("weight", "bias") if one.id == "head-layout" else ("weight",)
            every.append(misread(words, Fault(one.id, f"attn.{letter}", words), _third(share, leaves, number), f"attn.{letter}"))
        yield from every
        yield joined_as(f"q, k and v: each {one.words}", Fault(one.id, "attn.c_attn", f"q, k and v: each {one.words}"), *every)


def joined_as(label: str, fault: Fault, *variants: Variant) -> Variant:
    """Return several variants in one block as one fault."""
    whole = joined(label, *variants)
    return Variant.of(label, [fault], whole.replaced)


def _matrices(weights: Mapping[str, Tensor], config: GPT2Config) -> Iterator[Variant]:
    transposed = []
    for part in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        name = f"{part}.weight"
        for number, one in enumerate(entries.misread(name, weights[name], config)):

            def change(w: Mapping[str, Tensor], c: GPT2Config, name: str = name, number: int = number) -> Mapping[str, Tensor]:
                return {name: list(entries.misread(name, w[name], c))[number].tensor}

            yield misread(f"{name} {one.words}", Fault(one.id, name, f"the weight {one.words}"), change, part)
            if number == (1 if part == "attn.c_proj" else 0):
                transposed.append(misread(name, Fault(one.id, name, one.words), change, part))
    for part, by in itertools.product(MATRICES, (1, -1)):
        words = f"the weight is read one number too {'early' if by > 0 else 'late'}: each entry is its neighbour's in the file"
        fault = Fault("wrong-tensor", f"{part}.weight", words)
        yield misread(f"{part} rolled {by}", fault, _rolled(f"{part}.weight", by), *READERS[part], rare=True)
    words = "both matrices of the feed-forward were reshaped where they had to be transposed"
    yield joined_as(words, Fault("transposed", "mlp", words), *transposed[1:])
    words = "every matrix was reshaped where it had to be transposed"
    transposed.append(misread("", Fault("", "", ""), _nth_cut(0), *QKV))
    yield joined_as(words, Fault("transposed", "", words), *transposed)


def _zero(*names: str) -> Change:
    return lambda weights, config: {name: torch.zeros_like(weights[name]) for name in names}


def _rolled(name: str, by: int) -> Change:
    return lambda weights, config: {name: weights[name].flatten().roll(by).view_as(weights[name])}


def _times(name: str, times: int) -> Change:
    return lambda weights, config: {name: times * weights[name]}


def _share_zero(share: int) -> Change:
    def change(weights: Mapping[str, Tensor], config: GPT2Config) -> Mapping[str, Tensor]:
        thirds = list(weights["attn.c_attn.bias"].chunk(3))
        thirds[share] = torch.zeros_like(thirds[share])
        return {"attn.c_attn.bias": torch.cat(thirds)}

    return change


def _biases(heads: int) -> Iterator[Variant]:
    words = {"attn.c_attn": "queries, keys and values", "attn.c_proj": "attention's output projection"}
    words |= {"mlp.c_fc": "the feed-forward's first layer", "mlp.c_proj": "the feed-forward's second layer"}
    for part, what in words.items():
        yield misread(
            f"{part} no bias", Fault("missing-bias", part, f"{what}: no bias is added"), _zero(f"{part}.bias"), *READERS[part]
        )
    for share, what in ((0, "queries"), (2, "values")):
        fault = Fault("missing-bias", f"attn.{'qkv'[share]}", f"the {what} have no bias")
        yield misread(f"{what} no bias", fault, _share_zero(share), f"attn.{'qkv'[share]}")
    for part in words:
        fault = Fault("not-loaded", f"{part}.weight", "the weight is zero, as a fresh array is")
        yield misread(f"{part} zero", fault, _zero(f"{part}.weight"), *READERS[part])
    for times in sorted({2, heads} - {1}):
        fault = Fault("extra-bias", "attn.c_proj.bias", f"the bias is added {times} times")
        yield misread(f"attn.c_proj bias {times} times", fault, _times("attn.c_proj.bias", times), "attn.c_proj")
    linear = [f"{part}.bias" for part in words]
    yield misread(
        "linear no bias",
        Fault("missing-bias", "", "no linear layer has a bias"),
        _zero(*linear),
        *(stage for part in words for stage in READERS[part]),
    )
    every = [*linear, "ln_1.bias", "ln_2.bias"]
    yield misread(
        "nothing has a bias", Fault("missing-bias", "", "neither linear layers nor norms have a bias"), _zero(*every), *ALL
    )


def _exchanged() -> Iterator[Variant]:
    """Yield tensors of one block that have changed places, or of which one is held twice."""

    def holds(one: str, other: str) -> Change:
        return lambda weights, config: {one: weights[other]}

    def exchanges(*pairs: tuple[str, str]) -> Change:
        return lambda weights, config: {name: weights[source] for a, b in pairs for name, source in ((a, b), (b, a))}

    for one, other in (("attn.c_proj.bias", "mlp.c_proj.bias"), ("mlp.c_proj.bias", "attn.c_proj.bias")):
        fault = Fault("wrong-tensor", one.removesuffix(".bias"), f"{one} holds the checkpoint's {other}")
        yield misread(f"{one} is {other}", fault, holds(one, other), one.removesuffix(".bias"))
    words = "the second layer's bias is the beginning of the first one's, which has none"
    yield misread("bias handed down", Fault("wrong-tensor", "mlp.c_proj.bias", words), _handed_down, "mlp.c_fc", "mlp.c_proj")
    both = exchanges(("attn.c_proj.bias", "mlp.c_proj.bias"))
    words = "the biases of the two c_proj have changed places"
    yield misread("biases exchanged", Fault("wrong-tensor", "attn.c_proj", words), both, "attn.c_proj", "mlp.c_proj")
    for norm in ("ln_1", "ln_2"):
        words = f"{norm}: weight and bias have changed places"
        own = exchanges((f"{norm}.weight", f"{norm}.bias"))
        yield misread(f"{norm} weight is bias", Fault("wrong-tensor", norm, words, "weight and bias exchanged"), own, norm)
    words = "the parameters of ln_1 and ln_2 have changed places"
    norms = exchanges(("ln_1.weight", "ln_2.weight"), ("ln_1.bias", "ln_2.bias"))
    yield misread(words, Fault("norms-swapped", "ln_1", words), norms, "ln_1", "ln_2")


def _handed_down(weights: Mapping[str, Tensor], config: GPT2Config) -> Mapping[str, Tensor]:
    bias = weights["mlp.c_fc.bias"]
    return {"mlp.c_fc.bias": torch.zeros_like(bias), "mlp.c_proj.bias": bias[: config.n_embd]}


def _others(config: GPT2Config) -> Iterator[Variant]:
    """Yield blocks that hold the tensors of another block, in one module or in all."""
    steps = range(1, config.n_layer) if config.n_layer <= MAX_BLOCKS else (1, config.n_layer - 1)
    sources: dict[str, Callable[[int], int]] = {f"{step} on": partial(_on, step, config.n_layer) for step in steps}
    sources |= {"the first": lambda layer: 0, "the last": lambda layer: config.n_layer - 1}
    for which, source in sources.items():
        for module in (*READERS, ""):

            def blame(layer: int, source: Callable[[int], int] = source, module: str = module) -> tuple[Fault, ...]:
                if source(layer) == layer:
                    return ()
                other = ".".join(filter(None, (f"h.{source(layer)}", module)))
                words = f"it holds the checkpoint's {other}"
                return (Fault("wrong-tensor", module, words, f"another block's {module}"),)

            def replaced(
                simulation: Simulation, layer: int, source: Callable[[int], int] = source, module: str = module
            ) -> Stages:
                if source(layer) == layer:
                    return {}
                theirs = simulation.right(source(layer))
                modules = [module] if module else [*READERS]
                return {stage: theirs[stage] for one in modules for stage in READERS[one]}

            yield Variant(f"{module} of {which}", blame, replaced)
        for module, leaf in itertools.product(READERS, ("weight", "bias")):
            yield _leaf(f"{module}.{leaf}", which, source)


def _leaf(name: str, which: str, source: Callable[[int], int]) -> Variant:
    """Return the variant of a block that holds another block's tensor ``name``."""

    def blame(layer: int) -> tuple[Fault, ...]:
        if source(layer) == layer:
            return ()
        return (Fault("wrong-tensor", name, f"it holds the checkpoint's h.{source(layer)}.{name}", f"another block's {name}"),)

    def replaced(simulation: Simulation, layer: int) -> Stages:
        if source(layer) == layer:
            return {}
        held = {name: simulation.weights(source(layer))[name]}
        return {stage: reading(simulation, layer, stage, lambda: held) for stage in READERS[name.rpartition(".")[0]]}

    return Variant(f"{name} of {which}", blame, replaced, rare=True)


def _on(step: int, layers: int, layer: int) -> int:
    return (layer + step) % layers


def _rounded() -> Iterator[Variant]:
    for dtype in (*NARROW, SCALED, CUT, "int8", "int8 a tensor"):
        for modules in ((),) if dtype in (SCALED, CUT) else SOME_MATRICES:

            def change(
                weights: Mapping[str, Tensor], config: GPT2Config, dtype: str = dtype, modules: tuple[str, ...] = modules
            ) -> Mapping[str, Tensor]:
                matrices = {name: tensor for name, tensor in weights.items() if not modules or name.startswith(modules)}
                if modules or dtype.startswith("int8"):  # alone, or quantised: the matrices, not biases and norms
                    matrices = {name: tensor for name, tensor in matrices.items() if tensor.ndim > 1}
                return {name: narrowed(dtype, tensor) for name, tensor in matrices.items()}

            which = f"the weights of {' and '.join(modules)}" if len(modules) > 1 else "the weights"
            fault = Fault("reduced-precision", "", f"{which} are the checkpoint's rounded to {dtype}")
            fault = replace(fault, part=f"{modules[0]}.weight") if len(modules) == 1 else fault
            stages = [stage for module in modules or READERS for stage in READERS[module]]
            rare = bool(modules) and (len(modules) > 1 or dtype in ("float8_e4m3fn", "int8 a tensor"))
            yield misread(f"{' '.join(modules)} rounded to {dtype}", fault, change, *stages, rare=rare)
