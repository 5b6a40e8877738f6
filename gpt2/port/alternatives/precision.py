"""Numbers in fewer bits: values at any node, parameters, alone and all together."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, changed
from gpt2.port.alternatives.loading import MATRICES, NODES_OF, altered, read
from gpt2.port.alternatives.norms import layer_norm, normed
from gpt2.port.graph import Edits, Function, Model, Site, State

ID = "reduced-precision"
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
PIECE = 1 << 18  # entries that are rounded at once
RESULTS = ("ln_1", "attn.scores", "attn.heads", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.act", "mlp.c_proj")
CACHES = {"keys and values are": "kv", "the keys are": "k", "the values are": "v", "queries, keys and values are": "qkv"}
# The nodes whose values are rounded, each alone, and several together.
ROUNDED = (*RESULTS[:2], "attn.weights", *RESULTS[2:4], "mid", *RESULTS[4:], "", "ln_f")
TOGETHER = {
    "the results of norms, projections and activations are": RESULTS,
    "the stream behind each sum is": ("mid", "", "embed"),
}
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


def in_integers(axes: tuple[int, ...], x: Tensor) -> Tensor:
    """Return ``x`` in integers of 8 bits, with one scale for all along ``axes``; for all of it if there are none."""
    step = (torch.maximum(x.amax(axes, keepdim=True), -x.amin(axes, keepdim=True)) / 127).clamp(min=1e-30)
    return (x / step).round_().mul_(step)


FLOATS: dict[str, Function] = {"bfloat16": partial(mantissa, 7), "float16": partial(mantissa, 10)}
CACHED: dict[str, Function] = {**FLOATS, "8 bits, a scale for each token and head": partial(in_integers, (-1,))}
INTEGERS: dict[str, Function] = {"int8": partial(in_integers, (0,)), "int8 a tensor": partial(in_integers, ())}


def values(model: Model) -> Iterator[Alternative]:
    """Yield values of one node in fewer bits, and of several together."""
    for dtype, narrow in FLOATS.items():
        for node in ROUNDED:
            words, shared = f"the values here are rounded to {dtype}", node == "attn.weights"
            yield Alternative(ID, words, changed(narrow, node), node, rare=True, shared=shared)
        for words, nodes in TOGETHER.items():
            yield Alternative(ID, f"{words} rounded to {dtype}", changed(narrow, *nodes), "", rare=True, shared=True)
        words, fix = f"the activation takes and gives {dtype}, as a table of its values does", "compute it, without a table"
        yield Alternative(ID, words, changed(narrow, "mlp.c_fc", "mlp.act"), "mlp.act", fix=fix)
    for (dtype, narrow), (what, letters) in itertools.product(CACHED.items(), CACHES.items()):
        edits = changed(narrow, *(f"attn.{letter}h" for letter in letters))
        fix = "keep the cache in float32, as k and v are"
        yield Alternative(ID, f"{what} rounded to {dtype}", edits, "attn", fix=fix, rare=True, shared=True)


def parameters(model: Model) -> Iterator[Alternative]:
    """Yield parameters in fewer bits: all of them, or some matrices."""
    narrowing: dict[str, Function] = {name: lambda x, dtype=dtype: x.to(dtype).to(x) for name, dtype in NARROW.items()}
    narrowing["bfloat16, the other digits cut off"] = partial(mantissa, 7, cut=True)  # the upper half of a float32
    for dtype, narrow in {**narrowing, **INTEGERS}.items():
        floats, words = dtype not in INTEGERS, f"the weights are the checkpoint's rounded to {dtype}"
        norms = {part: normed(part, partial(_norm, narrow)) for part in ("ln_1", "ln_2", "ln_f")} if floats else {}
        head = changed(lambda table, narrow=narrow: narrow(table.t()).t(), "head")
        whole: Edits = {**_rounded(narrow, MATRICES, floats), **norms, "embed": partial(_embedded, narrow, floats), **head}
        yield Alternative(ID, words, whole, "")
        yield Alternative(ID, f"the head's {words}", head, rare=True)
        for modules in GROUPS:
            which = f"the weights of {' and '.join(modules)}" if len(modules) > 1 else "the weights"
            where = f"{modules[0]}.weight" if len(modules) == 1 else ""
            rare = len(modules) > 1 or dtype in ("float8_e4m3fn", "int8 a tensor")
            words = f"{which} are the checkpoint's rounded to {dtype}"
            yield Alternative(ID, words, _rounded(narrow, modules, False), where, rare=rare)


def _rounded(narrow: Function, modules: tuple[str, ...], biases: bool) -> Edits:
    change = altered(narrow, narrow) if biases else altered(narrow)
    return read(change, *(node for module in modules for node in NODES_OF[module]))


def _norm(narrow: Function, c: Site, x: Tensor, part: str) -> Tensor:
    weight, bias = map(narrow, c.numbers(part))
    return layer_norm(x, weight, bias, c.config.layer_norm_epsilon)


def _embedded(narrow: Function, alone: bool, c: Site, s: State) -> Tensor:
    """Return the embeddings of rounded tables; ``alone``: each entry is rounded alone, so those of these tokens are enough."""
    wte, wpe = (c.model.state[f"{name}.weight"] for name in ("wte", "wpe"))
    ids, places = c.model.ids[:, c.begin : c.end], slice(c.begin, c.end)
    return narrow(wte[ids]) + narrow(wpe[places]) if alone else narrow(wte)[ids] + narrow(wpe)[places]
