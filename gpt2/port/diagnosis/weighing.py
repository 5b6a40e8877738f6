"""Find which weights mix which values in a block's attention: how tokens are compared, scaled, masked, and what is mixed.

Shapes: q, k, v split into heads (B, H, T, K); scores and weights (B, H, T, T).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.port.diagnosis.causes import SCORES
from gpt2.port.diagnosis.hypotheses import (
    MASK_FAULTS,
    allowed,
    attention_weights,
    likely_scales,
    mask_faults,
    scale_faults,
)
from gpt2.port.diagnosis.projecting import HEADS, Projected
from gpt2.port.diagnosis.rotary import turned_pair
from gpt2.port.diagnosis.scores import Layout, Scoring, right_scorings, wrong_scorings
from gpt2.port.diagnosis.screen import Mixture, recorded_products, stacked
from gpt2.port.diagnosis.search import Choice, Fault, Option, Recorded, against_right
from gpt2.port.diagnosis.trail import Trail
from gpt2.port.graph import right_scale

GRID = (1, 0)  # axes of (B, H, T, T) that a port may split
SATURATED = 1e-6  # the error of values against their mixture, below which each token sees only itself
MASKS = 10  # of the possible results of mask and softmax, those tried with an unlikely comparison of tokens
# What the weights may mix, the right one first; the words describe the fault.
MIXED = {
    "v": "",
    "k": "the keys are mixed, not the values",
    "q": "the queries are mixed",
    "input": "attention's input itself is mixed: there is no projection to values",
    "stream": "the stream itself is mixed, not the values",
}
OWN_WEIGHTS = "y = weights @ v  # weights (B, n_head, T, T), v (B, n_head, T, head_size): each head its own"
SCALED = "weights = scores.softmax(-1)  # divided by nothing: dropout divides by 1 - p while training only"
EXCHANGED = Fault("qkv-order", "attn", "queries and keys have changed places")
TURNED = "queries and keys are turned by an angle that depends on the position (rotary position embedding)"
ROTARY = Fault("rotary-positions", "attn", TURNED)
Heads = tuple[Tensor, tuple[Fault, ...]]  # (B, H, T, K), and the faults if the port computes this


class Weighing:
    """The search in block ``layer``, from its projections and the branch's input; ``scorings``: the likely ways to compare."""

    def __init__(self, trail: Trail, layer: int, choice: Choice[Projected]) -> None:
        self.chooser, self.pool, self.config, self.layer = trail.chooser, trail.pool, trail.config, layer
        self.parts, self.input = choice.result, choice.value
        self.stream = None if choice.option.base is None else choice.option.base.value
        self.scorings = list(right_scorings({name: part.value for name, part in self.parts.items()}, self.config))
        self._known_mixtures: dict[tuple[Layout, int], list[tuple[Mixture, tuple[Fault, ...]]]] = {}

    def scoring(self) -> tuple[Scoring, list[float]]:
        """Return how tokens are compared, according to the scores or else the weights, and the factors of the scores if known."""
        for scoring in self.scorings:
            if factors := self._factors(scoring):
                return scoring, factors
        if (rotary := self._rotary()) is not None:
            self.scorings = [rotary]
            return rotary, self._factors(rotary)
        for scoring in self.scorings:
            for factor in dict.fromkeys([scoring.usual_factor, right_scale(self.config, self.layer)]):
                causal = next(attention_weights(scoring.value * factor, factor)).value
                if self.chooser.recorded(causal, GRID) is not None:
                    return scoring, [factor]
        return self.scorings[0], []

    def _factors(self, scoring: Scoring) -> list[float]:
        """Return the factors with which scores are recorded, those of later tokens perhaps left zero."""
        return self.pool.factors(scoring.value, *GRID) or self.pool.factors(scoring.value.tril(), *GRID)

    def _rotary(self) -> Scoring | None:
        """Return the comparison of queries and keys after rotary position embedding, if that is recorded."""
        q, k = (Layout.RIGHT.split(self.parts[name].value, self.config.n_head) for name in "qk")
        like = [next(i for i in range(n + 1) if torch.allclose(k[:, i], k[:, n])) for n in range(k.size(1))]
        firsts = sorted(set(like))  # keys that several heads share may be turned before they are repeated
        turned = turned_pair(self.pool, q, k) or (turned_pair(self.pool, q, k[:, firsts]) if len(firsts) < len(like) else None)
        if turned is None:
            return None
        keys = turned[1] if turned[1].shape == k.shape else turned[1][:, [firsts.index(i) for i in like]]
        queries, keys = (Layout.RIGHT.merge(part) for part in (turned[0], keys))
        return Scoring(queries, keys, Layout.RIGHT, self.config.n_head, (ROTARY,))

    def scaled(self, scoring: Scoring, factor: float) -> Tensor:
        """Return the scores, with the port's own numbers if recorded."""
        scores = scoring.value * factor
        recorded = self.chooser.recorded(scores, GRID)
        return scores if recorded is None else recorded.value

    def factor(self, scoring: Scoring, factor: float) -> float:
        """Return the scores' factor as if the port had the right number of heads."""
        is_usual = scoring.heads != self.config.n_head and math.isclose(factor, scoring.usual_factor, rel_tol=1e-7)
        return right_scale(self.config, self.layer) if is_usual else factor

    def scale_faults(self, scoring: Scoring, factor: float) -> tuple[Fault, ...]:
        return scale_faults(self.config, self.layer, self.factor(scoring, factor), exact=not self.pool.narrow)

    def options(self, scoring: Scoring, factors: list[float]) -> Iterator[Option]:
        """Yield what the weights may be; factors other than the recorded ones cost more."""
        likely, masks = likely_scales(self.config, self.layer), list(self._recorded_masks(scoring))
        for factor in dict.fromkeys([*factors, *likely]):  # scores scaled after the mask are not recorded
            wrong = self.scale_faults(scoring, factor)
            cost = len(wrong) + 0.5 * bool(factors and factor not in factors)
            yield from attention_weights(self.scaled(scoring, factor), factor, cost)
        for factor in (factors or likely)[:3]:
            right = next(attention_weights(scoring.value.mT * factor, factor))
            yield Option.known("exchanged", right.value, EXCHANGED, factor=factor, cost=1.0)
            yield from self._shared(scoring, factor)
            yield from self._changed(scoring, factor) if not self.pool.allowance else ()
            yield from self._as_masked(scoring, factor, masks)

    def _as_masked(self, scoring: Scoring, factor: float, masks: list[tuple[Tensor, Fault]]) -> Iterator[Option]:
        """Yield the weights behind each of ``masks``."""
        cost = 1.0 + len(self.scale_faults(scoring, factor))
        for seen, fault in masks:
            weights = self.scaled(scoring, factor).masked_fill(~seen, -math.inf).softmax(-1)
            yield Option.known("mask as recorded", weights, fault, factor=factor, cost=cost)

    def _recorded_masks(self, scoring: Scoring) -> Iterator[tuple[Tensor, Fault]]:
        """Yield the masks (T, T) that recorded weights show, true where these are not zero, and the fault; no known masks."""
        shape, known = scoring.value.shape, [allowed(label, scoring.value) for label in MASK_FAULTS]
        for entry in self.pool.of_size(shape.numel()):
            if entry.shape[-2:] != shape[-2:] or bool((entry < 0).any()) or not bool(entry.isfinite().all()):
                continue
            seen = (entry > 0).reshape(-1, *shape[-2:]).any(0)
            ahead, itself = seen.triu(1).any(1), seen.diagonal()
            if any(torch.equal(seen, one) for one in known) or not bool(seen.any(1).all()) or bool(itself.all() & ~ahead.any()):
                continue
            known.append(seen)
            yield from ((seen, fault) for fault in mask_faults(seen))

    def _shared(self, scoring: Scoring, factor: float) -> Iterator[Option]:
        """Yield the right weights of one head, or their mean, for all heads."""
        cost = 1.0 + len(self.scale_faults(scoring, factor))
        right = next(attention_weights(self.scaled(scoring, factor), factor)).value
        for head in range(scoring.heads if scoring.heads > 1 else 0):
            words = f"every head mixes its values with the weights of head {head}"
            fault = Fault("head-layout", "attn", words, fix=OWN_WEIGHTS, head=head)
            yield Option.known(f"head {head}", right[:, head, None].expand_as(right), fault, factor=factor, cost=cost)
        if scoring.heads > 1:
            fault = Fault(
                "head-layout", "attn", "every head mixes its values with the mean of all heads' weights", fix=OWN_WEIGHTS
            )
            yield Option.known("mean", right.mean(1, keepdim=True).expand_as(right), fault, factor=factor, cost=cost)

    def _changed(self, scoring: Scoring, factor: float) -> Iterator[Option]:
        """Yield right weights times a number, and the weights of scores to which the same is added in every row of the batch."""
        cost, scores = 1.0 + len(self.scale_faults(scoring, factor)), self.scaled(scoring, factor)
        right = next(attention_weights(scores, factor)).value
        for times in self.pool.factors(right, *GRID):
            if not math.isclose(times, 1.0):
                words = f"the weights are multiplied by {times:.6g} after the softmax"
                fault = Fault("softmax-missing", "attn", words, words, fix=SCALED)
                yield Option.known("multiplied", right * times, fault, factor=factor, cost=cost)
        seen, words = allowed("right", scores), "a number that depends on the two positions is added to each score (as in ALiBi)"
        added = (
            (one, (one - scores).masked_fill(~seen, 0.0))
            for one in self.pool.of_size(scores.numel())
            if one.shape == scores.shape
        )
        for entry, more in added if not self._same_in_rows(scores) else ():
            if bool(more.isfinite().all()) and bool(more.any()) and self._same_in_rows(more):
                weights = entry.masked_fill(~seen, -math.inf).softmax(-1)
                yield Option.known("added", weights, Fault("extra-bias", "attn", words, fix=SCORES), factor=factor, cost=cost)

    def _same_in_rows(self, values: Tensor) -> bool:
        """Return whether each row of the batch has the same."""
        return worst_relative_error(values, values[:1].expand_as(values)) <= self.pool.bound

    def mixtures(self, scoring: Scoring) -> list[tuple[Mixture, tuple[Fault, ...]]]:
        """Return what the weights may mix, the most likely first."""
        kind = scoring.layout, scoring.heads
        if kind not in self._known_mixtures:
            self._known_mixtures = {kind: [(Mixture(values), faults) for values, faults in self._values(scoring)]}
        return self._known_mixtures[kind]

    def _values(self, scoring: Scoring) -> Iterator[Heads]:
        sources = {name: part.value for name, part in self.parts.items()} | {"input": self.input}
        if self.stream is not None:
            sources["stream"] = self.stream
        for way in dict.fromkeys([scoring.layout, *Layout]):
            for source, words in MIXED.items():
                if source in sources:
                    faults = (Fault("value-projection-wrong", "attn", words),) if words else ()
                    yield way.split(sources[source], scoring.heads), faults
        values = scoring.layout.split(sources["v"], scoring.heads)
        for head in range(scoring.heads if 1 < scoring.heads <= self.config.n_head else 0):
            words = f"every head mixes the values of head {head}"
            yield (
                values[:, head, None].expand_as(values),
                (Fault("head-layout", "attn.c_attn", words, fix=OWN_WEIGHTS, share="v", head=head),),
            )

    def _mixed(self, scoring: Scoring, weights: Tensor) -> Recorded | None:
        """Return weights times values, if recorded."""
        some = stacked([weights])
        for mixture, faults in self.mixtures(scoring):
            if mixture.recorded(self.pool, some) and (recorded := self.product(weights, mixture)) is not None:
                return recorded._replace(faults=faults)
        return None

    def product(self, weights: Tensor, mixture: Mixture) -> Recorded | None:
        return self.chooser.recorded(weights @ mixture.values, HEADS)

    def weigh(self, scoring: Scoring, factors: list[float]) -> tuple[Scoring, Choice[Recorded]] | None:
        """Return which weights mix which values, if their product is recorded."""
        options = list(self.options(scoring, factors))
        chosen = self.chooser.choose("weights", options, lambda weights: self._mixed(scoring, weights), GRID, 0)
        chosen = chosen or self._screened(scoring, options)  # one operator computes weights and values: try all products
        return None if chosen is None else (scoring, chosen)

    def _screened(self, scoring: Scoring, options: list[Option]) -> Choice[Recorded] | None:
        """Return the cheapest option whose product with values is recorded, the weights being recorded or not."""
        options = sorted(options, key=lambda option: option.price)
        weights = stacked(option.value for option in options)
        mixtures = self.mixtures(scoring)
        for number, rank in recorded_products(self.pool, weights, [mixture for mixture, _ in mixtures]):
            mixture, faults = mixtures[rank]
            is_right = options[number].price <= 0 and not scoring.faults and not faults
            if not is_right and self._is_each_its_own(options[number].value, mixture):
                continue
            if (mixed := self.product(options[number].value, mixture)) is not None:
                chosen = Choice(options[number], options[number].value, None, mixed._replace(faults=faults))
                return against_right(chosen, options)
        return None

    def _is_each_its_own(self, weights: Tensor, mixture: Mixture) -> bool:
        """Return whether the product is the values themselves, which are recorded whatever the port does with them."""
        bound = max(SATURATED, 2 * self.pool.bound)  # the product and the values may both be a bound from what is recorded
        return worst_relative_error(weights @ mixture.values, mixture.values) <= bound

    def weigh_otherwise(self) -> tuple[Scoring, Choice[Recorded]] | None:
        """Do :meth:`weigh` for other ways to compare tokens, where the scores are not recorded as GPT-2 makes them."""
        others = list(wrong_scorings({name: part.value for name, part in self.parts.items()}, self.config))
        for scoring in others:
            if factors := self._factors(scoring):
                return self.weigh(scoring, factors)
        for scoring in (*self.scorings[1:], *others):
            factors = list(dict.fromkeys([scoring.usual_factor, right_scale(self.config, self.layer), 1.0]))
            every = (attention_weights(scoring.value * factor, factor) for factor in factors)
            options = [option for some in every for option in islice(some, MASKS)]
            if (chosen := self._screened(scoring, options)) is not None:
                return scoring, chosen
        return None
