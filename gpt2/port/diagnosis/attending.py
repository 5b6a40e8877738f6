"""Follow one block's attention as a port computes it: from the projections of its input to the branch's result.

Shapes: y (B, T, D); q, k, v split into heads (B, H, T, K); scores and weights (B, H, T, T).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.tracing import point_at
from gpt2.port.diagnosis.hypotheses import Fault, attention_weights, likely_scales, scale_faults
from gpt2.port.diagnosis.norms import bare_norm
from gpt2.port.diagnosis.search import Choice, Chooser, Kind, Option
from gpt2.port.diagnosis.trail import Trail
from gpt2.port.diagnosis.wiring import STREAM
from gpt2.port.recording.pool import Pool

HEADS = (1, 0, 2)  # axes of (B, H, T, K) along which a port may have it in pieces: heads, rows, tokens
GRID = (1, 0)  # of (B, H, T, T)
MAX_HIDDEN = 60  # combinations of weights to try where neither weights nor heads are recorded
Split = Callable[[Tensor], Tensor]


class Layout(Enum):
    """How heads are cut out of the width; the value says what is wrong with it."""

    RIGHT = ""
    VIEWED = "heads are cut out by view(B, H, T, K) without a transpose, which mixes positions and heads"
    INTERLEAVED = "a head is made of every n_head-th column, not of neighbouring ones"
    TIME_FIRST = "heads are cut out of (T, B, D) by a view, which mixes positions, rows and heads"


@dataclass(frozen=True)
class Projected:
    """Queries, keys and values of an input, each (B, T, D); their errors where they are recorded; and the faults."""

    parts: dict[str, Tensor]
    errors: dict[str, float]
    faults: tuple[Fault, ...] = ()


class Recorded(NamedTuple):
    """A recorded value, the error of the match, and the faults that the port has if it computes this."""

    value: Tensor
    error: float
    faults: tuple[Fault, ...]


def affine(chooser: Chooser, x: Tensor, weight: Tensor, bias: Tensor, part: str) -> Recorded | None:
    """``x`` times weight plus bias if it is recorded, else without the bias if that is."""
    product = x @ weight
    tries: list[tuple[Tensor, tuple[Fault, ...]]] = [(product + bias, ())]
    if bool(bias.any()):
        tries.append((product, (Fault("missing-bias", part, "no bias is added"),)))
    for value, faults in tries:
        if (match := chooser.pool.find(value, *STREAM)) is not None:
            return Recorded(chooser.pool.adopt(value, match), match.error, faults)
    return None


def added(bias: Tensor, projection: Recorded, part: str) -> list[Option]:
    """The results of a recorded projection. Where it was recorded without its bias, the bias may be added later, to the sum."""
    if not projection.faults:
        return [Option.known("projected", projection.value)]
    whole = projection.value + bias
    return [
        Option.known("bias later", whole, values={part: whole}),
        Option.known("no bias", projection.value, *projection.faults, silent=True, values={part: projection.value}),
    ]


def project(chooser: Chooser, config: GPT2Config, x: Tensor, weights: dict[str, Tensor], enough: int = 1) -> Projected | None:
    """Queries, keys and values of ``x``, if at least ``enough`` of them are recorded."""
    parts: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    without_bias = []
    words = {"q": "queries", "k": "keys", "v": "values"}
    thirds = zip(words, weights["attn.c_attn.weight"].chunk(3, 1), weights["attn.c_attn.bias"].chunk(3, 0), strict=True)
    for name, weight, bias in thirds:
        product = x @ weight
        parts[name] = product + bias
        for value in (parts[name], product) if bool(bias.any()) else (parts[name],):
            heads = value.unflatten(-1, (config.n_head, -1)).transpose(1, 2)
            if (match := chooser.pool.find(heads, *HEADS)) is not None:
                parts[name], errors[name] = chooser.pool.adopt(heads, match).transpose(1, 2).flatten(2), match.error
                if value is product:
                    without_bias.append(words[name])
                break
        if not errors and name == "k" and enough > 1:
            return None
    if len(errors) < enough:
        return None
    fault = Fault("missing-bias", "attn", f"the {', '.join(without_bias)} have no bias")
    return Projected(parts, errors, (fault,) if without_bias else ())


class Attending:
    """Attention of the block that runs as number ``n``, with the weights of block ``layer``.

    ``projected`` are its queries, keys and values, ``input`` what they are projections of, ``stream`` what that was made from.
    """

    def __init__(
        self,
        chooser: Chooser,
        trail: Trail,
        n: int,
        layer: int,
        weights: dict[str, Tensor],
        projected: Projected,
        input: Tensor,
        stream: Tensor | None,
    ) -> None:
        self.chooser, self.pool, self.trail, self.config = chooser, chooser.pool, trail, trail.config
        self.n, self.layer, self.weights = n, layer, weights
        self.projected, self.input, self.stream = projected, input, stream
        self.batch, self.tokens, self.width = input.shape
        self.faults = list(projected.faults)

    def run(self) -> list[Option]:
        """The results that the branch may have (several where only what follows can decide); none if attention is unknown."""
        for name, part in self.projected.parts.items():
            self._keep(f"attn.{name}", part, self.projected.errors.get(name))
        split, faults, factors = self._split()
        chosen = self._weigh(split, factors)
        if chosen is None:
            error = None
            results = self._project(list(self._hidden(split, factors)), recorded=False)
        else:
            mixed, factor = chosen.result, chosen.option.factor or 0.0
            error = mixed.error if chosen.error is None else chosen.error
            self.trail.factors[self.n] = factor
            if chosen.missed is not None:
                self.trail.missed[point_at(self.n, "attn")] = chosen.missed
            self.faults += [*faults, *chosen.option.faults, *mixed.faults]
            self._keep("attn.scores", self._scaled(split, factor).tril(), None)
            self._keep("attn.weights", chosen.value, chosen.error)
            self._keep("attn.heads", self._merges(mixed.value)[Layout.RIGHT], mixed.error)
            results = self._project([(mixed.value, ())], recorded=True)
        self.trail.blame(self.n, self.faults, error)
        return results

    def _keep(self, part: str, value: Tensor, error: float | None) -> None:
        self.trail.keep(point_at(self.n, part), value, error)

    # Splitting into heads

    def _splits(self) -> dict[Layout, Split]:
        heads = self.config.n_head
        return {
            Layout.RIGHT: lambda y: y.unflatten(-1, (heads, -1)).transpose(1, 2),
            Layout.VIEWED: lambda y: y.reshape(self.batch, heads, self.tokens, -1),
            Layout.INTERLEAVED: lambda y: y.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2),
            Layout.TIME_FIRST: lambda y: y.transpose(0, 1).reshape(self.batch, heads, self.tokens, -1),
        }

    def _split(self) -> tuple[Split, tuple[Fault, ...], list[float]]:
        """How heads are cut out, as the scores show; and the factors of the scores where they are recorded."""
        for layout, split in self._splits().items():
            if factors := self.pool.factors(self._scores(split), *GRID):
                return split, () if layout is Layout.RIGHT else (Fault("head-layout", "attn", layout.value),), factors
        return self._splits()[Layout.RIGHT], (), []

    def _scores(self, split: Split) -> Tensor:
        return split(self.projected.parts["q"]) @ split(self.projected.parts["k"]).mT

    def _scaled(self, split: Split, factor: float) -> Tensor:
        """The scores, with the port's own numbers if they are recorded."""
        scores = self._scores(split) * factor
        match = self.pool.find(scores, *GRID)
        return scores if match is None else self.pool.adopt(scores, match)

    # Weights

    def _options(self, split: Split, factors: list[float]) -> Iterator[Option]:
        likely = likely_scales(self.config, self.layer)

        def option(label: str, weights: Tensor, faults: tuple[Fault, ...], factor: float, cost: float, kind: Kind) -> Option:
            return Option(label, lambda: weights, faults, kind, cost=cost, factor=factor)

        for factor in dict.fromkeys([*factors, *likely]):  # scores that are scaled after the mask are not recorded as such
            wrong = len(scale_faults(self.config, self.layer, factor)) + 0.5 * bool(factors and factor not in factors)
            for number, one in enumerate(attention_weights(self._scaled(split, factor))):
                kind = Kind.OTHER if number else Kind.RIGHT
                yield option(one.label, one.weights, one.faults, factor, wrong + one.cost, kind)
        exchanged = Fault("qkv-order", "attn", "queries and keys have changed places")
        for factor in (factors or likely)[:3]:
            right = next(attention_weights(self._scores(split).mT * factor))
            yield option("exchanged", right.weights, (exchanged,), factor, 1.0, Kind.OTHER)

    def _mixtures(self, split: Split) -> Iterator[tuple[Tensor, tuple[Fault, ...]]]:
        """What the weights may mix (B, H, T, K), and what is wrong if they do."""

        def wrong(detail: str) -> tuple[Fault, ...]:
            return (Fault("value-projection-wrong", "attn", detail),)

        parts = self.projected.parts
        choices: list[tuple[Tensor, tuple[Fault, ...]]] = [
            (parts["v"], ()),
            (parts["k"], wrong("the keys are mixed, not the values")),
            (parts["q"], wrong("the queries are mixed")),
            (self.input, wrong("attention's input itself is mixed: there is no projection to values")),
        ]
        if self.stream is not None:
            choices.append((self.stream, wrong("the stream itself is mixed, not the values")))
        for way in dict.fromkeys([split, *self._splits().values()]):
            for value, faults in choices:
                yield way(value), faults

    def _mixed(self, split: Split, weights: Tensor) -> Recorded | None:
        """Weights times values, where that is recorded."""
        for values, faults in self._mixtures(split):
            y = weights @ values
            if (match := self.pool.find(y, *HEADS)) is not None:
                return Recorded(self.pool.adopt(y, match), match.error, faults)
        return None

    def _weigh(self, split: Split, factors: list[float]) -> Choice[Recorded] | None:
        options = list(self._options(split, factors))
        chosen = self.chooser.choose("weights", options, lambda weights: self._mixed(split, weights), GRID)
        if chosen is None:  # the weights are inside one operator with the values: try all that these give
            for option in sorted(options, key=lambda option: option.price):
                if (mixed := self._mixed(split, option.value)) is not None:
                    return Choice(option, option.value, None, mixed)
        return chosen

    def _hidden(self, split: Split, factors: list[float]) -> Iterator[tuple[Tensor, tuple[Fault, ...]]]:
        """Heads as they may be where neither weights nor heads are recorded, with what is wrong if they are."""
        for option in sorted(self._options(split, factors), key=lambda option: option.price)[:MAX_HIDDEN]:
            scale = () if option.factor is None else scale_faults(self.config, self.layer, option.factor)
            for values, faults in list(self._mixtures(split))[:5]:
                yield option.value @ values, (*scale, *option.faults, *faults)

    # The way back

    def _merges(self, y: Tensor) -> dict[Layout, Tensor]:
        return {
            Layout.RIGHT: y.transpose(1, 2).flatten(2),
            Layout.VIEWED: y.reshape(self.batch, self.tokens, -1),
            Layout.INTERLEAVED: y.permute(0, 2, 3, 1).flatten(2),
            Layout.TIME_FIRST: y.permute(2, 0, 1, 3).reshape(self.batch, self.tokens, -1),
        }

    def _project(self, heads: list[tuple[Tensor, tuple[Fault, ...]]], recorded: bool) -> list[Option]:
        """From the heads to the branch's results. ``recorded``: the heads are, else they are candidates."""
        mixed = "heads are put side by side without transposing back, which mixes positions and heads"
        missing = Fault("output-projection-missing", "attn", "the heads are added to the stream as they are")
        unseen: list[Option] = []
        for y, faults in heads:
            right = self._merges(y)[Layout.RIGHT]
            for layout, merged in self._merges(y).items():
                if layout is not Layout.RIGHT and torch.equal(merged, right):
                    continue
                wrong = faults if layout is Layout.RIGHT else (*faults, Fault("head-layout", "attn", mixed))
                if (projection := self._projection(merged)) is not None:
                    return self._done(merged, projection, *wrong)
                values = {"attn.c_proj": merged}
                unseen.append(Option.known(f"heads {layout.name}", merged, *wrong, missing, silent=True, values=values))
                if recorded and layout is Layout.RIGHT:
                    whole = merged @ self.weights["attn.c_proj.weight"] + self.weights["attn.c_proj.bias"]
                    unseen.append(replace(Option.known("unseen projection", whole, *wrong), cost=0.5))
            for words, normed in self._normed(right) if recorded else ():
                if (projection := self._projection(normed)) is not None:
                    return self._done(normed, projection, *faults, Fault("extra-norm", "attn", words))
        if recorded:
            return unseen
        for entry in streams(self.pool, self.input[..., 0], self.width):  # any tensor may be what goes into the projection
            if (projection := self._projection(entry)) is not None:
                self.trail.lost.append(point_at(self.n, "attn"))
                return self._done(entry, projection)
        return []

    def _projection(self, merged: Tensor) -> Recorded | None:
        weight, bias = self.weights["attn.c_proj.weight"], self.weights["attn.c_proj.bias"]
        return affine(self.chooser, merged, weight, bias, "attn.c_proj")

    def _done(self, merged: Tensor, projection: Recorded, *wrong: Fault) -> list[Option]:
        self.faults += wrong
        self._keep("attn.heads", merged, None)
        self._keep("attn.c_proj", projection.value, projection.error)
        return added(self.weights["attn.c_proj.bias"], projection, "attn.c_proj")

    def _normed(self, merged: Tensor) -> Iterator[tuple[str, Tensor]]:
        plain = bare_norm(1e-5)(merged)
        words = "the heads are normalised before the output projection"
        yield words, plain
        yield words, bare_norm(1e-5, rms=True)(merged)
        for name in ("ln_1", "ln_2"):
            yield f"{words}, by {name}", plain * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def streams(pool: Pool, ids: Tensor, width: int) -> Iterator[Tensor]:
    """Every recorded tensor that may be a (B, T, D): as it lies, or with time first."""
    batch, tokens = ids.shape
    for entry in pool.of_size(batch * tokens * width):
        if entry.shape[-1] != width:
            if entry.shape[:2] == (batch, tokens):  # heads side by side, about to be merged
                yield entry.reshape(batch, tokens, width)
        elif entry.shape[:2] == (tokens, batch) and tokens != batch:
            yield entry.transpose(0, 1)
        elif entry.ndim <= 3:
            yield entry.reshape(batch, tokens, width)
