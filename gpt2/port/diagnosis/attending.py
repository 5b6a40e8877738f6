"""Follow one block's attention as a port computes it: from the projections of its input to the branch's result.

Shapes: y (B, T, D); q, k, v split into heads (B, H, T, K); scores and weights (B, H, T, T).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import point_at
from gpt2.port.diagnosis.hypotheses import MASK_FAULTS, allowed, attention_weights, likely_scales, right_scale, scale_faults
from gpt2.port.diagnosis.norms import RMS, layer_norm
from gpt2.port.diagnosis.projecting import HEADS, Projected, added, affine
from gpt2.port.diagnosis.rotary import turned_pair
from gpt2.port.diagnosis.scores import Layout, Scoring, right_scorings, wrong_scorings
from gpt2.port.diagnosis.screen import Mixture, Projection, recorded_products, stacked
from gpt2.port.diagnosis.search import Choice, Fault, Option, Recorded, against_right
from gpt2.port.diagnosis.trail import Trail
from gpt2.port.diagnosis.wiring import streams

GRID = (1, 0)  # axes of (B, H, T, T) that a port may split
MAX_HIDDEN = 60  # combinations of weights to try, in each way to merge heads, where neither weights nor heads are recorded
SATURATED = 1e-6  # the error of values against their mixture, below which each token sees only itself
SHOWN = 8  # tokens that a message names
MASKS = 10  # of the possible results of mask and softmax, those tried with an unlikely comparison of tokens
# What the weights may mix, the right one first; the words describe the fault.
MIXED = {
    "v": "",
    "k": "the keys are mixed, not the values",
    "q": "the queries are mixed",
    "input": "attention's input itself is mixed: there is no projection to values",
    "stream": "the stream itself is mixed, not the values",
}
MERGED = "heads are put side by side without transposing back, which mixes positions and heads"
OWN_WEIGHTS = "y = weights @ v  # weights (B, n_head, T, T), v (B, n_head, T, head_size): each head its own"
NO_PROJECTION = Fault("output-projection-missing", "attn", "the heads are added to the stream as they are")
EXCHANGED = Fault("qkv-order", "attn", "queries and keys have changed places")
TURNED = "queries and keys are turned by an angle that depends on the position (rotary position embedding)"
ROTARY = Fault("rotary-positions", "attn", TURNED)
Heads = tuple[Tensor, tuple[Fault, ...]]  # (B, H, T, K), and the faults if the port computes this


class Attending:
    """Attention of the ``n``-th block that runs, with the weights of block ``layer``; ``choice`` is its input."""

    def __init__(self, trail: Trail, n: int, layer: int, choice: Choice[Projected]) -> None:
        self.chooser, self.pool, self.trail, self.config = trail.chooser, trail.pool, trail, trail.config
        self.n, self.layer, self.weights = n, layer, trail.weights(layer)
        self.parts, self.input = choice.result, choice.value
        self.stream = None if choice.option.base is None else choice.option.base.value
        self.faults: list[Fault] = []
        self.scorings = list(right_scorings({name: part.value for name, part in self.parts.items()}, self.config))
        self._known_mixtures: dict[tuple[Layout, int], list[tuple[Mixture, tuple[Fault, ...]]]] = {}

    def run(self) -> list[Option]:
        """Return the results that the branch may have (what follows decides among several); none if attention is unknown."""
        for name, part in self.parts.items():
            self._keep(f"attn.{name}", part.value)
        words = {"q": "queries", "k": "keys", "v": "values"}
        if without := ", ".join(words[name] for name, part in self.parts.items() if part.faults):
            self.faults.append(Fault("missing-bias", "attn.c_attn", f"the {without} have no bias"))
        scoring, factors = self._scoring()
        if (unseen := self._right_unseen(scoring, factors)) is not None:
            return unseen
        found = self._weigh(scoring, factors) or (None if factors else self._weigh_otherwise())
        if found is None:
            error = None
            self._keep_right(factors)
            results = self._unrecognised() or self._project(list(self._hidden(scoring, factors)), recorded=False)
        else:
            scoring, chosen = found
            mixed, factor = chosen.result, chosen.option.factor or 0.0
            error = mixed.error if chosen.error is None else chosen.error
            self.trail.factors[self.n] = self._factor(scoring, factor), chosen.error
            if chosen.missed is not None:
                self.trail.missed[point_at(self.n, "attn")] = chosen.missed
            self.faults += [*scoring.faults, *chosen.option.faults, *mixed.faults]
            self._keep("attn.scores", self._scaled(scoring, factor).tril())
            self._keep("attn.weights", chosen.value)
            self._keep("attn.heads", Layout.RIGHT.merge(mixed.value))
            results = self._project([(mixed.value, ())], recorded=True)
        self.trail.blame(self.n, self.faults, error)
        return results

    def _keep(self, part: str, value: Tensor) -> None:
        self.trail.values[point_at(self.n, part)] = value

    # From queries and keys to weights

    def _scoring(self) -> tuple[Scoring, list[float]]:
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
        if (turned := turned_pair(self.pool, q, k)) is None:
            return None
        queries, keys = (Layout.RIGHT.merge(part) for part in turned)
        return Scoring(queries, keys, Layout.RIGHT, self.config.n_head, (ROTARY,))

    def _scaled(self, scoring: Scoring, factor: float) -> Tensor:
        """Return the scores, with the port's own numbers if recorded."""
        scores = scoring.value * factor
        recorded = self.chooser.recorded(scores, GRID)
        return scores if recorded is None else recorded.value

    def _factor(self, scoring: Scoring, factor: float) -> float:
        """Return the scores' factor as if the port had the right number of heads."""
        is_usual = scoring.heads != self.config.n_head and math.isclose(factor, scoring.usual_factor, rel_tol=1e-7)
        return right_scale(self.config, self.layer) if is_usual else factor

    def _scale_faults(self, scoring: Scoring, factor: float) -> tuple[Fault, ...]:
        return scale_faults(self.config, self.layer, self._factor(scoring, factor), exact=not self.pool.narrow)

    def _options(self, scoring: Scoring, factors: list[float]) -> Iterator[Option]:
        """Yield what the weights may be; factors other than the recorded ones cost more."""
        likely, masks = likely_scales(self.config, self.layer), list(self._recorded_masks(scoring))
        for factor in dict.fromkeys([*factors, *likely]):  # scores scaled after the mask are not recorded
            wrong = self._scale_faults(scoring, factor)
            cost = len(wrong) + 0.5 * bool(factors and factor not in factors)
            yield from attention_weights(self._scaled(scoring, factor), factor, cost)
        for factor in (factors or likely)[:3]:
            right = next(attention_weights(scoring.value.mT * factor, factor))
            yield Option.known("exchanged", right.value, EXCHANGED, factor=factor, cost=1.0)
            yield from self._shared(scoring, factor)
            yield from self._as_masked(scoring, factor, masks)

    def _as_masked(self, scoring: Scoring, factor: float, masks: list[tuple[Tensor, Fault]]) -> Iterator[Option]:
        """Yield the weights behind each of ``masks``."""
        cost = 1.0 + len(self._scale_faults(scoring, factor))
        for seen, fault in masks:
            weights = self._scaled(scoring, factor).masked_fill(~seen, -math.inf).softmax(-1)
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
            token = int((ahead if bool(ahead.any()) else ~itself).nonzero()[0])
            others = seen[token].nonzero().flatten().tolist()
            shown = f"{', '.join(map(str, others[:SHOWN]))}{', ...' * (len(others) > SHOWN)}"
            words = f"a mask of its own: token {token} sees only tokens {shown}"
            yield seen, Fault("mask-missing" if bool(ahead.any()) else "mask-strict", "attn", words)

    def _shared(self, scoring: Scoring, factor: float) -> Iterator[Option]:
        """Yield the right weights of one head, or their mean, for all heads."""
        cost = 1.0 + len(self._scale_faults(scoring, factor))
        right = next(attention_weights(self._scaled(scoring, factor), factor)).value
        for head in range(scoring.heads if scoring.heads > 1 else 0):
            words = f"every head mixes its values with the weights of head {head}"
            fault = Fault("head-layout", "attn", words, fix=OWN_WEIGHTS)
            yield Option.known(f"head {head}", right[:, head, None].expand_as(right), fault, factor=factor, cost=cost)
        if scoring.heads > 1:
            fault = Fault(
                "head-layout", "attn", "every head mixes its values with the mean of all heads' weights", fix=OWN_WEIGHTS
            )
            yield Option.known("mean", right.mean(1, keepdim=True).expand_as(right), fault, factor=factor, cost=cost)

    # From weights and values to heads

    def _mixtures(self, scoring: Scoring) -> list[tuple[Mixture, tuple[Fault, ...]]]:
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
                (Fault("head-layout", "attn.c_attn", words, fix=OWN_WEIGHTS, share="v"),),
            )

    def _mixed(self, scoring: Scoring, weights: Tensor) -> Recorded | None:
        """Return weights times values, if recorded."""
        some = stacked([weights])
        for mixture, faults in self._mixtures(scoring):
            if mixture.recorded(self.pool, some) and (recorded := self._product(weights, mixture)) is not None:
                return recorded._replace(faults=faults)
        return None

    def _product(self, weights: Tensor, mixture: Mixture) -> Recorded | None:
        return self.chooser.recorded(weights @ mixture.values, HEADS)

    def _weigh(self, scoring: Scoring, factors: list[float]) -> tuple[Scoring, Choice[Recorded]] | None:
        """Return which weights mix which values, if their product is recorded."""
        options = list(self._options(scoring, factors))
        chosen = self.chooser.choose("weights", options, lambda weights: self._mixed(scoring, weights), GRID, 0)
        chosen = chosen or self._screened(scoring, options)  # one operator computes weights and values: try all products
        return None if chosen is None else (scoring, chosen)

    def _screened(self, scoring: Scoring, options: list[Option]) -> Choice[Recorded] | None:
        """Return the cheapest option whose product with values is recorded, the weights being recorded or not."""
        options = sorted(options, key=lambda option: option.price)
        weights = stacked(option.value for option in options)
        mixtures = self._mixtures(scoring)
        for number, rank in recorded_products(self.pool, weights, [mixture for mixture, _ in mixtures]):
            mixture, faults = mixtures[rank]
            is_right = options[number].price <= 0 and not scoring.faults and not faults
            if not is_right and self._is_each_its_own(options[number].value, mixture):
                continue
            if (mixed := self._product(options[number].value, mixture)) is not None:
                chosen = Choice(options[number], options[number].value, None, mixed._replace(faults=faults))
                return against_right(chosen, options)
        return None

    def _is_each_its_own(self, weights: Tensor, mixture: Mixture) -> bool:
        """Return whether the product is the values themselves, which are recorded whatever the port does with them."""
        bound = max(SATURATED, 2 * self.pool.bound)  # the product and the values may both be a bound from what is recorded
        return worst_relative_error(weights @ mixture.values, mixture.values) <= bound

    def _weigh_otherwise(self) -> tuple[Scoring, Choice[Recorded]] | None:
        """Do :meth:`_weigh` for other ways to compare tokens, where the scores are not recorded as GPT-2 makes them."""
        others = list(wrong_scorings({name: part.value for name, part in self.parts.items()}, self.config))
        for scoring in others:
            if factors := self._factors(scoring):
                return self._weigh(scoring, factors)
        for scoring in (*self.scorings[1:], *others):
            factors = list(dict.fromkeys([scoring.usual_factor, right_scale(self.config, self.layer), 1.0]))
            every = (attention_weights(scoring.value * factor, factor) for factor in factors)
            options = [option for some in every for option in islice(some, MASKS)]
            if (chosen := self._screened(scoring, options)) is not None:
                return scoring, chosen
        return None

    # From heads to the branch's result

    def _keep_right(self, factors: list[float]) -> None:
        """Keep scores and weights that are GPT-2's, to say how far an attention that is not recognised is right."""
        factor = right_scale(self.config, self.layer)
        if any(math.isclose(factor, one, rel_tol=1e-7) for one in factors):
            scores = self._scaled(self.scorings[0], factor)
            self._keep("attn.scores", scores.tril())
        mixture, _ = self._mixtures(self.scorings[0])[0]
        shape = mixture.values.shape[:3]
        for entry in self.pool.of_size(shape.numel() * shape[2]):  # whatever the port weighs the values with
            weights = entry.view(*shape, shape[2])
            if mixture.recorded(self.pool, stacked([weights])) and self._product(weights, mixture) is not None:
                self._keep("attn.weights", weights)
                return

    def _right_unseen(self, scoring: Scoring, factors: list[float]) -> list[Option] | None:
        """Return the results of GPT-2's own attention, if its heads are not recorded, but their projection is."""
        factor = right_scale(self.config, self.layer)
        known = not factors or any(math.isclose(factor, one, rel_tol=1e-7) for one in factors)
        if scoring is not self.scorings[0] or scoring.faults or not known:
            return None
        scores = self._scaled(scoring, factor)
        weights = next(attention_weights(scores, factor)).value
        heads = weights @ Layout.RIGHT.split(self.parts["v"].value, self.config.n_head)
        if self.chooser.recorded(heads, HEADS) is not None:
            return None
        results = self._projected(Layout.RIGHT.merge(heads))
        if results is not None:
            self._keep("attn.scores", scores.tril())
            self._keep("attn.weights", weights)
            self.trail.factors[self.n] = factor, None
            self.trail.blame(self.n, self.faults, None)
        return results

    def _hidden(self, scoring: Scoring, factors: list[float]) -> Iterator[Heads]:
        """Yield what the heads may be if neither weights nor heads are recorded, the screened ones first."""
        options = sorted(self._options(scoring, factors), key=lambda option: option.price)
        weight, bias = self.weights["attn.c_proj.weight"], self.weights["attn.c_proj.bias"]
        weights, mixtures = stacked(option.value for option in options), self._mixtures(scoring)
        screened = []
        for rank, (mixture, _) in enumerate(mixtures):
            projection = Projection(mixture.values, weight)
            for shift in (bias, torch.zeros_like(bias)):
                screened += [(number, rank) for number in projection.recorded(self.pool, weights, shift)]
        few = (
            (number, rank) for number in range(min(len(options), MAX_HIDDEN)) for rank in range(min(len(mixtures), len(MIXED)))
        )
        for number, rank in dict.fromkeys([*sorted(screened), *few]):
            option, (mixture, faults) = options[number], mixtures[rank]
            factor = option.factor
            scale = () if factor is None else self._scale_faults(scoring, factor)
            yield option.value @ mixture.values, (*scoring.faults, *scale, *option.faults, *faults)

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
                if recorded:
                    whole = merged @ self.weights["attn.c_proj.weight"] + self.weights["attn.c_proj.bias"]
                    unseen.append(Option.known("unseen projection", whole, *wrong, cost=0.5))
            for words, normed in self._normed(right) if recorded else ():
                if (results := self._projected(normed, *faults, Fault("extra-norm", "attn", words))) is not None:
                    return results
        return self._unrecognised() or unseen if recorded else []

    def _unrecognised(self) -> list[Option]:
        """Return the results of the projection of any recorded tensor: the heads are then recorded, and unknown."""
        for entry in streams(self.pool, self.input[..., 0], self.config.n_embd):
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
