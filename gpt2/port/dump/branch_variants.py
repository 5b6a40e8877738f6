"""List faults of what a branch takes, makes of its result, and gives to the stream, as stages of a simulation.

They are families: every third of c_attn in place of every other, every branch left out, every order of the axes of the heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpt2.port.diagnosis.activations import FUNCTIONS
from gpt2.port.diagnosis.norms import layer_norm
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault, Formula
from gpt2.port.dump.fits.rounding import mantissa
from gpt2.port.dump.simulation import Simulation, Stage, Stages, State
from gpt2.port.dump.variants import Variant

LETTERS = {"q": "queries", "k": "keys", "v": "values"}
AXES = {"batch": 0, "head": 1, "token": 2, "unit": 3}  # of the heads' results (B, H, T, K)
BRANCHES = {"mid": ("attn.c_proj", "x", "attention's result"), "": ("mlp.c_proj", "mid", "the feed-forward's result")}
MORE = {  # what a sum may hold beside the stream and the branch; "" for the embeddings
    "mid": {"attention's normed input": "ln_1", "the block's input": "x", "attention's result, once more,": "attn.c_proj"},
    "": {
        "the feed-forward's normed input": "ln_2",
        "the stream after attention": "mid",
        "the block's input": "x",
        "the feed-forward's result, once more,": "mlp.c_proj",
        "attention's result, once more,": "attn.c_proj",
        "attention's normed input": "ln_1",
        "the embedding": "",
    },
}
SQUARE = {  # linear layers with as many outputs as inputs: what they take, the cause, and words
    "attn.c_proj": ("attn.heads", "output-projection-missing", "what enters attention's output projection"),
    "attn.q": ("ln_1", "wrong-tensor", "what the queries are computed from"),
    "attn.k": ("ln_1", "wrong-tensor", "what the keys are computed from"),
    "attn.v": ("ln_1", "value-projection-wrong", "what the values are computed from"),
}
ACTIVE = {
    "attn.c_proj": "attention's result",
    "mlp.c_proj": "the feed-forward's result",
    "attn.heads": "the merged heads",
    "attn.v": "the values",
    "": "the stream behind the block",
}
ROUNDED = {
    "ln_1": "the norm before attention is",
    "attn.scores": "the scores are",
    "attn.heads": "the merged heads are",
    "attn.c_proj": "attention's result is",
    "ln_2": "the norm before the feed-forward is",
    "mlp.c_fc": "what enters the activation is",
    "mlp.act": "the activation is",
    "mlp.c_proj": "the feed-forward's result is",
}
BITS = {"bfloat16": 7, "float16": 10}


def branch_variants(simulation: Simulation) -> Iterator[Variant]:
    """Yield the known faults of what a branch takes and gives."""
    yield from _unnormed()
    yield from _thirds()
    yield from _merged(simulation)
    for stage, (branch, stream, what) in BRANCHES.items():
        dropped = Fault("residual-missing", stage, f"{what} is dropped: it is not added to the stream")
        yield Variant.of(f"{branch} dropped", [dropped], partial(_copied, stage, stream))
        words = f"{what} is added to its normalised input, without that norm's weight and bias, not to the stream before the norm"
        fault = Fault("residual-from-normed", stage, words)
        yield Variant.of(f"{branch} on bare norm", [fault], partial(_on_bare_norm, (stage,)))
    words = "each branch's result is added to its normalised input, without weight and bias, as if the norm wrote over the stream"
    yield Variant.of("both on bare norm", [Fault("residual-from-normed", "", words)], partial(_on_bare_norm, ("mid", "")))
    for stage, what in ACTIVE.items():
        for name in ("relu", "gelu_new", "tanh"):
            words = f"{what} goes through an activation, {FUNCTIONS[name][0]}; GPT-2 has none there"
            changed = partial(_on_top, {stage: FUNCTIONS[name][1]})
            yield Variant.of(f"{name} on {stage}", [Fault("gelu-variant", stage, words)], changed, name != "relu")
    words = "the scores take the place of the weights, divided by the number of tokens, without a softmax"
    yield Variant.of("scores for weights", [Fault("softmax-missing", "attn", words)], _unsoftened)
    words = "the positions are added to the stream once more before the block"
    yield Variant.of("positions again", [Fault("position-offset", "wpe", words)], _positions_again)
    yield Variant.of("block skipped", [Fault("layer-missing", "", "it does not run")], partial(_copied, "", "x"))
    yield Variant.of("block again", [Fault("layer-repeated", "", "it runs twice, on its own result")], _again)
    yield from _sums()
    yield from _entered()
    yield from _around_layers()
    yield from _lost_heads(simulation.config.n_head)
    yield from _rounded()


def _again(simulation: Simulation, layer: int) -> Stages:
    return {"": lambda s: simulation.run_block(layer, {"x": simulation.run_block(layer, {"x": s["x"]}, {})[""]}, {})[""]}


def _sums() -> Iterator[Variant]:
    """Yield sums with one term more than stream and branch: a stream before, a norm, or a branch once more."""
    ids = {"norm": "residual-from-normed"}
    for stage, terms in MORE.items():
        for words, source in terms.items():
            detail = f"{words} is added as well, to {BRANCHES[stage][2]} and the stream"
            fault = Fault(next((id for word, id in ids.items() if word in words), "residual-scaled"), stage, detail)
            yield Variant.of(detail, [fault], partial(_with_more, {stage: source}), True)
    words = "each norm's result is added to the sum behind its branch as well"
    both = partial(_with_more, {"mid": "ln_1", "": "ln_2"})
    yield Variant.of(words, [Fault("residual-from-normed", "", words)], both, True)


def _with_more(sources: Mapping[str, str], simulation: Simulation, layer: int) -> Stages:
    right = simulation.right(layer)

    def stage(name: str, source: str) -> Stage:
        if not source:
            return lambda s: right[name](s) + _embedded(simulation, s["x"])
        return lambda s: right[name](s) + s[source]

    return {} if layer == 0 and "" in sources.values() else {name: stage(name, source) for name, source in sources.items()}


def _entered() -> Iterator[Variant]:
    """Yield blocks that take the embeddings in the place of the stream, or beside it, and a feed-forward that takes a branch."""
    words = "the block takes the embeddings, not the result of the block before: what the blocks before give has no effect"
    yield Variant.of(words, [Fault("layer-missing", "", words)], partial(_from_embedding, True, True, False))
    words = "the embeddings are added to the stream once more before the block"
    yield Variant.of(words, [Fault("embedding-scaled", "", words)], partial(_from_embedding, True, True, True), True)
    words = "attention takes the embeddings, normed, not the stream"
    yield Variant.of(words, [Fault("layer-missing", "ln_1", words)], partial(_from_embedding, True, False, False), True)
    words = "the feed-forward takes attention's result, normed, not the stream"
    yield Variant.of(words, [Fault("residual-missing", "ln_2", words)], _branch_alone, True)
    words = "attention's result is added to the embeddings, not to the stream"
    yield Variant.of(words, [Fault("residual-missing", "mid", words)], partial(_from_embedding, False, True, False), True)


def _branch_alone(simulation: Simulation, layer: int) -> Stages:
    return {"ln_2": lambda s: simulation.norm(f"h.{layer}.ln_2", s["attn.c_proj"])}


def _embedded(simulation: Simulation, x: Tensor) -> Tensor:
    """Return the embeddings of the tokens of x (B, T, D), perhaps the streams of several programs, or the first tokens alone."""
    embedded = simulation.embed()[:, : x.shape[1]]
    return embedded.repeat(max(1, len(x) // len(embedded)), 1, 1)


def _from_embedding(branch: bool, stream: bool, beside: bool, simulation: Simulation, layer: int) -> Stages:
    if layer == 0:
        return {}
    right = simulation.right(layer)

    def stage(name: str) -> Stage:
        def formula(s: State) -> Tensor:
            embedded = _embedded(simulation, s["x"])
            return right[name]({**s, "x": s["x"] + embedded if beside else embedded})

        return formula

    return {name: stage(name) for name, given in (("ln_1", branch), ("mid", stream)) if given}


def _around_layers() -> Iterator[Variant]:
    """Yield linear layers whose input is added to their result, as in a sum around the layer, with the bias and without."""
    for stage, (source, id, what) in SQUARE.items():
        for biased in (True, False):
            words = f"{what} is added to its own result" + ("" if biased else ", and the layer has no bias")
            faults = [Fault(id, stage, words), *([] if biased else [Fault("missing-bias", stage, "no bias is added")])]
            yield Variant.of(
                words, faults, partial(_around, stage, source, biased), not biased or id != "output-projection-missing"
            )


def _around(stage: str, source: str, biased: bool, simulation: Simulation, layer: int) -> Stages:
    right = simulation.right(layer)[stage]

    def formula(s: State) -> Tensor:
        bias = 0.0 if biased else right({**s, source: torch.zeros_like(s[source])})
        return right(s) + s[source] - bias

    return {stage: formula}


def _unsoftened(simulation: Simulation, layer: int) -> Stages:
    return {"attn.weights": lambda s: s["attn.scores"].masked_fill(~simulation.seen, 0.0) / s["attn.scores"].shape[-1]}


def _positions_again(simulation: Simulation, layer: int) -> Stages:
    right, table = simulation.right(layer), simulation.state["wpe.weight"]
    if layer == 0:  # where they are added in any case
        return {}

    def added(s: State) -> Tensor:  # a run may give fewer tokens at once
        return s["x"] + table[: s["x"].shape[1]]

    return {"ln_1": lambda s: right["ln_1"]({**s, "x": added(s)}), "mid": lambda s: right["mid"]({**s, "x": added(s)})}


def _lost_heads(heads: int) -> Iterator[Variant]:
    """Yield one head whose result is zero, or has another sign."""
    for head in range(heads if heads > 1 else 0):
        fault = Fault("head-layout", "attn", f"the result of head {head} is zero, as if the loop over heads left it out")
        kept = torch.ones(heads, 1, 1, dtype=torch.float64)
        kept[head] = 0.0
        yield replace(Variant.of(f"head {head} lost", [fault], partial(_on_heads, kept), True), shared=True)
    fault = Fault("wrong-tensor", "attn.c_proj", "the output projection's weight has the other sign")
    yield Variant.of("c_proj negated", [fault], partial(_on_heads, torch.tensor(-1.0, dtype=torch.float64)), True)


def _on_heads(factor: Tensor, simulation: Simulation, layer: int) -> Stages:
    right = simulation.right(layer)["attn.mixed"]

    def mixed(s: State) -> Tensor:
        made = right(s)
        return made * factor.to(made) if factor.ndim == 0 or len(factor) == made.shape[1] else made

    return {"attn.mixed": mixed}


def _on_top(formulas: dict[str, Formula], simulation: Simulation, layer: int) -> Stages:
    def stage(name: str, formula: Formula) -> Stage:
        right = simulation.right(layer)[name]
        return lambda s: formula(right(s))

    return {name: stage(name, formula) for name, formula in formulas.items()}


def _rounded() -> Iterator[Variant]:
    """Yield values that are stored in fewer bits, at one place of a block, and the activation between two such values."""
    for dtype, bits in BITS.items():
        narrow = partial(mantissa, bits, False)
        for stage, words in ROUNDED.items():
            fault = Fault("reduced-precision", stage, f"{words} rounded to {dtype}")
            yield Variant.of(f"{stage} in {dtype}", [fault], partial(_on_top, {stage: narrow}), True)
        words = f"the activation takes and gives {dtype}, as a table of its values does"
        both = partial(_on_top, {"mlp.c_fc": narrow, "mlp.act": narrow})
        yield Variant.of(f"activation in {dtype}", [Fault("reduced-precision", "mlp.act", words)], both)
        words = f"the results of norms, projections and activations are rounded to {dtype}"
        every = partial(_on_top, dict.fromkeys(ROUNDED, narrow))
        yield replace(Variant.of(words, [Fault("reduced-precision", "", words)], every, True), shared=True)


def _copied(stage: str, source: str, simulation: Simulation, layer: int) -> Stages:
    return {stage: lambda s: s[source]}


def _on_bare_norm(stages: tuple[str, ...], simulation: Simulation, layer: int) -> Stages:
    def summed(branch: str, stream: str) -> Stage:
        return lambda s: layer_norm(s[stream], eps=simulation.config.layer_norm_epsilon) + s[branch]

    return {stage: summed(*BRANCHES[stage][:2]) for stage in stages}


def _unnormed() -> Iterator[Variant]:
    """Yield projections of some of queries, keys and values that take the stream as it is, without the norm."""
    for count in (2, 1):
        for letters in itertools.combinations(LETTERS, count):
            words = f"{' and '.join(LETTERS[one] for one in letters)} are computed from the stream before the norm"
            yield Variant.of(f"{letters} not normed", [Fault("norm-missing", "ln_1", words)], partial(_from_stream, letters))


def _from_stream(letters: tuple[str, ...], simulation: Simulation, layer: int) -> Stages:
    def stage(name: str) -> Stage:
        right = simulation.right(layer)[name]
        return lambda s: right({**s, "ln_1": s["x"]})

    return {f"attn.{one}": stage(f"attn.{one}") for one in letters}


def _thirds() -> Iterator[Variant]:
    """Yield mistakes where one of queries, keys and values is computed two or three times, and another one never."""
    for order in itertools.product(LETTERS, repeat=3):
        given = dict(zip(LETTERS, order, strict=True))
        wrong = {one: other for one, other in given.items() if one != other}
        if not wrong or len(set(order)) == 3 or wrong.keys() == {"v"}:  # a permutation, or mixing what is not the values
            continue
        words = ", ".join(f"the {LETTERS[one]} are the {LETTERS[other]}" for one, other in wrong.items())
        fault = Fault("qkv-order", "attn", f"{words}: a third of c_attn serves twice")
        yield Variant.of(f"thirds {''.join(order)}", [fault], partial(_of_third, wrong))


def _of_third(wrong: dict[str, str], simulation: Simulation, layer: int) -> Stages:
    right = simulation.right(layer)
    return {f"attn.{one}": right[f"attn.{other}"] for one, other in wrong.items()}


def _merged(simulation: Simulation) -> Iterator[Variant]:
    """Yield heads whose results are put together with their axes in another order, by a view of other memory."""
    rows, heads = len(simulation.ids), simulation.config.n_head
    shape = (rows, heads, simulation.ids.shape[1], simulation.config.head_dim)
    numbers = torch.arange(shape[0] * shape[1] * shape[2] * shape[3]).reshape(shape)
    ways: dict[str, Formula] = {}
    for order, exchanged in itertools.product(itertools.permutations(AXES), (False, True)):
        words = "rows and heads, which are one axis, are taken for heads and rows, and " if exchanged else ""
        words += f"the heads' results are viewed as (B, T, D) while they lie in memory as ({', '.join(order)})"
        ways[words] = partial(_in_memory, order, exchanged)
    seen = [layout.merge(numbers) for layout in Layout]  # GPT-2's own, and the walk's
    for words, way in ways.items():
        made = way(numbers)
        if any(torch.equal(made, other) for other in seen):
            continue
        seen.append(made)
        yield Variant.of(f"merged {words}", [Fault("head-layout", "attn", words)], partial(_merging, way), True, rows > 1)


def _in_memory(order: tuple[str, ...], exchanged: bool, mixed: Tensor) -> Tensor:
    rows, heads, tokens, size = mixed.shape
    mixed = mixed.reshape(heads, rows, tokens, size).transpose(0, 1) if exchanged else mixed
    return mixed.permute([AXES[one] for one in order]).reshape(rows, tokens, -1)


def _merging(way: Formula, simulation: Simulation, layer: int) -> Stages:
    return {"attn.heads": lambda s: way(s["attn.mixed"])}
