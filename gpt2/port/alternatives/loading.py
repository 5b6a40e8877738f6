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
from gpt2.port.alternatives.norms import SOURCES, normed
from gpt2.port.graph import MODULES, READS, THIRDS, Edits, Formula, Model, Site, State, affine

Pair = tuple[Tensor, Tensor]  # weight (I, O) and bias (O,)
Change = Callable[[Site, str], Pair]  # from a module's name to what it holds
NODES_OF: dict[str, tuple[str, ...]] = {}
for _node, _module in MODULES.items():
    NODES_OF[_module] = (*NODES_OF.get(_module, ()), _node)
MATRICES = tuple(NODES_OF)
WHAT = {"attn.c_attn": "queries, keys and values", "attn.c_proj": "attention's output projection"}
WHAT |= {"mlp.c_fc": "the feed-forward's first layer", "mlp.c_proj": "the feed-forward's second layer"}
MAX_BLOCKS = 4  # beyond that, a tensor of another block is of a neighbour or of the first
WIDE = ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")  # of more numbers than width times width


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


def _turned(w: Tensor) -> Tensor:
    """Return what a matrix is that was not turned, or was reshaped where it is not square."""
    return w.t() if w.shape[0] == w.shape[1] else _reshaped(w)


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
        for lack, letters in (("values", "v"), ("queries, keys and values", "qkv")):
            without = partial(_cut_without, change, letters)
            also = (("missing-bias", f"the {lack} have no bias"),)
            yield Alternative(one.id, words, read(without, *nodes), name, also=also, rare=True)
    for order in entries.orders_of_c_attn(config):
        if torch.equal(order.index, torch.arange(len(order.index))):
            continue  # GPT-2's own
        for leaves, what in (((0, 1), "c_attn"), ((0,), "c_attn's weight"), ((1,), "c_attn's bias")):
            edits = read(partial(_reordered, order.index, leaves), *nodes)
            yield Alternative(order.id, f"{what} {order.words}", edits, "attn.c_attn")
    yield from _thirds(model)


def _cut_without(change: Callable[[Tensor], Tensor], letters: str, c: Site, module: str) -> Pair:
    weight, bias = held(c, module)
    parts = [torch.zeros_like(part) if one in letters else part for one, part in zip("qkv", bias.chunk(3), strict=True)]
    return change(weight), torch.cat(parts)


def _reordered(index: Tensor, leaves: tuple[int, ...], c: Site, module: str) -> Pair:
    weight, bias = (one.index_select(-1, index) if leaf in leaves else one for leaf, one in enumerate(held(c, module)))
    return weight, bias


def _thirds(model: Model) -> Iterator[Alternative]:
    """Yield misreadings of the queries', keys' and values' projections, each alone and together."""
    name = "attn.c_attn.weight"
    for number, one in enumerate(entries.misread(name, model.state[f"h.0.{name}"].chunk(3, -1)[0], model.config)):
        for letters in ("q", "k", "v", "qkv"):
            words = f"the projection to {letters} {one.words}" if letters != "qkv" else f"q, k and v: each {one.words}"
            change = partial(_third_misread, letters, number, one.id == "head-layout")
            where = "attn.c_attn" if letters == "qkv" else f"attn.{letters}"
            yield Alternative(one.id, words, read(change, *(f"attn.{one}" for one in letters)), where)
    for letters, what in (("q", "queries"), ("v", "values")):
        change = partial(_cut_without, lambda w: w, letters)
        yield Alternative("missing-bias", f"the {what} have no bias", read(change, f"attn.{letters}"))
    for letters, what in (("q", "queries"), ("k", "keys"), ("v", "values")):
        zero: dict[str, Formula] = {f"attn.{letters}": lambda c, s, one=letters: c.linear(f"attn.{one}")[1].expand_as(s["ln_1"])}
        yield Alternative("not-loaded", f"the weight of the {what} is zero, as a fresh array is", zero, rare=True)


def _third_misread(letters: str, number: int, both: bool, c: Site, module: str) -> Pair:
    """Return c_attn with the ``number``-th misreading of some of its thirds; ``both``: of the bias as well."""
    thirds = [list(one.chunk(3, -1)) for one in held(c, module)]
    for share, letter in enumerate("qkv"):
        if letter in letters:
            ways = list(entries.misread(f"{module}.weight", thirds[0][share], c.config))
            thirds[0][share] = ways[number].tensor
            if both:
                orders = [one for one in entries.misread(f"{module}.bias", thirds[1][share], c.config) if one.id == "head-layout"]
                thirds[1][share] = orders[number - (len(ways) - len(orders))].tensor
    weight, bias = (torch.cat(one, -1) for one in thirds)
    return weight, bias


@family
def matrices(model: Model) -> Iterator[Alternative]:
    """Yield matrices that are turned, reordered, shifted or zero, one at a time and together."""
    for module in MATRICES[1:]:
        name = f"{module}.weight"
        make = partial(_misread, name, model.config)
        for number, one in enumerate(make(model.state[f"h.0.{name}"])):
            edits = read(weighted(_nth(number, make)), *NODES_OF[module])
            yield Alternative(one.id, f"the weight {one.words}", edits, name)
    for module, by in itertools.product(MATRICES, (1, -1)):
        words = f"the weight is read one number too {'early' if by > 0 else 'late'}: each entry is its neighbour's in the file"
        change = weighted(lambda w, by=by: w.flatten().roll(by).view_as(w))
        yield Alternative("wrong-tensor", words, read(change, *NODES_OF[module]), f"{module}.weight", rare=True)
    for module in MATRICES:
        words = "the weight is zero, as a fresh array is"
        yield Alternative("not-loaded", words, read(weighted(torch.zeros_like), *NODES_OF[module]), f"{module}.weight")
    words = "both matrices of the feed-forward were reshaped where they had to be transposed"
    yield Alternative("transposed", words, read(weighted(_reshaped), "mlp.c_fc", "mlp.c_proj"), "mlp")
    words = "every matrix was reshaped where it had to be transposed"
    yield Alternative("transposed", words, read(weighted(_reshaped), *MODULES), "")
    words = "no matrix was turned: square ones are transposed, others reshaped"
    yield Alternative("transposed", words, read(weighted(_turned), *MODULES), "", rare=True)


def _misread(name: str, config: GPT2Config, weight: Tensor) -> Iterator[entries.Misreading]:
    return entries.misread(name, weight, config)


@family
def biases(model: Model) -> Iterator[Alternative]:
    """Yield biases that are lost, added several times, or taken from elsewhere."""
    for module, what in WHAT.items():
        edits = read(biased(torch.zeros_like), *NODES_OF[module])
        yield Alternative("missing-bias", f"{what}: no bias is added", edits, module)
    for times in sorted({2, model.config.n_head} - {1}):
        edits = read(biased(lambda b, times=times: times * b), "attn.c_proj")
        yield Alternative("extra-bias", f"the bias is added {times} times", edits, "attn.c_proj.bias")
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
    words = "the second layer's bias is the beginning of the first one's, which has none"
    width = model.config.n_embd
    edits = read(biased(torch.zeros_like), "mlp.c_fc")
    edits = {**edits, **read(lambda c, module: (held(c, module)[0], c["mlp.c_fc.bias"][:width]), "mlp.c_proj")}
    yield Alternative("wrong-tensor", words, edits, "mlp.c_proj.bias")


@family
def other_blocks(model: Model) -> Iterator[Alternative]:
    """Yield blocks that hold the tensors of another block: all, one module's, or one tensor."""
    layers = model.config.n_layer
    steps = range(1, layers) if layers <= MAX_BLOCKS else (1, layers - 1)
    sources: dict[str, Callable[[int], int]] = {
        f"the block {step} behind it, beginning anew at the end": partial(_on, step, layers) for step in steps
    }
    sources |= {"the first block": lambda layer: 0, "the last block": lambda layer: layers - 1}
    modules = {**NODES_OF, "ln_1": ("ln_1",), "ln_2": ("ln_2",)}
    for which, source in sources.items() if layers > 1 else ():
        for module, nodes in {**modules, "": tuple(node for some in modules.values() for node in some)}.items():
            edits: dict[str, Formula] = {node: partial(_elsewhere, node, source) for node in nodes}
            same = partial(_same, source)
            words = f"it holds the checkpoint's tensors of {which}"
            yield Alternative("wrong-tensor", words, edits, module, silent=same)
        for module, leaf in itertools.product(modules, (0, 1)):
            name = f"{module}.{('weight', 'bias')[leaf]}"
            words = f"it holds the checkpoint's {name} of {which}"
            yield Alternative("wrong-tensor", words, _leaf(module, leaf, source), name, silent=same, rare=True)


def _on(step: int, layers: int, layer: int) -> int:
    return (layer + step) % layers


def _same(source: Callable[[int], int], layer: int) -> bool:
    return source(layer) == layer


def _elsewhere(node: str, source: Callable[[int], int], c: Site, s: State) -> Tensor:
    return c.at(source(c.layer)).right(node, s)


def _leaf(module: str, leaf: int, source: Callable[[int], int]) -> Edits:
    """Return the edits of a module that holds another block's weight or bias."""

    def both(c: Site, module: str, numbers: Callable[[Site], Pair]) -> Pair:
        own, other = numbers(c), numbers(c.at(source(c.layer)))
        return (other[0], own[1]) if leaf == 0 else (own[0], other[1])

    if module not in SOURCES:
        return read(lambda c, module: both(c, module, lambda site: held(site, module)), *NODES_OF[module])

    def make(c: Site, x: Tensor, part: str) -> Tensor:
        weight, bias = both(c, part, lambda site: site.numbers(part))
        return torch.layer_norm(x, weight.shape, weight, bias, c.config.layer_norm_epsilon)

    return {module: normed(module, make)}


@family
def strides(model: Model) -> Iterator[Alternative]:
    """Yield tensors of a file that stacks each kind over the blocks, of which block n's begins at a wrong multiple."""
    width = model.config.n_embd
    for module, (leaf, turned) in itertools.product(WIDE, (("weight", False), ("weight", True), ("bias", False))):
        stride, size = width * width if leaf == "weight" else width, model.state[f"h.0.{module}.{leaf}"].numel()
        if size == stride or model.config.n_layer == 1:
            continue
        words = f"block n reads it from number {stride} n on of all blocks' tensors, which have {size} each"
        words += ", stored as [out, in]" * turned
        edits = read(partial(_strided, leaf, turned, stride), *NODES_OF[module])
        yield Alternative("wrong-tensor", words, edits, f"{module}.{leaf}", silent=lambda n: n == 0, shared=True)


def _strided(leaf: str, turned: bool, stride: int, c: Site, module: str) -> Pair:
    def of(layer: int) -> Tensor:
        tensor = c.at(layer)[f"{module}.{leaf}"]
        return tensor.T if turned else tensor

    size = of(0).numel()
    first, begin = divmod(c.layer * stride, size)
    flat = torch.cat([of(first).flatten(), of(min(first + 1, c.layer)).flatten()])
    own = flat[begin : begin + size].view(of(0).shape)
    weight, bias = held(c, module)
    return (own.T if turned else own, bias) if leaf == "weight" else (weight, own)
