"""Follow one block's attention as a port computes it: from the projections of its input to the branch's result.

Shapes: y (B, T, D); q, k, v split into heads (B, H, T, K); scores and weights (B, H, T, T).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.tracing import point_at
from gpt2.port.diagnosis.hypotheses import attention_weights, likely_scales, scale_faults
from gpt2.port.diagnosis.norms import RMS, layer_norm
from gpt2.port.diagnosis.search import Choice, Chooser, Fault, Option, Recorded
from gpt2.port.diagnosis.trail import Trail
from gpt2.port.diagnosis.wiring import STREAM, streams

HEADS = (1, 0, 2)  # axes of (B, H, T, K) that a port may split: heads, rows, tokens
GRID = (1, 0)  # axes of (B, H, T, T) that a port may split
MAX_HIDDEN = 60  # combinations of weights to try where neither weights nor heads are recorded
# What the weights may mix, the right one first; the words describe the fault.
MIXED = {
    "v": "",
    "k": "the keys are mixed, not the values",
    "q": "the queries are mixed",
    "input": "attention's input itself is mixed: there is no projection to values",
    "stream": "the stream itself is mixed, not the values",
}
MERGED = "heads are put side by side without transposing back, which mixes positions and heads"
NO_PROJECTION = Fault("output-projection-missing", "attn", "the heads are added to the stream as they are")
EXCHANGED = Fault("qkv-order", "attn", "queries and keys have changed places")
Projected = dict[str, Recorded]  # "q", "k" and "v" of an input, each (B, T, D)
Heads = tuple[Tensor, tuple[Fault, ...]]  # (B, H, T, K), and the faults if the port computes this


class Layout(Enum):
    """How heads are cut out of the width; the value describes the fault."""

    RIGHT = ""
    VIEWED = "heads are cut out by view(B, H, T, K) without a transpose, which mixes positions and heads"
    INTERLEAVED = "a head is made of every n_head-th column, not of neighbouring ones"
    TIME_FIRST = "heads are cut out of (T, B, D) by a view, which mixes positions, rows and heads"

    def split(self, y: Tensor, heads: int) -> Tensor:
        """Split (B, T, D) into (B, H, T, K)."""
        batch, tokens, _ = y.shape
        return {
            Layout.RIGHT: y.unflatten(-1, (heads, -1)).transpose(1, 2),
            Layout.VIEWED: y.reshape(batch, heads, tokens, -1),
            Layout.INTERLEAVED: y.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2),
            Layout.TIME_FIRST: y.transpose(0, 1).reshape(batch, heads, tokens, -1),
        }[self]

    def merge(self, y: Tensor) -> Tensor:
        """Merge (B, H, T, K) into (B, T, D)."""
        batch, _, tokens, _ = y.shape
        return {
            Layout.RIGHT: y.transpose(1, 2).flatten(2),
            Layout.VIEWED: y.reshape(batch, tokens, -1),
            Layout.INTERLEAVED: y.permute(0, 2, 3, 1).flatten(2),
            Layout.TIME_FIRST: y.permute(2, 0, 1, 3).reshape(batch, tokens, -1),
        }[self]


def affine(chooser: Chooser, x: Tensor, weight: Tensor, bias: Tensor, part: str, heads: int = 0) -> Recorded | None:
    """Find ``x @ weight + bias`` among the recorded tensors, else without bias; ``heads``: also as split into heads."""
    product = x @ weight
    tries: list[tuple[Tensor, tuple[Fault, ...]]] = [(product + bias, ())]
    if bool(bias.any()):
        tries.append((product, (Fault("missing-bias", part, "no bias is added"),)))
    for value, faults in tries:
        laid, axes = (Layout.RIGHT.split(value, heads), HEADS) if heads else (value, STREAM)
        if (recorded := chooser.recorded(laid, axes)) is not None:
            own = Layout.RIGHT.merge(recorded.value) if heads else recorded.value
            return Recorded(own, recorded.error, faults)
    return None


def added(bias: Tensor, projection: Recorded, part: str) -> list[Option]:
    """Return a projection's possible results; a bias missing there may be added later, to the sum."""
    if not projection.faults:
        return [Option.known("projected", projection.value)]
    whole = projection.value + bias
    return [
        Option.known("bias later", whole, values={part: whole}),
        Option.known("no bias", projection.value, *projection.faults, silent=True, values={part: projection.value}),
    ]


def project(
    chooser: Chooser, config: GPT2Config, x: Tensor, weights: dict[str, Tensor], min_recorded: int = 1
) -> Projected | None:
    """Return queries, keys and values of ``x``, if at least ``min_recorded`` of them are recorded."""
    parts: Projected = {}
    thirds = zip("qkv", weights["attn.c_attn.weight"].chunk(3, 1), weights["attn.c_attn.bias"].chunk(3, 0), strict=True)
    for name, weight, bias in thirds:
        recorded = affine(chooser, x, weight, bias, "attn", config.n_head)
        parts[name] = recorded or Recorded(x @ weight + bias, None)
        if len(parts) - sum(one.error is not None for one in parts.values()) > 3 - min_recorded:
            return None
    return parts


class Attending:
    """Attention of the ``n``-th block that runs, with the weights of block ``layer``; ``choice`` is its input."""

    def __init__(self, trail: Trail, n: int, layer: int, choice: Choice[Projected]) -> None:
        self.chooser, self.pool, self.trail, self.config = trail.chooser, trail.pool, trail, trail.config
        self.n, self.layer, self.weights = n, layer, trail.weights(layer)
        self.parts, self.input = choice.result, choice.value
        self.stream = None if choice.option.base is None else choice.option.base.value
        self.faults: list[Fault] = []

    def run(self) -> list[Option]:
        """Return the results that the branch may have (what follows decides among several); none if attention is unknown."""
        for name, part in self.parts.items():
            self._keep(f"attn.{name}", part.value)
        words = {"q": "queries", "k": "keys", "v": "values"}
        if without := ", ".join(words[name] for name, part in self.parts.items() if part.faults):
            self.faults.append(Fault("missing-bias", "attn", f"the {without} have no bias"))
        layout, factors = self._layout()
        chosen = self._weigh(layout, factors)
        if chosen is None:
            error = None
            results = self._project(list(self._hidden(layout, factors)), recorded=False)
        else:
            mixed, factor = chosen.result, chosen.option.factor or 0.0
            error = mixed.error if chosen.error is None else chosen.error
            self.trail.factors[self.n] = factor, chosen.error
            if chosen.missed is not None:
                self.trail.missed[point_at(self.n, "attn")] = chosen.missed
            if layout is not Layout.RIGHT:
                self.faults.append(Fault("head-layout", "attn", layout.value))
            self.faults += [*chosen.option.faults, *mixed.faults]
            self._keep("attn.scores", self._scaled(layout, factor).tril())
            self._keep("attn.weights", chosen.value)
            self._keep("attn.heads", Layout.RIGHT.merge(mixed.value))
            results = self._project([(mixed.value, ())], recorded=True)
        self.trail.blame(self.n, self.faults, error)
        return results

    def _keep(self, part: str, value: Tensor) -> None:
        self.trail.values[point_at(self.n, part)] = value

    def _layout(self) -> tuple[Layout, list[float]]:
        """Return how heads are cut out, according to the scores, and the factors of the scores if recorded."""
        for layout in Layout:
            if factors := self.pool.factors(self._scores(layout), *GRID):
                return layout, factors
        return Layout.RIGHT, []

    def _scores(self, layout: Layout) -> Tensor:
        q, k = (layout.split(self.parts[name].value, self.config.n_head) for name in "qk")
        return q @ k.mT

    def _scaled(self, layout: Layout, factor: float) -> Tensor:
        """Return the scores, with the port's own numbers if recorded."""
        scores = self._scores(layout) * factor
        recorded = self.chooser.recorded(scores, GRID)
        return scores if recorded is None else recorded.value

    def _options(self, layout: Layout, factors: list[float]) -> Iterator[Option]:
        likely = likely_scales(self.config, self.layer)
        for factor in dict.fromkeys([*factors, *likely]):  # scores scaled after the mask are not recorded
            cost = len(scale_faults(self.config, self.layer, factor)) + 0.5 * bool(factors and factor not in factors)
            yield from attention_weights(self._scaled(layout, factor), factor, cost)
        for factor in (factors or likely)[:3]:
            right = next(attention_weights(self._scores(layout).mT * factor, factor))
            yield Option.known("exchanged", right.value, EXCHANGED, factor=factor, cost=1.0)

    def _mixtures(self, layout: Layout) -> Iterator[Heads]:
        """Yield what the weights may mix, the most likely first."""
        sources = {name: part.value for name, part in self.parts.items()} | {"input": self.input}
        if self.stream is not None:
            sources["stream"] = self.stream
        for way in dict.fromkeys([layout, *Layout]):
            for source, words in MIXED.items():
                if source in sources:
                    faults = (Fault("value-projection-wrong", "attn", words),) if words else ()
                    yield way.split(sources[source], self.config.n_head), faults

    def _mixed(self, layout: Layout, weights: Tensor) -> Recorded | None:
        """Return weights times values, if recorded."""
        for values, faults in self._mixtures(layout):
            if (recorded := self.chooser.recorded(weights @ values, HEADS)) is not None:
                return recorded._replace(faults=faults)
        return None

    def _weigh(self, layout: Layout, factors: list[float]) -> Choice[Recorded] | None:
        options = list(self._options(layout, factors))
        chosen = self.chooser.choose("weights", options, lambda weights: self._mixed(layout, weights), GRID)
        if chosen is None:  # one operator computes weights and values: try all products
            for option in sorted(options, key=lambda option: option.price):
                if (mixed := self._mixed(layout, option.value)) is not None:
                    return Choice(option, option.value, None, mixed)
        return chosen

    def _hidden(self, layout: Layout, factors: list[float]) -> Iterator[Heads]:
        """Yield what the heads may be if neither weights nor heads are recorded."""
        for option in sorted(self._options(layout, factors), key=lambda option: option.price)[:MAX_HIDDEN]:
            scale = () if option.factor is None else scale_faults(self.config, self.layer, option.factor)
            for values, faults in list(self._mixtures(layout))[:5]:
                yield option.value @ values, (*scale, *option.faults, *faults)

    def _project(self, heads: list[Heads], recorded: bool) -> list[Option]:
        """Return the branch's possible results; ``recorded``: the heads are recorded, not candidates."""
        unseen: list[Option] = []
        for y, faults in heads:
            right = Layout.RIGHT.merge(y)
            for layout in Layout:
                merged = layout.merge(y)
                if layout is not Layout.RIGHT and torch.equal(merged, right):
                    continue
                wrong = faults if layout is Layout.RIGHT else (*faults, Fault("head-layout", "attn", MERGED))
                if (results := self._projected(merged, *wrong)) is not None:
                    return results
                values = {"attn.c_proj": merged}
                unseen.append(Option.known(f"heads {layout.name}", merged, *wrong, NO_PROJECTION, silent=True, values=values))
                if recorded and layout is Layout.RIGHT:
                    whole = merged @ self.weights["attn.c_proj.weight"] + self.weights["attn.c_proj.bias"]
                    unseen.append(Option.known("unseen projection", whole, *wrong, cost=0.5))
            for words, normed in self._normed(right) if recorded else ():
                if (results := self._projected(normed, *faults, Fault("extra-norm", "attn", words))) is not None:
                    return results
        if recorded:
            return unseen
        for entry in streams(self.pool, self.input[..., 0], self.config.n_embd):  # any tensor may enter the projection
            if (results := self._projected(entry)) is not None:
                self.trail.lost.append(point_at(self.n, "attn"))
                return results
        return []

    def _projected(self, merged: Tensor, *wrong: Fault) -> list[Option] | None:
        """Return the results of the output projection of ``merged``, if recorded; ``wrong`` are then the port's faults."""
        bias = self.weights["attn.c_proj.bias"]
        projection = affine(self.chooser, merged, self.weights["attn.c_proj.weight"], bias, "attn.c_proj")
        if projection is None:
            return None
        self.faults += wrong
        self._keep("attn.heads", merged)
        self._keep("attn.c_proj", projection.value)
        return added(bias, projection, "attn.c_proj")

    def _normed(self, merged: Tensor) -> Iterator[tuple[str, Tensor]]:
        words = "the heads are normalised before the output projection"
        yield words, layer_norm(merged)
        yield words, layer_norm(merged, **RMS)
        for name in ("ln_1", "ln_2"):
            yield f"{words}, by {name}", layer_norm(merged, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
