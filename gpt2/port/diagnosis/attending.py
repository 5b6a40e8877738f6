"""One block's attention as a port computes it: from the projections of its input to the branch that is added to the stream.

Shapes: y (B, T, D); q, k, v split into heads (B, H, T, K); scores and weights (B, H, T, T).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.hypotheses import Finding, attention_weights, likely_scales, scale_finding
from gpt2.port.diagnosis.search import Chooser, Option
from gpt2.port.recording.pool import Pool

STREAM = (0, 1)  # axes along which a port may have a (B, T, D) in pieces: rows, tokens
HEADS = (1, 0, 2)  # of (B, H, T, K): heads, rows, tokens
GRID = (1, 0)  # of (B, H, T, T)
Split = Callable[[Tensor], Tensor]


@dataclass
class Branch:
    """What became of one branch: traced points and how far each was off where it was found, what is wrong, and the results that
    it may have (several where only what follows can tell)."""

    values: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    results: list[Option] = field(default_factory=list)
    factor: float | None = None  # of the scores
    missed: float | None = None  # how far off the weights would be by GPT-2's formula

    def keep(self, point: str, value: Tensor, error: float | None) -> None:
        self.values[point] = value
        if error is not None:
            self.errors[point] = error


@dataclass(frozen=True)
class Projected:
    """Queries, keys and values of an input, as (B, T, D); how far each was off where it was found; and what is wrong."""

    parts: dict[str, Tensor]
    errors: dict[str, float]
    findings: tuple[Finding, ...]


def affine(chooser: Chooser, x: Tensor, weight: Tensor, bias: Tensor, axes: tuple[int, ...], part: str) -> tuple | None:
    """x times weight plus bias where it is found, or without the bias: value, error, findings. None if neither is."""
    product = x @ weight
    for value, findings in (
        (product + bias, ()),
        *([(product, (Finding("missing-bias", part, "no bias is added"),))] if bool(bias.any()) else ()),
    ):
        if (match := chooser.pool.find(value, *axes)) is not None:
            return chooser.pool.adopt(value, match), match.error, findings
    return None


def added(bias: Tensor, found: tuple[Tensor, float, tuple[Finding, ...]], part: str) -> list[Option]:
    """The results of a projection that was found. Where it was seen without its bias, that may be added later, to the sum."""
    value, _, findings = found
    if not findings:
        return [Option("projected", lambda: value)]
    whole = value + bias
    return [
        Option("bias later", lambda: whole, values={part: whole}),
        Option("no bias", lambda: value, findings, silent=True, values={part: value}),
    ]


def project(chooser: Chooser, config: GPT2Config, x: Tensor, weights: dict[str, Tensor], enough: int = 1) -> Projected | None:
    """Queries, keys and values of ``x``, if at least ``enough`` of them are found."""
    parts, errors, lacking = {}, {}, []
    fused = zip("qkv", weights["attn.c_attn.weight"].chunk(3, 1), weights["attn.c_attn.bias"].chunk(3, 0), strict=True)
    for name, weight, bias in fused:
        product = x @ weight
        parts[name] = product + bias
        for value in (parts[name], product) if bool(bias.any()) else (parts[name],):
            heads = value.unflatten(-1, (config.n_head, -1)).transpose(1, 2)
            if (match := chooser.pool.find(heads, *HEADS)) is not None:
                parts[name], errors[name] = chooser.pool.adopt(heads, match).transpose(1, 2).flatten(2), match.error
                if value is product:
                    lacking.append(name)
                break
        if not errors and name == "k" and enough > 1:
            return None
    if len(errors) < enough:
        return None
    words = {"q": "queries", "k": "keys", "v": "values"}
    findings = ()
    if lacking:
        detail = f"the {', '.join(words[name] for name in lacking)} have no bias"
        findings = (Finding("missing-bias", "attn", detail),)
    return Projected(parts, errors, findings)


class Attending:
    """Attention of one block. ``projected`` are its queries, keys and values, ``taken`` what they are projections of, ``stream``
    what that was made from."""

    def __init__(
        self,
        chooser: Chooser,
        config: GPT2Config,
        layer: int,
        weights: dict[str, Tensor],
        projected: Projected,
        taken: Tensor,
        stream: Tensor | None,
    ) -> None:
        self.chooser, self.pool, self.config, self.layer, self.weights = chooser, chooser.pool, config, layer, weights
        self.projected, self.taken, self.stream = projected, taken, stream
        self.batch, self.tokens, self.width = taken.shape
        self.branch = Branch(findings=list(projected.findings))
        for name, part in projected.parts.items():
            self.branch.keep(f"attn.{name}", part, projected.errors.get(name))

    def run(self) -> Branch:
        """The branch; its ``results`` are empty if what attention computes could not be told."""
        split, findings, factors = self._split()
        chosen = self._weigh(split, factors)
        heads: list[tuple[Tensor, tuple[Finding, ...]]] = []
        if chosen is not None:
            option, weights, error, (y, y_error, more), self.branch.missed = chosen
            factor = option.base
            self.branch.findings += [*findings, *option.findings, *more]
            self.branch.factor = factor
            self.branch.keep("attn.scores", self._scaled(split, factor).tril(), None)
            self.branch.keep("attn.weights", weights, error)
            heads = [(y, ())]
            self.branch.keep("attn.heads", self._merges(y)["right"], y_error)
        else:
            heads = list(self._hidden(split, factors))
        self._project(heads, already=chosen is not None)
        return self.branch

    # Splitting into heads

    def _splits(self) -> dict[str, Split]:
        heads = self.config.n_head
        return {
            "right": lambda y: y.unflatten(-1, (heads, -1)).transpose(1, 2),
            "viewed": lambda y: y.reshape(self.batch, heads, self.tokens, -1),
            "interleaved": lambda y: y.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2),
            "viewed, time first": lambda y: y.transpose(0, 1).reshape(self.batch, heads, self.tokens, -1),
        }

    def _split(self) -> tuple[Split, tuple[Finding, ...], list[float]]:
        """How heads are cut out, as the scores show; and the factors by which these are seen multiplied."""
        details = {
            "viewed": "heads are cut out by view(B, H, T, K) without a transpose, which mixes positions and heads",
            "interleaved": "a head is made of every n_head-th column, not of neighbouring ones",
            "viewed, time first": "heads are cut out of (T, B, D) by a view, which mixes positions, rows and heads",
        }
        for label, split in self._splits().items():
            factors = self.pool.factors(self._scores(split), *GRID)
            if factors:
                findings = () if label == "right" else (Finding("head-layout", "attn", details[label]),)
                return split, findings, factors
        return self._splits()["right"], (), []

    def _scores(self, split: Split) -> Tensor:
        return split(self.projected.parts["q"]) @ split(self.projected.parts["k"]).mT

    def _scaled(self, split: Split, factor: float) -> Tensor:
        """The scores, as the port has them if they can be seen."""
        scores = self._scores(split) * factor
        match = self.pool.find(scores, *GRID)
        return scores if match is None else self.pool.adopt(scores, match)

    # Weights

    def _options(self, split: Split, factors: list[float]) -> Iterator[Option]:
        right = likely_scales(self.config, self.layer)
        raw = self._scores(split)
        for factor in dict.fromkeys([*factors, *right]):  # what is scaled after it is masked is not seen as scaled scores
            wrong = len(scale_finding(self.config, self.layer, factor)) + 0.5 * bool(factors and factor not in factors)
            for label, weights, findings in attention_weights(self._scaled(split, factor)):
                cost = wrong + 0.1 * label.startswith("filled")
                yield Option(label, lambda weights=weights: weights, findings, base=factor, cost=cost)
        exchanged = Finding("qkv-order", "attn", "queries and keys have changed places")
        for factor in (factors or right)[:3]:
            for label, weights, findings in attention_weights(raw.mT * factor):
                if label == "right":
                    yield Option("exchanged", lambda weights=weights: weights, (exchanged, *findings), base=factor, cost=1.0)

    def _mixtures(self, split: Split) -> Iterator[tuple[Tensor, tuple[Finding, ...]]]:
        """(B, H, T, K) that the weights may mix."""

        def wrong(detail: str) -> tuple[Finding, ...]:
            return (Finding("value-projection-wrong", "attn", detail),)

        splits = self._splits()
        parts = self.projected.parts
        choices = [(parts["v"], ())]
        choices += [(parts["k"], wrong("the keys are mixed, not the values")), (parts["q"], wrong("the queries are mixed"))]
        choices += [(self.taken, wrong("attention's input itself is mixed: there is no projection to values"))]
        if self.stream is not None:
            choices += [(self.stream, wrong("the stream itself is mixed, not the values"))]
        for way in dict.fromkeys([split, *splits.values()]):
            for value, findings in choices:
                yield way(value), findings

    def _mixed(self, split: Split, weights: Tensor) -> tuple[Tensor, float, tuple[Finding, ...]] | None:
        """Weights times values, where that is found."""
        for values, findings in self._mixtures(split):
            y = weights @ values
            if (match := self.pool.find(y, *HEADS)) is not None:
                return self.pool.adopt(y, match), match.error, findings
        return None

    def _weigh(self, split: Split, factors: list[float]) -> tuple | None:
        options = list(self._options(split, factors))
        found = self.chooser.choose("weights", options, lambda option, weights: self._mixed(split, weights), GRID)
        if found is None:  # hidden in one operator with the values: judged by these
            for option in sorted(options, key=lambda option: option.price):
                if (mixed := self._mixed(split, option.value)) is not None:
                    return option, option.value, None, mixed, None
        return found

    def _hidden(self, split: Split, factors: list[float]) -> Iterator[tuple[Tensor, tuple[Finding, ...]]]:
        """Heads as they may be where neither weights nor heads are seen, with what is wrong if they are."""
        for option in sorted(self._options(split, factors), key=lambda option: option.price)[:60]:
            scale = scale_finding(self.config, self.layer, option.base)
            for values, findings in list(self._mixtures(split))[:5]:
                yield option.value @ values, (*scale, *option.findings, *findings)

    # The way back

    def _merges(self, y: Tensor) -> dict[str, Tensor]:
        return {
            "right": y.transpose(1, 2).flatten(2),
            "viewed": y.reshape(self.batch, self.tokens, -1),
            "interleaved": y.permute(0, 2, 3, 1).flatten(2),
            "viewed, time first": y.permute(2, 0, 1, 3).reshape(self.batch, self.tokens, -1),
        }

    def _project(self, heads: list[tuple[Tensor, tuple[Finding, ...]]], already: bool) -> None:
        """From the heads to the branch's result."""
        weight, bias = self.weights["attn.c_proj.weight"], self.weights["attn.c_proj.bias"]
        mixed = "heads are put side by side without transposing back, which mixes positions and heads"
        hidden: list[Option] = []
        for y, findings in heads:
            for label, merged in self._merges(y).items():
                if label != "right" and torch.equal(merged, self._merges(y)["right"]):
                    continue
                wrong = (*findings, *(() if label == "right" else (Finding("head-layout", "attn", mixed),)))
                found = affine(self.chooser, merged, weight, bias, STREAM, "attn.c_proj")
                if found is None:
                    hidden.append(self._unprojected(label, merged, wrong))
                    if already and label == "right":
                        hidden.append(Option("unseen projection", lambda m=merged: m @ weight + bias, wrong, cost=0.5))
                    continue
                self._done(merged, found, wrong)
                return
            for label, normed in self._normed(self._merges(y)["right"]) if already else ():
                if (found := affine(self.chooser, normed, weight, bias, STREAM, "attn.c_proj")) is not None:
                    self._done(normed, found, (*findings, Finding("extra-norm", "attn", label)))
                    return
        if already:
            self.branch.results = hidden
            return
        for entry in streams(self.pool, self.batch, self.tokens, self.width):  # whatever it is that goes into the projection
            if (found := affine(self.chooser, entry, weight, bias, STREAM, "attn.c_proj")) is not None:
                self._done(entry, found, (Finding("undetermined", "attn", "the heads are computed in a way not known here"),))
                return

    def _unprojected(self, label: str, merged: Tensor, wrong: tuple[Finding, ...]) -> Option:
        missing = Finding("output-projection-missing", "attn", "the heads are added to the stream as they are")
        return Option(f"heads {label}", lambda: merged, (*wrong, missing), silent=True, values={"attn.c_proj": merged})

    def _done(self, merged: Tensor, found: tuple[Tensor, float, tuple[Finding, ...]], wrong: tuple[Finding, ...]) -> None:
        value, error, _ = found
        self.branch.findings += wrong
        self.branch.keep("attn.heads", merged, self.branch.errors.get("attn.heads"))
        self.branch.keep("attn.c_proj", value, error)
        self.branch.results = added(self.weights["attn.c_proj.bias"], found, "attn.c_proj")

    def _normed(self, merged: Tensor) -> Iterator[tuple[str, Tensor]]:
        plain = (merged - merged.mean(-1, keepdim=True)) / (merged.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        words = "the heads are normalised before the output projection"
        yield words, plain
        yield (
            words,
            merged / math.sqrt(1e-5) if not merged.any() else merged * (merged.square().mean(-1, keepdim=True) + 1e-5).rsqrt(),
        )
        for name in ("ln_1", "ln_2"):
            yield f"{words}, by {name}", plain * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def streams(pool: Pool, batch: int, tokens: int, width: int) -> Iterator[Tensor]:
    """Whatever in the pool may be a (B, T, D): as it lies, or with time first."""
    for entry in pool.of_size(batch * tokens * width):
        if entry.shape[-1] != width:
            if entry.shape[:2] == (batch, tokens):  # heads side by side, about to be merged
                yield entry.reshape(batch, tokens, width)
        elif entry.shape[:2] == (tokens, batch) and tokens != batch:
            yield entry.transpose(0, 1)
        elif entry.ndim <= 3:
            yield entry.reshape(batch, tokens, width)
