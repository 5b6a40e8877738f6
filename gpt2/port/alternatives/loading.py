"""Parameters that are read otherwise than they lie in the checkpoint: turned, reordered, cut, from another place or none."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.port.alternatives import entries
from gpt2.port.alternatives.alternative import Alternative
from gpt2.port.alternatives.norms import normed
from gpt2.port.graph import MODULES, READS, RIGHT, Edits, Formula, Function, Model, Site, State, affine

Pair = tuple[Tensor, Tensor]  # weight (I, O) and bias (O,)
Change = Callable[[Site, str], Pair]  # from a module's name to what it holds
NODES_OF: dict[str, tuple[str, ...]] = {}
for _node, _module in MODULES.items():
    NODES_OF[_module] = (*NODES_OF.get(_module, ()), _node)
MATRICES = tuple(NODES_OF)
WHAT = {"attn.c_attn": "queries, keys and values", "attn.c_proj": "attention's output projection"}
OTHER = {"attn.c_proj": "mlp.c_proj", "mlp.c_proj": "attn.c_proj"}
WHAT |= {"mlp.c_fc": "the feed-forward's first layer", "mlp.c_proj": "the feed-forward's second layer"}


def read(change: Change, *nodes: str) -> Edits:
    """Return the edits of linear ``nodes`` whose module holds what ``change`` gives."""
    return {node: partial(_linear, change, node) for node in nodes}


def _linear(change: Change, node: str, c: Site, s: State) -> Tensor:
    return affine(s[READS[node][0]], *c.linear(node, change(c, MODULES[node])))


def altered(weight: Function = lambda x: x, bias: Function = lambda x: x) -> Change:
    return lambda c, module: (weight(c.held(module)[0]), bias(c.held(module)[1]))


def matrices(model: Model) -> Iterator[Alternative]:
    """Yield matrices that are turned or reordered, one at a time and together; of c_attn, the bias alike, or alone."""
    for module, nodes in NODES_OF.items():
        name = f"{module}.weight"
        weight, is_c_attn = model.state[f"h.0.{name}"], module == "attn.c_attn"
        some = entries.misread_c_attn(weight, model.config) if is_c_attn else entries.misread(name, weight, model.config)
        for one in some:
            of_weight = read(altered(one.change), *nodes)
            if is_c_attn and one not in (entries.RESHAPED, entries.CUT):
                both = read(altered(one.change, one.change), *nodes)
                ways = {"c_attn": both, "c_attn's weight": of_weight, "c_attn's bias": read(altered(bias=one.change), *nodes)}
                yield from (Alternative(one.id, f"{what} {one.words}", edits, module) for what, edits in ways.items())
            else:
                yield Alternative(one.id, f"the weight {one.words}", of_weight, name)
    for letters in ("q", "k", "v", "qkv"):
        words = f"the projection to {letters} is transposed" if len(letters) == 1 else "q, k and v: each is transposed"
        each = altered(lambda w: torch.cat([third.t() for third in w.chunk(3, 1)], 1))
        turned = read(each, *(f"attn.{one}" for one in letters))
        yield Alternative("transposed", words, turned, "attn.c_attn" if letters == "qkv" else None)
    words = "both matrices of the feed-forward were reshaped where they had to be transposed"
    yield Alternative("transposed", words, read(altered(entries.RESHAPED.change), "mlp.c_fc", "mlp.c_proj"), "mlp")
    words = "every matrix was reshaped where it had to be transposed"
    yield Alternative("transposed", words, read(altered(entries.RESHAPED.change), *MODULES), "")


def biases(model: Model) -> Iterator[Alternative]:
    """Yield biases that are lost, added several times, or taken from elsewhere."""
    for module, what in WHAT.items():
        edits = read(altered(bias=torch.zeros_like), *NODES_OF[module])
        yield Alternative("missing-bias", f"{what}: no bias is added", edits, module)
    linear = read(altered(bias=torch.zeros_like), *MODULES)
    yield Alternative("missing-bias", "no linear layer has a bias", linear, "")
    norms = {part: normed(part, lambda c, x, part: c.norm(x, part) - c.numbers(part)[1]) for part in ("ln_1", "ln_2")}
    yield Alternative("missing-bias", "neither linear layers nor norms have a bias", {**norms, **linear}, "")
    lent: Change = lambda c, module: (c.held(module)[0], c.held(OTHER[module])[1])  # noqa: E731
    for one, other in OTHER.items():
        twice = read(altered(bias=lambda b: 2 * b), one)
        yield Alternative("extra-bias", "the bias is added 2 times", twice, f"{one}.bias")
        yield Alternative("wrong-tensor", f"{one}.bias holds the checkpoint's {other}.bias", read(lent, one), one)
    words = "the biases of the two c_proj have changed places"
    yield Alternative("wrong-tensor", words, read(lent, *OTHER), "attn.c_proj")
    words = "the second layer's bias is the beginning of the first one's"
    begin: Change = lambda c, module: (c.held(module)[0], c["mlp.c_fc.bias"][: c.config.n_embd])  # noqa: E731
    yield Alternative("wrong-tensor", words, read(begin, "mlp.c_proj"), "mlp.c_proj.bias")


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
        edits: dict[str, Formula] = {
            node: lambda c, s, f=RIGHT[node], n=source: f(Site(c.model, n(c.layer), c.begin, c.end), s) for node in nodes
        }
        words = f"it holds the checkpoint's tensors of {which}"
        yield Alternative("wrong-tensor", words, edits, module, silent=lambda layer, source=source: source(layer) == layer)
