"""Follow one block's attention as a port computes it: from the projections of its input to the branch's result.

Shapes: y (B, T, D); q, k, v split into heads (B, H, T, K); scores and weights (B, H, T, T).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gpt2.measure.tracing import point_at
from gpt2.port.diagnosis.hypotheses import attention_weights
from gpt2.port.diagnosis.norms import RMS, layer_norm
from gpt2.port.diagnosis.projecting import HEADS, Projected, added, affine
from gpt2.port.diagnosis.scores import Layout, Scoring
from gpt2.port.diagnosis.screen import Projection, stacked
from gpt2.port.diagnosis.search import Choice, Fault, Option
from gpt2.port.diagnosis.trail import Trail
from gpt2.port.diagnosis.weighing import MIXED, Heads, Weighing
from gpt2.port.diagnosis.wiring import streams
from gpt2.port.graph import right_scale

MAX_HIDDEN = 60  # combinations of weights to try, in each way to merge heads, where neither weights nor heads are recorded
MERGED = "heads are put side by side without transposing back, which mixes positions and heads"
NO_PROJECTION = Fault("output-projection-missing", "attn", "the heads are added to the stream as they are")


class Attending:
    """Attention of the ``n``-th block that runs, with the weights of block ``layer``; ``choice`` is its input."""

    def __init__(self, trail: Trail, n: int, layer: int, choice: Choice[Projected]) -> None:
        self.chooser, self.pool, self.trail, self.config = trail.chooser, trail.pool, trail, trail.config
        self.n, self.layer, self.weights = n, layer, trail.weights(layer)
        self.parts, self.input, self.weighing = choice.result, choice.value, Weighing(trail, layer, choice)
        self.faults: list[Fault] = []

    def run(self) -> list[Option]:
        """Return the results that the branch may have (what follows decides among several); none if attention is unknown."""
        for name, part in self.parts.items():
            self._keep(f"attn.{name}", part.value)
        words = {"q": "queries", "k": "keys", "v": "values"}
        if without := ", ".join(words[name] for name, part in self.parts.items() if part.faults):
            self.faults.append(Fault("missing-bias", "attn.c_attn", f"the {without} have no bias"))
        scoring, factors = self.weighing.scoring()
        if (unseen := self._right_unseen(scoring, factors)) is not None:
            return unseen
        found = self.weighing.weigh(scoring, factors) or (None if factors else self.weighing.weigh_otherwise())
        if found is None:
            error = None
            self._keep_right(factors)
            results = self._unrecognised() or self._project(list(self._hidden(scoring, factors)), recorded=False)
        else:
            scoring, chosen = found
            mixed, factor = chosen.result, chosen.option.factor or 0.0
            error = mixed.error if chosen.error is None else chosen.error
            self.trail.factors[self.n] = self.weighing.factor(scoring, factor), chosen.error
            if chosen.missed is not None:
                self.trail.missed[point_at(self.n, "attn")] = chosen.missed
            self.faults += self._as_one([*scoring.faults, *chosen.option.faults, *mixed.faults])
            self._keep("attn.scores", self.weighing.scaled(scoring, factor).tril())
            self._keep("attn.weights", chosen.value)
            self._keep("attn.heads", Layout.RIGHT.merge(mixed.value))
            results = self._project([(mixed.value, ())], recorded=True)
        self.trail.blame(self.n, self.faults, error)
        return results

    def _as_one(self, faults: list[Fault]) -> list[Fault]:
        """Return faults; weights and values of one head alone, whose projections are not recorded, are all of that head."""
        shared = [one for one in faults if one.head is not None]
        recorded = any(part.error is not None for part in self.parts.values())
        if recorded or len(shared) < 2 or len({one.head for one in shared}) > 1:
            return faults
        words = f"c_attn has the columns of head {shared[0].head} in place of every head's"
        return [*(one for one in faults if one not in shared), Fault("qkv-order", "attn.c_attn", words)]

    def _keep(self, part: str, value: Tensor) -> None:
        self.trail.values[point_at(self.n, part)] = value

    def _keep_right(self, factors: list[float]) -> None:
        """Keep scores and weights that are GPT-2's, to say how far an attention that is not recognised is right."""
        factor = right_scale(self.config, self.layer)
        if any(math.isclose(factor, one, rel_tol=1e-7) for one in factors):
            scores = self.weighing.scaled(self.weighing.scorings[0], factor)
            self._keep("attn.scores", scores.tril())
        mixture, _ = self.weighing.mixtures(self.weighing.scorings[0])[0]
        shape = mixture.values.shape[:3]
        for entry in self.pool.of_size(shape.numel() * shape[2]):  # whatever the port weighs the values with
            weights = entry.view(*shape, shape[2])
            if mixture.recorded(self.pool, stacked([weights])) and self.weighing.product(weights, mixture) is not None:
                self._keep("attn.weights", weights)
                return

    def _right_unseen(self, scoring: Scoring, factors: list[float]) -> list[Option] | None:
        """Return the results of GPT-2's own attention, if its heads are not recorded, but their projection is."""
        factor = right_scale(self.config, self.layer)
        known = not factors or any(math.isclose(factor, one, rel_tol=1e-7) for one in factors)
        if scoring is not self.weighing.scorings[0] or scoring.faults or not known:
            return None
        scores = self.weighing.scaled(scoring, factor)
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
        options = sorted(self.weighing.options(scoring, factors), key=lambda option: option.price)
        weight, bias = self.weights["attn.c_proj.weight"], self.weights["attn.c_proj.bias"]
        weights, mixtures = stacked(option.value for option in options), self.weighing.mixtures(scoring)
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
            scale = () if factor is None else self.weighing.scale_faults(scoring, factor)
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
                    unused = Option.known("heads, projection unused", merged, NO_PROJECTION, silent=True)
                    return [*results, unused] if layout is Layout.RIGHT and not wrong else results
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
