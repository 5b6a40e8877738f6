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
from gpt2.port.alternatives.rounding import CUT, NARROW, SCALED, in_eight_bits, mantissa, narrowed, quantised
from gpt2.port.graph import MODULES, READS, TEXT, Edits, Formula, Function, Model, Site, affine, right_scale

FLOATS: dict[str, Function] = {"bfloat16": partial(mantissa, 7, False), "float16": partial(mantissa, 10, False)}
CUT_OFF: dict[str, Function] = {
    f"{dtype}, cut off": partial(mantissa, bits, True) for dtype, bits in (("bfloat16", 7), ("float16", 10))
}
CACHED: dict[str, Function] = {
    **FLOATS,
    "float8 (e4m3)": partial(mantissa, 3, False),
    "float8 (e5m2)": partial(mantissa, 2, False),
    "8 bits, a scale for each token and head": partial(in_eight_bits, (-1,)),
    "8 bits, a scale for each head": partial(in_eight_bits, (-2, -1)),
}
WIDE_CACHED: dict[str, Function] = {
    "8 bits, a scale for each token": partial(in_eight_bits, (-1,)),
    "8 bits, a scale for all": partial(in_eight_bits, (-2, -1)),
}
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
ID = "reduced-precision"


@family
def values(model: Model) -> Iterator[Alternative]:
    """Yield values of one node in fewer bits, and of all nodes together."""
    for dtype, narrow in FLOATS.items():
        for node, words in VALUES.items():
            where = "attn" if node == "attn.weights" else node
            yield Alternative(
                ID, f"{words} rounded to {dtype}", changed(narrow, node), where, rare=True, shared=node == "attn.weights"
            )
        words = f"the activation takes and gives {dtype}, as a table of its values does"
        yield Alternative(ID, words, changed(narrow, "mlp.c_fc", "mlp.act"), "mlp.act")
        words = f"the results of norms, projections and activations are rounded to {dtype}"
        yield Alternative(ID, words, changed(narrow, *RESULTS), "", rare=True, shared=True)
    for (dtype, narrow), (letters, what) in itertools.product(CACHED.items(), LETTERS.items()):
        edits, sees = changed(narrow, *(f"attn.{letter}h" for letter in letters)), TEXT if dtype.endswith("each head") else ""
        yield Alternative(ID, f"{what} rounded to {dtype}", edits, "attn", rare=True, shared=True, sees=sees)
    for (dtype, narrow), (letters, what) in itertools.product(WIDE_CACHED.items(), LETTERS.items()):
        edits, sees = changed(narrow, *(f"attn.{letter}" for letter in letters)), TEXT if dtype.endswith("for all") else ""
        yield Alternative(ID, f"{what} rounded to {dtype}", edits, "attn", rare=True, shared=True, sees=sees)


@family
def products(model: Model) -> Iterator[Alternative]:
    """Yield programs that round what every product takes, and those that keep the stream in fewer bits."""
    for dtype, narrow in {**FLOATS, **CUT_OFF}.items():
        for what, attention, weights in (
            ("both factors of every product are", True, True),
            ("both factors of every product with a matrix are", False, True),
            ("the input of every linear layer is", False, False),
        ):
            edits: dict[str, Formula] = {node: _product(node, narrow, weights) for node in MODULES}
            if attention:
                edits |= {"attn.scores": _scores(narrow), "attn.mixed": _mixed(narrow)}
            last: dict[str, Formula] = {"ln_f": Changed("ln_f", lambda c, y, f=narrow: f(y))}
            if weights:
                last["head"] = Changed("head", lambda c, y, f=narrow: f(y))
            yield Alternative(ID, f"{what} rounded to {dtype}", edits, "", last, rare=True, shared=True)
        words = f"the stream is rounded to {dtype} behind each sum"
        yield Alternative(ID, words, changed(narrow, "mid", ""), "", changed(narrow, "embed"), rare=True, shared=True)
    words = "the input of every linear layer is rounded to 8 bits, a scale for each token"
    edits = {node: _product(node, partial(in_eight_bits, (-1,)), False) for node in MODULES}
    yield Alternative(ID, words, edits, "", rare=True, shared=True)


def _product(node: str, narrow: Function, weights: bool) -> Formula:
    source = READS[node][0]

    def formula(c: Site, s: dict[str, Tensor]) -> Tensor:
        weight, bias = c.linear(node)
        return affine(narrow(s[source]), narrow(weight) if weights else weight, bias)

    return formula


def _scores(narrow: Function) -> Formula:
    return lambda c, s: narrow(s["attn.qh"]) @ narrow(s["attn.ks"]).mT * right_scale(c.config, c.layer)


def _mixed(narrow: Function) -> Formula:
    return lambda c, s: narrow(s["attn.weights"]) @ narrow(s["attn.vs"])


@family
def parameters(model: Model) -> Iterator[Alternative]:
    """Yield parameters in fewer bits: all of them, or some matrices."""
    for dtype in (*NARROW, SCALED, CUT, "int8", "int8 a tensor"):
        narrow, quantising = partial(narrowed, dtype), dtype.startswith("int8")
        words = f"the weights are the checkpoint's rounded to {dtype}"
        edits = dict(_rounded(narrow, MATRICES, not quantising))
        outside: dict[str, Formula] = {
            "embed": partial(_embedded, narrow, not quantising),
            "head": Changed("head", lambda c, y, f=narrow: f(y)),
        }
        if not quantising:
            edits |= {part: normed(part, partial(_norm, narrow)) for part in ("ln_1", "ln_2")}
            outside["ln_f"] = normed("ln_f", partial(_norm, narrow))
        yield Alternative(ID, words, edits, "", outside)
        for modules in GROUPS if dtype not in (SCALED, CUT) else ():
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


def in_integers(model: Model) -> Iterator[Alternative]:
    """Yield the matrices in integers, with scales of every known kind; outside the blocks, the token table so.

    These are dozens, and slow: they are tried where nothing else explains a program, and are not in the table.
    """
    first = {module: model.state[f"h.0.{module}.weight"] for module in MATRICES}
    for words in dict.fromkeys(words for weight in first.values() for words, _ in quantised(weight)):
        if words.startswith("in "):  # integers
            change = partial(_quantised, words)
            outside: dict[str, Formula] = {
                "embed": partial(_quantised_rows, words),
                "head": lambda c, s, words=words: _table(c, words, "head"),
            }
            yield Alternative(ID, f"the matrices are {words}", read(change, *MODULES), "", outside, rare=True, shared=True)


def _ways(c: Site, weight: Tensor) -> dict[str, partial[Tensor]]:
    return c.model.always(("integers", weight.data_ptr()), lambda: dict(quantised(weight)))  # type: ignore[arg-type]


def _in_integers(c: Site, weight: Tensor, words: str) -> Tensor:
    """Return the matrix (I, O) in these integers; as it is, if it is too small for such groups."""
    make = _ways(c, weight).get(words)
    return weight if make is None else make()


def _quantised(words: str, c: Site, module: str) -> tuple[Tensor, Tensor]:
    weight, bias = held(c, module)
    return _in_integers(c, weight, words), bias


def _table(c: Site, words: str, node: str) -> Tensor:
    table = c.model.table if node == "head" else c.model.state["wte.weight"]
    return c.model.once(("table", words, table.data_ptr()), lambda: _in_integers(c, table.t(), words).t())


def _quantised_rows(words: str, c: Site, s: dict[str, Tensor]) -> Tensor:
    positions = c.model.state["wpe.weight"][c.begin : c.end]
    return _table(c, words, "embed")[c.model.ids[:, c.begin : c.end]] + positions
