"""Other wiring: what a node reads, what a sum adds, and norms where GPT-2 has none.

A *sum* adds a branch to the stream. Each wrong sum is tried behind attention, behind the feed-forward, and behind both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Rerouted, changed, family
from gpt2.port.alternatives.norm_formulas import RMS, layer_norm
from gpt2.port.graph import ORDER, READS, Formula, Model, Site, State, run_block
from gpt2.port.terms.causes import BLOCK

LETTERS = {"q": "queries", "k": "keys", "v": "values"}
# Each sum with the stream, the branch, its normed input, the norm, what it adds, and the branch's part.
SUMS = {
    "mid": ("x", "attn.c_proj", "ln_1", "ln_1", "attention's result", "attn"),
    "": ("mid", "mlp.c_proj", "ln_2", "ln_2", "the feed-forward's result", "mlp"),
}
OTHER = {"ln_1": "ln_2", "ln_2": "ln_1"}
BOTH = ("mid", "")
Terms = tuple[Tensor, Tensor, Tensor]  # the stream, the branch's result, and the branch's normed input
Adding = Callable[[Site, Terms, str], Tensor]  # a wrong sum; the norm's part is the last argument
STREAMS = ("x", "ln_1", "attn.q", "attn.k", "attn.v", "attn.heads", "attn.c_proj", "mid", "ln_2", "mlp.c_proj")
NAMED = {
    "x": "the block's input",
    "mid": "the stream after attention",
    "ln_1": "attention's normed input",
    "attn.q": "the queries",
}
NAMED |= {"ln_2": "the feed-forward's normed input", "mlp.c_proj": "the feed-forward's result", "attn.heads": "the merged heads"}
NAMED |= {"attn.c_proj": "attention's result", "attn.k": "the keys", "attn.v": "the values", "": "the block's result"}
READERS = {"ln_1": "the norm before attention", "ln_2": "the norm before the feed-forward", "mlp.c_fc": "the feed-forward"}
READERS |= {"attn.c_proj": "the output projection", "mid": "the sum behind attention", "": "the sum behind the feed-forward"}


def summed(node: str, adding: Adding) -> Formula:
    """Return the formula of a sum."""
    stream, branch, normed, norm, *_ = SUMS[node]
    return lambda c, s: adding(c, (s[stream], s[branch], s[normed]), norm)


def usual_factors(model: Model) -> list[float]:
    """Return the numbers that programs multiply streams, branches and embeddings with."""
    width, layers = model.config.n_embd, model.config.n_layer
    roots = [math.sqrt(0.5), math.sqrt(2.0), 1 / math.sqrt(2 * layers), 1 / math.sqrt(layers), math.sqrt(width)]
    usual = [0.5, 2.0, 0.1, *roots, 1 / math.sqrt(width), 1 / layers, 1 / (2 * layers)]
    return [float(factor) for factor in dict.fromkeys(f"{one:.12g}" for one in usual) if not math.isclose(float(factor), 1.0)]


def _bare(c: Site, x: Tensor) -> Tensor:
    return layer_norm(x, eps=c.config.layer_norm_epsilon)


Normed = Callable[[Site, Tensor, str], Tensor]  # of any value; the branch's norm is the last argument
NORMS: dict[str, Normed] = {
    "its own norm": lambda c, x, norm: c.norm(x, norm),
    "the block's other norm": lambda c, x, norm: c.norm(x, OTHER[norm]),
    "a norm without weight and bias": lambda c, x, norm: _bare(c, x),
    "an RMS norm without weight": lambda c, x, norm: layer_norm(x, **RMS),
    "ln_f": lambda c, x, norm: c.norm(x, "ln_f"),
}


def _sums(model: Model) -> Iterator[tuple[str, str, Adding, bool]]:
    """Yield an id, words for what is added, a wrong sum, and whether it is rare."""
    replaced = "{} replaces the stream: nothing is added to it"
    yield "residual-missing", replaced, lambda c, t, n: t[1], False
    words = "{} is added to its normalised input, not to the stream before the norm"
    yield "residual-from-normed", words, lambda c, t, n: t[2] + t[1], False
    words = "{} is added to its normalised input, without that norm's weight and bias, not to the stream before the norm"
    yield "residual-from-normed", words, lambda c, t, n: _bare(c, t[0]) + t[1], False
    for factor in usual_factors(model):
        words = f"{{}} is multiplied by {factor:.6g} before it is added"
        yield "residual-scaled", words, lambda c, t, n, f=factor: t[0] + f * t[1], False
        yield "residual-scaled", f"the sum of the stream and {{}} is multiplied by {factor:.6g}", _scaled(factor), False
    yield "residual-scaled", "{} is subtracted, not added", lambda c, t, n: t[0] - t[1], True
    yield "residual-scaled", "{} is multiplied with the stream, not added", lambda c, t, n: t[0] * t[1], True
    yield "residual-scaled", "of the stream and {} the larger is kept, not the sum", lambda c, t, n: t[0].maximum(t[1]), True
    for how, norm in NORMS.items():
        rare = not how.startswith(("its own", "a norm"))
        words = f"{{}} is added and the sum normalised, by {how}"
        yield "extra-norm", words, _normed_sum(norm), rare
        words = f"{{}} is normalised before it is added, by {how}"
        yield "extra-norm", words, _normed_branch(norm), rare
        words = f"{{}} is added to its normalised input, and the sum normalised, by {how}"
        yield "residual-from-normed", words, lambda c, t, n, f=norm: f(c, t[2] + t[1], n), True
        words = f"{{}} is normalised, and replaces the stream, by {how}"
        yield "residual-missing", words, lambda c, t, n, f=norm: f(c, t[1], n), True


def _scaled(factor: float) -> Adding:
    return lambda c, t, n: factor * (t[0] + t[1])


def _normed_sum(norm: Normed) -> Adding:
    return lambda c, t, n: norm(c, t[0] + t[1], n)


def _normed_branch(norm: Normed) -> Adding:
    return lambda c, t, n: t[0] + norm(c, t[1], n)


@family
def sums(model: Model) -> Iterator[Alternative]:
    """Yield the wrong sums, behind each branch and behind both."""
    for id, words, adding, rare in _sums(model):
        also = (("extra-norm", words.format("it")),) if rare and "normalis" in words and id != "extra-norm" else ()
        for nodes in (("mid",), ("",), BOTH):
            what = "each branch's result" if nodes == BOTH else SUMS[nodes[0]][4]
            if id == "extra-norm":
                where: str | tuple[str, ...] | None = tuple(SUMS[node][5] for node in nodes)
            else:
                where = "" if nodes == BOTH else nodes[0]
            yield Alternative(id, words.format(what), {node: summed(node, adding) for node in nodes}, where, also=also, rare=rare)
    for node in BOTH:
        stream, _, _, _, what, _ = SUMS[node]
        words = f"{what} is dropped: it is not added to the stream"
        yield Alternative("residual-missing", words, {node: lambda c, s, stream=stream: s[stream]}, node)
    words = "the feed-forward's result is added to the stream as it was before attention"
    yield Alternative("residual-missing", words, {"": Rerouted("", "mid", "x")}, "mid")
    words = "the feed-forward's result is added to what went into attention"
    yield Alternative("residual-from-normed", words, {"": Rerouted("", "mid", "ln_1")})


@family
def post_norms(model: Model) -> Iterator[Alternative]:
    """Yield norms behind the branches or the sums, and none before them."""
    for (how, norm), behind in itertools.product(NORMS.items(), (True, False)):
        adding = _normed_sum(norm) if behind else _normed_branch(norm)
        words = f"the norms stand behind the branches, {'ln(x + branch(x))' if behind else 'x + ln(branch(x))'}, not before them"
        words += "" if how == "its own norm" else f"; each is {how}"
        for nodes in (BOTH, ("mid",), ("",)):
            edits: dict[str, Formula] = {}
            for node in nodes:
                stream, part = SUMS[node][0], SUMS[node][3]
                edits |= {part: lambda c, s, stream=stream: s[stream], node: summed(node, adding)}
            where = "" if nodes == BOTH else SUMS[nodes[0]][3]
            rare = nodes != BOTH or how not in ("its own norm", "the block's other norm", "a norm without weight and bias")
            yield Alternative("post-norm", words, edits, where, rare=rare)
    words = "the stream is overwritten by each norm, so that both sums begin with it"
    edits = {"mid": Rerouted("mid", "x", "ln_1"), "": Rerouted("", "mid", "ln_2")}
    yield Alternative("residual-from-normed", words, edits, "", rare=True)


@family
def extra_norms(model: Model) -> Iterator[Alternative]:
    """Yield norms of the merged heads."""
    words = "the heads are normalised before the output projection"
    yield Alternative("extra-norm", words, changed(layer_norm, "attn.heads"))
    yield Alternative("extra-norm", f"{words} (RMS)", changed(partial(layer_norm, **RMS), "attn.heads"))


@family
def more_terms(model: Model) -> Iterator[Alternative]:
    """Yield sums with one term more: any earlier value of the stream's size, or the embeddings."""
    for node, source in itertools.product(BOTH, STREAMS):
        if ORDER.get(source, -1) < ORDER[node] and source not in (SUMS[node][1], "attn.heads"):  # other families have these
            detail = f"{NAMED[source]} is added as well, to {SUMS[node][4]} and the stream"
            id = "residual-from-normed" if source.startswith("ln") else "residual-scaled"
            edit = {node: lambda c, s, node=node, source=source: c.right(node, s) + s[source]}
            yield Alternative(
                id, detail, edit, rare=True, shared=source not in ("x", "mid", "ln_1", "ln_2", "attn.c_proj", "mlp.c_proj")
            )
    words = "each norm's result is added to the sum behind its branch as well"
    edits: dict[str, Formula] = {node: (lambda c, s, node=node: c.right(node, s) + s[SUMS[node][2]]) for node in BOTH}
    yield Alternative("residual-from-normed", words, edits, "", rare=True)
    words = "the embedding is added as well, to the feed-forward's result and the stream"
    added: dict[str, Formula] = {"": lambda c, s: c.right("", s) + c.embedded(s["x"])}
    yield Alternative("residual-scaled", words, added, rare=True, silent=_first)


def _first(layer: int) -> bool:
    return layer == 0


@family
def entered(model: Model) -> Iterator[Alternative]:
    """Yield blocks that take the embeddings or the positions in the place of the stream, or beside it."""

    def takes(
        id: str, words: str, where: str, change: Callable[[Site, Tensor], Tensor], *nodes: str, rare: bool = False
    ) -> Alternative:
        edits: dict[str, Formula] = {
            node: (lambda c, s, node=node: c.right(node, {**s, "x": change(c, s["x"])})) for node in nodes
        }
        return Alternative(id, words, edits, where, silent=_first, rare=rare)

    words = "the block takes the embeddings, not the result of the block before: what the blocks before give has no effect"
    yield takes("layer-missing", words, "", lambda c, x: c.embedded(x), "ln_1", "mid")
    words = "the embeddings are added to the stream once more before the block"
    yield takes("embedding-scaled", words, "", lambda c, x: x + c.embedded(x), "ln_1", "mid", rare=True)
    words = "attention takes the embeddings, normed, not the stream"
    yield takes("layer-missing", words, "ln_1", lambda c, x: c.embedded(x), "ln_1", rare=True)
    words = "attention's result is added to the embeddings, not to the stream"
    yield takes("residual-missing", words, "mid", lambda c, x: c.embedded(x), "mid", rare=True)
    words = "the positions are added to the stream once more before the block"
    yield takes("position-offset", words, "wpe", lambda c, x: x + c.model.state["wpe.weight"][c.begin : c.end], "ln_1", "mid")


@family
def whole_blocks(model: Model) -> Iterator[Alternative]:
    """Yield blocks that do not run, run twice, or run their branches side by side."""
    yield Alternative("layer-missing", "it does not run", {"": lambda c, s: s["x"]})
    for node, norm, what in (("attn.c_proj", "ln_1", "attention"), ("mlp.c_proj", "ln_2", "the feed-forward")):
        words = f"{what} does not run: its normalised input is added to the stream"
        where = (node.partition(".")[0], norm)
        yield Alternative("layer-missing", words, {node: lambda c, s, norm=norm: s[norm]}, where, fix=BLOCK)
    yield Alternative("layer-repeated", "it runs twice, on its own result", {"": _again})
    words = "the feed-forward takes the stream before attention"
    yield Alternative("parallel-block", words, {"ln_2": Rerouted("ln_2", "mid", "x")}, "")
    words = "attention and feed-forward take the same norm of the same stream"
    yield Alternative("parallel-block", words, {"ln_2": lambda c, s: s["ln_1"]}, "")
    words = "the feed-forward takes the stream before attention, and no norm of its own"
    edits: dict[str, Formula] = {"ln_2": lambda c, s: s["x"]}
    yield Alternative("parallel-block", words, edits, "", also=(("norm-missing", words),), rare=True)
    words = "the feed-forward takes attention's result, normed, not the stream"
    yield Alternative("residual-missing", words, {"ln_2": Rerouted("ln_2", "mid", "attn.c_proj")}, rare=True)


def _again(c: Site, s: State) -> Tensor:
    return run_block(c.call(c.begin, c.end, {}), {"x": c.right("", s)}, {})[""]


@family
def branches(model: Model) -> Iterator[Alternative]:
    """Yield projections that are missing, and layers whose input is added to their result."""
    id, words = "output-projection-missing", "the heads are added to the stream as they are"
    yield Alternative(id, words, {"attn.c_proj": lambda c, s: s["attn.heads"]}, "attn")
    yield Alternative(id, f"{words}; its result is unused", {"mid": Rerouted("mid", "attn.c_proj", "attn.heads")}, "attn")
    around = {
        "attn.c_proj": ("attn.heads", "output-projection-missing", "what enters attention's output projection"),
        "attn.q": ("ln_1", "wrong-tensor", "what the queries are computed from"),
        "attn.k": ("ln_1", "wrong-tensor", "what the keys are computed from"),
        "attn.v": ("ln_1", "value-projection-wrong", "what the values are computed from"),
    }
    for node, (source, id, what) in around.items():
        for biased in (True, False):
            words = f"{what} is added to its own result" + ("" if biased else ", and the layer has no bias")
            also = () if biased else (("missing-bias", "no bias is added"),)
            edits: dict[str, Formula] = {node: partial(_around, node, source, biased)}
            yield Alternative(id, words, edits, also=also, rare=not biased or id != "output-projection-missing")
    words = "the output projection's weight has the other sign"
    negated: dict[str, Formula] = {"attn.c_proj": lambda c, s: 2 * c.linear("attn.c_proj")[1] - c.right("attn.c_proj", s)}
    yield Alternative("wrong-tensor", words, negated, rare=True)


def _around(node: str, source: str, biased: bool, c: Site, s: State) -> Tensor:
    made = c.right(node, s) + s[source]
    return made if biased else made - c.linear(node)[1]


@family
def thirds(model: Model) -> Iterator[Alternative]:
    """Yield queries, keys and values of which one is computed two or three times, or from the stream before the norm."""
    for order in itertools.product(LETTERS, repeat=3):
        wrong = {one: other for one, other in zip(LETTERS, order, strict=True) if one != other}
        if not wrong or len(set(order)) == 3 or wrong.keys() == {"v"}:  # a permutation, or mixing what is not the values
            continue
        words = ", ".join(f"the {LETTERS[one]} are the {LETTERS[other]}" for one, other in wrong.items())
        edits: dict[str, Formula] = {
            f"attn.{one}": (lambda c, s, other=other: c.right(f"attn.{other}", s)) for one, other in wrong.items()
        }
        yield Alternative("qkv-order", f"{words}: a third of c_attn serves twice", edits, "attn")
    for count in (2, 1):
        for letters in itertools.combinations(LETTERS, count):
            words = f"{' and '.join(LETTERS[one] for one in letters)} are computed from the stream before the norm"
            edits = {f"attn.{one}": Rerouted(f"attn.{one}", "ln_1", "x") for one in letters}
            yield Alternative("norm-missing", words, edits, "ln_1")


@family
def reroutes(model: Model) -> Iterator[Alternative]:
    """Yield nodes that read another value of the stream's size than GPT-2's, if no other family does."""
    known = {("ln_2", "x"), ("ln_2", "attn.c_proj"), ("mid", "attn.heads"), ("mid", "ln_1"), ("mlp.c_fc", "ln_1"), ("", "ln_2")}
    known |= {("", "x"), ("", "ln_1")}
    for node, source in itertools.product(READERS, STREAMS):
        for slot in READS[node]:
            if ORDER.get(source, -1) >= ORDER[node] or source in READS[node] or slot not in STREAMS or (node, source) in known:
                continue
            id = _named(node, source)
            words = f"{READERS[node]} reads {NAMED[source]} in place of {NAMED[slot]}"
            yield Alternative(id, words, {node: Rerouted(node, slot, source)}, rare=True, shared=True)


def _named(node: str, source: str) -> str:
    """Return the cause of a node that reads another value."""
    if node == "attn.c_proj":
        return "value-projection-wrong"
    if node == "mlp.c_fc":
        return {"mid": "norm-missing", "ln_1": "parallel-block", "x": "parallel-block"}.get(source, "wrong-tensor")
    if node == "ln_2":
        return "parallel-block" if source == "ln_1" else "wrong-tensor"
    return "residual-from-normed" if source.startswith("ln") else "residual-missing"
