"""Numbers in fewer bits: values at any node, inputs of products, parameters, alone and all together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Changed, changed, family
from gpt2.port.alternatives.loading import MATRICES, NODES_OF, Change, held, read
from gpt2.port.alternatives.norms import normed
from gpt2.port.graph import MODULES, READS, Edits, Formula, Function, Model, Site, affine

ID = "reduced-precision"
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
PIECE = 1 << 18  # entries that are rounded at once
LETTERS = {"kv": "keys and values are", "k": "the keys are", "v": "the values are", "qkv": "queries, keys and values are"}
VALUES = {
    "ln_1": "the norm before attention is",
    "attn.scores": "the scores are",
    "attn.weights": "the attention weights are",
    "attn.heads": "the merged heads are",
    "attn.c_proj": "attention's result is",
    "mid": "the stream behind attention is",
    "ln_2": "the norm before the feed-forward is",
    "mlp.c_fc": "what enters the activation is",
    "mlp.act": "the activation is",
    "mlp.c_proj": "the feed-forward's result is",
    "": "the stream behind the block is",
}
RESULTS = ("ln_1", "attn.scores", "attn.heads", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.act", "mlp.c_proj")
GROUPS: tuple[tuple[str, ...], ...] = (*((one,) for one in MATRICES), MATRICES, MATRICES[1:], MATRICES[:2], MATRICES[2:])


def mantissa(bits: int, x: Tensor, cut: bool = False) -> Tensor:
    """Return ``x`` with so many bits behind the first one, rounded to nearest or cut off."""
    flat = x.reshape(-1)
    out = torch.empty_like(flat)
    for some, own in zip(flat.split(PIECE), out.split(PIECE), strict=True):  # at once, a table would take five times its memory
        part, exponent = some.frexp()
        part *= 2.0 ** (bits + 1)
        torch.ldexp(part.trunc_() if cut else part.round_(), exponent.sub_(bits + 1), out=own)
    return out.view(x.shape)


def in_integers(bits: int, axes: tuple[int, ...], x: Tensor) -> Tensor:
    """Return ``x`` in integers of so many bits, with one scale for all along ``axes``; for all of it if there are none."""
    step = (torch.maximum(x.amax(axes, keepdim=True), -x.amin(axes, keepdim=True)) / (2 ** (bits - 1) - 1)).clamp(min=1e-30)
    return (x / step).round_().mul_(step)


FLOATS: dict[str, Function] = {"bfloat16": partial(mantissa, 7), "float16": partial(mantissa, 10)}
CACHED: dict[str, Function] = {**FLOATS, "8 bits, a scale for each token and head": partial(in_integers, 8, (-1,))}
INTEGERS: dict[str, Function] = {"int8": partial(in_integers, 8, (0,)), "int8 a tensor": partial(in_integers, 8, ())}


@family
def values(model: Model) -> Iterator[Alternative]:
    """Yield values of one node in fewer bits, and of all nodes together."""
    for dtype, narrow in FLOATS.items():
        for node, words in VALUES.items():
            where, edits = "attn" if node == "attn.weights" else node, changed(narrow, node)
            yield Alternative(ID, f"{words} rounded to {dtype}", edits, where, rare=True, shared=node == "attn.weights")
        yield Alternative(ID, f"the last norm is rounded to {dtype}", outside=changed(narrow, "ln_f"), rare=True)
        words = f"the activation takes and gives {dtype}, as a table of its values does"
        yield Alternative(
            ID, words, changed(narrow, "mlp.c_fc", "mlp.act"), "mlp.act", fix="compute it, without a table of 16 bits"
        )
        words = f"the results of norms, projections and activations are rounded to {dtype}"
        yield Alternative(ID, words, changed(narrow, *RESULTS), "", rare=True, shared=True)
    for (dtype, narrow), (letters, what) in itertools.product(CACHED.items(), LETTERS.items()):
        edits = changed(narrow, *(f"attn.{letter}h" for letter in letters))
        fix = "keep the cache in float32, as k and v are"
        yield Alternative(ID, f"{what} rounded to {dtype}", edits, "attn", fix=fix, rare=True, shared=True)


@family
def products(model: Model) -> Iterator[Alternative]:
    """Yield programs that round both factors of every product with a matrix, and those that keep the stream in fewer bits."""
    for dtype, narrow in FLOATS.items():
        edits: dict[str, Formula] = {node: _product(node, narrow) for node in MODULES}
        words = f"both factors of every product with a matrix are rounded to {dtype}"
        yield Alternative(ID, words, edits, "", changed(narrow, "ln_f", "head"), rare=True, shared=True)
        words = f"the stream is rounded to {dtype} behind each sum"
        yield Alternative(ID, words, changed(narrow, "mid", ""), "", changed(narrow, "embed"), rare=True, shared=True)


def _product(node: str, narrow: Function) -> Formula:
    source = READS[node][0]

    def formula(c: Site, s: dict[str, Tensor]) -> Tensor:
        weight, bias = c.linear(node)
        return affine(narrow(s[source]), narrow(weight), bias)

    return formula


@family
def parameters(model: Model) -> Iterator[Alternative]:
    """Yield parameters in fewer bits: all of them, or some matrices."""
    narrowing: dict[str, Function] = {name: lambda x, dtype=dtype: x.to(dtype).to(x) for name, dtype in NARROW.items()}
    narrowing["bfloat16, the other digits cut off"] = partial(mantissa, 7, cut=True)  # the upper half of a float32
    for dtype, narrow in {**narrowing, **INTEGERS}.items():
        quantising, words = dtype in INTEGERS, f"the weights are the checkpoint's rounded to {dtype}"
        edits = dict(_rounded(narrow, MATRICES, not quantising))
        outside: dict[str, Formula] = {
            "embed": partial(_embedded, narrow, not quantising),
            "head": Changed("head", lambda c, y, f=narrow: f(y.t()).t()),
        }
        if not quantising:
            edits |= {part: normed(part, partial(_norm, narrow)) for part in ("ln_1", "ln_2")}
            outside["ln_f"] = normed("ln_f", partial(_norm, narrow))
        yield Alternative(ID, words, edits, "", outside)
        yield Alternative(ID, f"the head's {words}", outside={"head": outside["head"]}, rare=True)
        for modules in GROUPS:
            which = f"the weights of {' and '.join(modules)}" if len(modules) > 1 else "the weights"
            where = f"{modules[0]}.weight" if len(modules) == 1 else ""
            rare = len(modules) > 1 or dtype in ("float8_e4m3fn", "int8 a tensor")
            words = f"{which} are the checkpoint's rounded to {dtype}"
            yield Alternative(ID, words, _rounded(narrow, modules, False), where, rare=rare)


def _rounded(narrow: Function, modules: tuple[str, ...], biases: bool) -> Edits:
    change: Change = lambda c, module: (  # noqa: E731
        narrow(held(c, module)[0]),
        narrow(held(c, module)[1]) if biases else held(c, module)[1],
    )
    return read(change, *(node for module in modules for node in NODES_OF[module]))


def _norm(narrow: Function, c: Site, x: Tensor, part: str) -> Tensor:
    weight, bias = (narrow(one) for one in c.numbers(part))
    return torch.layer_norm(x, weight.shape, weight, bias, c.config.layer_norm_epsilon)


def _embedded(narrow: Function, alone: bool, c: Site, s: dict[str, Tensor]) -> Tensor:
    """Return the embeddings of rounded tables; ``alone``: each entry is rounded alone, so those of these tokens are enough."""
    wte, wpe = (c.model.state[f"{name}.weight"] for name in ("wte", "wpe"))
    ids, places = c.model.ids[:, c.begin : c.end], slice(c.begin, c.end)
    return narrow(wte[ids]) + narrow(wpe[places]) if alone else narrow(wte)[ids] + narrow(wpe)[places]
