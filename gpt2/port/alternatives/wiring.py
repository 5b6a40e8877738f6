"""Other wiring: what a node reads, what a sum adds, and norms where GPT-2 has none.

A *sum* adds a branch to the stream. Each wrong sum is tried behind attention, behind the feed-forward, and behind both.
"""

import itertools
import math
from collections.abc import Callable, Iterator

from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Rerouted
from gpt2.port.alternatives.attention import LETTERS
from gpt2.port.alternatives.norms import layer_norm
from gpt2.port.graph import ORDER, Formula, Model, Site, run_block
from gpt2.port.terms.causes import BLOCK

# Each sum with the stream, the branch, the norm before it, what it adds, and the branch's part.
SUMS = {
    "mid": ("x", "attn.c_proj", "ln_1", "attention's result", "attn"),
    "": ("mid", "mlp.c_proj", "ln_2", "the feed-forward's result", "mlp"),
}
BOTH = tuple(SUMS)
Terms = tuple[Tensor, Tensor, Tensor]  # the stream, the branch's result, and the branch's normed input
Adding = Callable[[Site, Terms, str], Tensor]  # a wrong sum; the norm's part is the last argument


def summed(node: str, adding: Adding) -> Formula:
    stream, branch, norm, *_ = SUMS[node]
    return lambda c, s: adding(c, (s[stream], s[branch], s[norm]), norm)


def usual_factors(model: Model) -> list[float]:
    """Return the numbers that programs multiply streams, branches and embeddings with."""
    width, layers = model.config.n_embd, model.config.n_layer
    roots = [math.sqrt(0.5), math.sqrt(2.0), 1 / math.sqrt(2 * layers), 1 / math.sqrt(layers), math.sqrt(width)]
    usual = [0.5, 2.0, 0.1, *roots, 1 / math.sqrt(width), 1 / layers, 1 / (2 * layers)]
    return [float(factor) for factor in dict.fromkeys(f"{one:.12g}" for one in usual) if not math.isclose(float(factor), 1.0)]


Normed = Callable[[Site, Tensor, str], Tensor]  # of any value; the branch's norm is the last argument
NORMS: dict[str, Normed] = {
    "its own norm": lambda c, x, norm: c.norm(x, norm),
    "a norm without weight and bias": lambda c, x, norm: layer_norm(x, eps=c.config.layer_norm_epsilon),
}


def _normed(norm: Normed, behind: bool) -> Adding:
    return (lambda c, t, n: norm(c, t[0] + t[1], n)) if behind else (lambda c, t, n: t[0] + norm(c, t[1], n))


def _sums(model: Model) -> Iterator[tuple[str, str, Adding]]:
    """Yield an id, words for what is added, and a wrong sum."""
    yield "residual-missing", "{} replaces the stream: nothing is added to it", lambda c, t, n: t[1]
    words = "{} is added to its normalised input, not to the stream before the norm"
    yield "residual-from-normed", words, lambda c, t, n: t[2] + t[1]
    words = "{} is added to its normalised input, without that norm's weight and bias, not to the stream before the norm"
    yield "residual-from-normed", words, lambda c, t, n: layer_norm(t[0], eps=c.config.layer_norm_epsilon) + t[1]
    words = "the norm's result is added to the sum of the stream and {} as well"
    yield "residual-from-normed", words, lambda c, t, n: t[0] + t[1] + t[2]
    for factor in usual_factors(model):
        words = f"{{}} is multiplied by {factor:.6g} before it is added"
        yield "residual-scaled", words, lambda c, t, n, f=factor: t[0] + f * t[1]
        words = f"the sum of the stream and {{}} is multiplied by {factor:.6g}"
        yield "residual-scaled", words, lambda c, t, n, f=factor: f * (t[0] + t[1])
    yield "residual-scaled", "{} is subtracted, not added", lambda c, t, n: t[0] - t[1]
    for how, norm in NORMS.items():
        yield "extra-norm", f"{{}} is added and the sum normalised, by {how}", _normed(norm, True)
        yield "extra-norm", f"{{}} is normalised before it is added, by {how}", _normed(norm, False)


def sums(model: Model) -> Iterator[Alternative]:
    """Yield the wrong sums, behind each branch and behind both; and norms behind the branches or the sums, with none before."""
    for (id, words, adding), nodes in itertools.product(_sums(model), (("mid",), ("",), BOTH)):
        what = "each branch's result" if nodes == BOTH else SUMS[nodes[0]][3]
        where = tuple(SUMS[node][4] for node in nodes) if id == "extra-norm" else "" if nodes == BOTH else None
        yield Alternative(id, words.format(what), {node: summed(node, adding) for node in nodes}, where)
    for (how, norm), behind, nodes in itertools.product(NORMS.items(), (True, False), (BOTH, ("mid",), ("",))):
        words = f"the norms stand behind the branches, {'ln(x + branch(x))' if behind else 'x + ln(branch(x))'}, not before them"
        words += "" if how == "its own norm" else f"; each is {how}"
        none = {SUMS[node][2]: (lambda c, s, source=SUMS[node][0]: s[source]) for node in nodes}
        edits: dict[str, Formula] = {**none, **{node: summed(node, _normed(norm, behind)) for node in nodes}}
        yield Alternative("post-norm", words, edits, "" if nodes == BOTH else SUMS[nodes[0]][2], rare=nodes != BOTH)


def whole_blocks(model: Model) -> Iterator[Alternative]:
    """Yield blocks that do not run, run twice, or run their branches side by side, and an output projection that is missing."""
    yield Alternative("layer-missing", "it does not run", {"": lambda c, s: s["x"]})
    words = "the block takes the embeddings, not the result of the block before: what the blocks before give has no effect"
    begins: dict[str, Formula] = {n: (lambda c, s, n=n: c.right(n, {**s, "x": c.right("embed", {})})) for n in ("ln_1", "mid")}
    yield Alternative("layer-missing", words, begins, "", silent=lambda layer: layer == 0)
    again: Formula = lambda c, s: run_block(c, {"x": c.right("", s)}, {})[""]  # noqa: E731
    yield Alternative("layer-repeated", "it runs twice, on its own result", {"": again})
    words = "the feed-forward takes the stream before attention"
    yield Alternative("parallel-block", words, {"ln_2": Rerouted("ln_2", "mid", "x")}, "")
    yield Alternative("parallel-block", f"{words}, and no norm of its own", {"ln_2": lambda c, s: s["x"]}, "", rare=True)
    words = "attention and feed-forward take the same norm of the same stream"
    yield Alternative("parallel-block", words, {"ln_2": lambda c, s: s["ln_1"]}, "")
    fed: Formula = lambda c, s: c.norm(run_block(c, {**s, "mid": s["x"]}, {}, ORDER["mid"])[""], "ln_1")  # noqa: E731
    before: dict[str, Formula] = {"ln_1": fed, "ln_2": Rerouted("ln_2", "mid", "x")}
    yield Alternative("layer-order", "the feed-forward runs before attention", before, "", fix=BLOCK)
    id, words = "output-projection-missing", "the heads are added to the stream as they are"
    yield Alternative(id, words, {"attn.c_proj": lambda c, s: s["attn.heads"]}, "attn")
    yield Alternative(id, f"{words}; its result is unused", {"mid": Rerouted("mid", "attn.c_proj", "attn.heads")}, "attn")
    words = "what enters attention's output projection is added to its own result"
    yield Alternative(id, words, {"attn.c_proj": lambda c, s: c.right("attn.c_proj", s) + s["attn.heads"]})
    also = (("missing-bias", "no bias is added"),)
    around: Formula = lambda c, s: c.right("attn.c_proj", s) - c.linear("attn.c_proj")[1] + s["attn.heads"]  # noqa: E731
    yield Alternative(id, f"{words}, and the layer has no bias", {"attn.c_proj": around}, also=also, rare=True)


def reroutes(model: Model) -> Iterator[Alternative]:
    """Yield nodes that read another value than GPT-2's."""
    for letters in (*itertools.combinations(LETTERS, 2), *itertools.combinations(LETTERS, 1)):
        words = f"{' and '.join(LETTERS[one] for one in letters)} are computed from the stream before the norm"
        edits = {f"attn.{one}": Rerouted(f"attn.{one}", "ln_1", "x") for one in letters}
        yield Alternative("norm-missing", words, edits, "ln_1")
    for node, (stream, *_, what, _) in SUMS.items():
        words = f"{what} is dropped: it is not added to the stream"
        yield Alternative("residual-missing", words, {node: lambda c, s, stream=stream: s[stream]})
    words = "the feed-forward's result is added to the stream as it was before attention"
    yield Alternative("residual-missing", words, {"": Rerouted("", "mid", "x")}, "mid")
    words = "the feed-forward's result is added to what went into attention"
    yield Alternative("residual-from-normed", words, {"": Rerouted("", "mid", "ln_1")})
    words = "the stream is overwritten by each norm, so that both sums begin with it"
    edits = {"mid": Rerouted("mid", "x", "ln_1"), "": Rerouted("", "mid", "ln_2")}
    yield Alternative("residual-from-normed", words, edits, "", rare=True)
