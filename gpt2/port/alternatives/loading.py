"""Parameters that are read otherwise than they lie in the checkpoint: turned, reordered, cut, from another place or none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.alternatives import entries
from gpt2.port.alternatives.alternative import Alternative, family
from gpt2.port.alternatives.norms import normed
from gpt2.port.graph import MODULES, READS, THIRDS, Edits, Formula, Model, Site, State, affine

Pair = tuple[Tensor, Tensor]  # weight (I, O) and bias (O,)
Change = Callable[[Site, str], Pair]  # from a module's name to what it holds
NODES_OF: dict[str, tuple[str, ...]] = {}
for _node, _module in MODULES.items():
    NODES_OF[_module] = (*NODES_OF.get(_module, ()), _node)
MATRICES = tuple(NODES_OF)
WHAT = {"attn.c_attn": "queries, keys and values", "attn.c_proj": "attention's output projection"}
WHAT |= {"mlp.c_fc": "the feed-forward's first layer", "mlp.c_proj": "the feed-forward's second layer"}


def read(change: Change, *nodes: str) -> Edits:
    """Return the edits of linear ``nodes`` whose module holds what ``change`` gives."""
    return {node: partial(_linear, change, node) for node in nodes}


def _linear(change: Change, node: str, c: Site, s: State) -> Tensor:
    module = MODULES[node]
    weight, bias = c.model.once((change, module, c.layer), lambda: change(c, module))
    if node in THIRDS:
        weight, bias = weight.chunk(3, 1)[THIRDS[node]], bias.chunk(3)[THIRDS[node]]
    return affine(s[READS[node][0]], weight, bias)


def held(c: Site, module: str) -> Pair:
    return c[f"{module}.weight"], c[f"{module}.bias"]


def weighted(change: Callable[[Tensor], Tensor], unbiased: bool = False) -> Change:
    """Return the change of a module's weight, with no bias if ``unbiased``."""

    def changed(c: Site, module: str) -> Pair:
        weight, bias = held(c, module)
        return change(weight), torch.zeros_like(bias) if unbiased else bias

    return changed


def biased(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda c, module: (held(c, module)[0], change(held(c, module)[1]))


def _reshaped(w: Tensor) -> Tensor:
    return w.reshape(w.shape[::-1]).t()


def _nth(number: int, make: Callable[[Tensor], Iterator[entries.Misreading]]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: list(make(tensor))[number].tensor


@family
def c_attn(model: Model) -> Iterator[Alternative]:
    """Yield c_attn's weight cut otherwise, and orders of its columns, of weight and bias or of one of them alone."""
    config, name, nodes = model.config, "attn.c_attn.weight", NODES_OF["attn.c_attn"]
    weight = model.state[f"h.0.{name}"]
    for number, one in enumerate(entries.cut_c_attn(weight)):
        words, change = f"c_attn's weight {one.words}", _nth(number, entries.cut_c_attn)
        yield Alternative(one.id, words, read(weighted(change), *nodes), name)
        also = (("missing-bias", "queries, keys and values have no bias"),)
        yield Alternative(one.id, words, read(weighted(change, unbiased=True), *nodes), name, also=also, rare=True)
    for order in entries.orders_of_c_attn(config):
        if torch.equal(order.index, torch.arange(len(order.index))):
            continue  # GPT-2's own
        for leaves, what in (((0, 1), "c_attn"), ((0,), "c_attn's weight"), ((1,), "c_attn's bias")):
            edits = read(partial(_reordered, order.index, leaves), *nodes)
            yield Alternative(order.id, f"{what} {order.words}", edits, "attn.c_attn")
    yield from _thirds(model)


def _reordered(index: Tensor, leaves: tuple[int, ...], c: Site, module: str) -> Pair:
    weight, bias = (one.index_select(-1, index) if leaf in leaves else one for leaf, one in enumerate(held(c, module)))
    return weight, bias


def _thirds(model: Model) -> Iterator[Alternative]:
    """Yield projections to queries, keys and values that are transposed, or have no bias."""
    for letters in ("q", "k", "v", "qkv"):
        words = f"the projection to {letters} is transposed" if len(letters) == 1 else "q, k and v: each is transposed"
        turned: dict[str, Formula] = {f"attn.{one}": partial(_third, one, True) for one in letters}
        yield Alternative("transposed", words, turned, "attn.c_attn" if letters == "qkv" else f"attn.{letters}")
    for letter, what in (("q", "queries"), ("v", "values")):
        lost: dict[str, Formula] = {f"attn.{letter}": partial(_third, letter, False)}
        yield Alternative("missing-bias", f"the {what} have no bias", lost)


def _third(letter: str, turned: bool, c: Site, s: State) -> Tensor:
    weight, bias = c.linear(f"attn.{letter}")
    return s["ln_1"] @ weight.t() + bias if turned else s["ln_1"] @ weight


@family
def matrices(model: Model) -> Iterator[Alternative]:
    """Yield matrices that are turned, reordered or zero, one at a time and together."""
    for module in MATRICES[1:]:
        name = f"{module}.weight"
        make = partial(_misread, name, model.config)
        for number, one in enumerate(make(model.state[f"h.0.{name}"])):
            edits = read(weighted(_nth(number, make)), *NODES_OF[module])
            yield Alternative(one.id, f"the weight {one.words}", edits, name)
    for module in MATRICES:
        words = "the weight is zero, as a fresh array is"
        yield Alternative("not-loaded", words, read(weighted(torch.zeros_like), *NODES_OF[module]), f"{module}.weight")
    words = "both matrices of the feed-forward were reshaped where they had to be transposed"
    yield Alternative("transposed", words, read(weighted(_reshaped), "mlp.c_fc", "mlp.c_proj"), "mlp")
    words = "every matrix was reshaped where it had to be transposed"
    yield Alternative("transposed", words, read(weighted(_reshaped), *MODULES), "")


def _misread(name: str, config: GPT2Config, weight: Tensor) -> Iterator[entries.Misreading]:
    return entries.misread(name, weight, config)


@family
def biases(model: Model) -> Iterator[Alternative]:
    """Yield biases that are lost, added several times, or taken from elsewhere."""
    for module, what in WHAT.items():
        edits = read(biased(torch.zeros_like), *NODES_OF[module])
        yield Alternative("missing-bias", f"{what}: no bias is added", edits, module)
    for module in ("attn.c_proj", "mlp.c_proj"):
        twice = read(biased(lambda b: 2 * b), module)
        yield Alternative("extra-bias", "the bias is added 2 times", twice, f"{module}.bias")
    linear = read(biased(torch.zeros_like), *MODULES)
    yield Alternative("missing-bias", "no linear layer has a bias", linear, "")
    norms: dict[str, Formula] = {
        part: normed(part, lambda c, x, part: c.norm(x, part) - c.numbers(part)[1]) for part in ("ln_1", "ln_2")
    }
    yield Alternative("missing-bias", "neither linear layers nor norms have a bias", {**norms, **linear}, "")
    other = {"attn.c_proj": "mlp.c_proj", "mlp.c_proj": "attn.c_proj"}
    lent: Change = lambda c, module: (held(c, module)[0], held(c, other[module])[1])  # noqa: E731
    for one in other:
        yield Alternative("wrong-tensor", f"{one}.bias holds the checkpoint's {other[one]}.bias", read(lent, one), one)
    words = "the biases of the two c_proj have changed places"
    yield Alternative("wrong-tensor", words, read(lent, *other), "attn.c_proj")
    words = "the second layer's bias is the beginning of the first one's"
    begin: Change = lambda c, module: (held(c, module)[0], c["mlp.c_fc.bias"][: c.config.n_embd])  # noqa: E731
    yield Alternative("wrong-tensor", words, read(begin, "mlp.c_proj"), "mlp.c_proj.bias")


@family
def other_blocks(model: Model) -> Iterator[Alternative]:
    """Yield blocks that hold the tensors of another block: all of them, or those of one module."""
    layers = model.config.n_layer
    sources: dict[str, Callable[[int], int]] = {
        "the next block, the last one those of the first": lambda layer: (layer + 1) % layers,
        "the block before, the first one those of the last": lambda layer: (layer - 1) % layers,
        "the first block": lambda layer: 0,
        "the last block": lambda layer: layers - 1,
    }
    modules = {**NODES_OF, "ln_1": ("ln_1",), "ln_2": ("ln_2",)}
    modules[""] = tuple(node for some in modules.values() for node in some)
    for (which, source), (module, nodes) in itertools.product(sources.items(), modules.items()) if layers > 1 else ():
        edits: dict[str, Formula] = {node: partial(_elsewhere, node, source) for node in nodes}
        words, same = f"it holds the checkpoint's tensors of {which}", partial(_same, source)
        yield Alternative("wrong-tensor", words, edits, module, silent=same)


def _same(source: Callable[[int], int], layer: int) -> bool:
    return source(layer) == layer


def _elsewhere(node: str, source: Callable[[int], int], c: Site, s: State) -> Tensor:
    return c.at(source(c.layer)).right(node, s)
