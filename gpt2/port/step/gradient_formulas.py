"""Gradients of a dump that no multiple of the mean loss's gives: clipped ones, and those of another formula of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from gpt2.port.diagnosis.report import Cause
from gpt2.port.golden_section import least
from gpt2.port.step.causes import cause
from gpt2.port.step.gradient_comparison import Comparison, combined, multiples
from gpt2.port.step.gradient_parts import CLOSE, SEEN
from gpt2.port.step.gradients import Gradients
from gpt2.port.step.layouts import Weights
from gpt2.port.step.predictions import Batch, Predictor
from gpt2.port.step.trained import Stage

LAST_BIAS = "ln_f.bias"
ALIKE = 1e-3  # how far the cosine of two gradients of the last bias may be from 1, if a factor of the logits makes them one
MAX_ROWS = 32  # of a batch, whose weights are fitted
MAX_NUMBERS = 6e8  # in the gradients of all these rows: 5 GB


@dataclass
class GradientReading:
    """What the gradients of a dump are: their labels, and their factor; ``clipped`` if they are dumped after clipping."""

    stage: Stage = field(default_factory=Stage)
    label: str = ""
    factor: float = 1.0
    clipped: float | None = None  # the norm
    explained: bool = True
    predicted: list[Gradients] = field(default_factory=list)  # by step, with these labels
    clip_causes: list[Cause] = field(default_factory=list)


def read_cut(got: Weights, reading: GradientReading, comparison: Comparison) -> bool:
    """Note gradients that are clipped by tensor, or by value, if that explains all; return whether it does."""
    right = reading.predicted[0].whole
    factors = multiples(got, right)
    if len(factors) > 2 and all(f > 0 and comparison.same(n, got[n], right[n], f) for n, f in factors.items()):
        top = max(factors.values())
        cut = [float(got[n].norm()) for n, f in factors.items() if f < top * (1 - CLOSE)]
        if len(cut) > 1 and max(cut) - min(cut) <= CLOSE * max(cut):
            detail = f"each parameter's gradient is clipped to {median(cut):.4g}"
            reading.clip_causes.append(cause("clip-per-tensor", "gradient", detail, SEEN))
            reading.factor = top
            return True
    limit = max(float(g.abs().max()) for g in got.values())
    inside = {n: g.abs() < 0.99 * limit for n, g in got.items()}
    kept, values = (torch.cat([one[n][inside[n]] for n in got]) for one in (right, got))
    factor = float(kept @ values / (kept @ kept)) if len(kept) else 1.0
    at_limit = sum(int((g.abs() > limit * (1 - 1e-4)).sum()) for g in got.values())
    if at_limit > 2 and all(comparison.same(n, g, (factor * right[n]).clamp(-limit, limit)) for n, g in got.items()):
        reading.clip_causes.append(cause("clip-by-value", "gradient", f"entries beyond {limit:.6g} are cut", SEEN))
        reading.factor = factor
        return True
    return False


@dataclass(frozen=True)
class Formulas:
    """Other formulas of the loss: smoothed labels, scaled logits, and weights of rows; ``exact``: the right gradients."""

    predictor: Predictor
    state: Mapping[str, Tensor]
    batch: Batch
    exact: Gradients
    comparison: Comparison
    parts: int | None  # of a batch, by the settings

    def read(self, got: Weights, reading: GradientReading) -> bool:
        """Note the formula that gives most of the gradients; return whether there is one."""
        formulas = self._smoothing, self._temperature, self._rows
        return any(self.predictor.can_try and formula(got, reading) for formula in formulas)

    def _gradients(self, *, smoothing: float = 0.0, factor: float = 1.0) -> Gradients:
        return self.predictor.gradients(self.state, self.batch.ids, self.batch.targets, smoothing=smoothing, factor=factor)

    def _note(self, reading: GradientReading, made: Gradients, id: str, detail: str) -> bool:
        reading.stage.causes.append(cause(id, "loss", detail, SEEN))
        reading.label, reading.predicted = "", [made]
        return True

    def _smoothing(self, got: Weights, reading: GradientReading) -> bool:
        plain, smoothed = self.exact.whole, self._gradients(smoothing=1.0).whole
        a, b = combined(got, [plain, smoothed])
        if not b > 1e-3 * a > 0 or not self.comparison.mostly_same(got, {n: a * plain[n] + b * smoothed[n] for n in got}):
            return False
        share = b / (a + b)
        return self._note(reading, self._gradients(smoothing=share), "label-smoothing", f"a label smoothing of {share:.4g}")

    def _temperature(self, got: Weights, reading: GradientReading) -> bool:
        if LAST_BIAS not in got:
            return False
        slope = self.predictor.slope_of_last_bias(self.state, self.batch)

        def unlike(log: float) -> float:
            return -float(torch.cosine_similarity(got[LAST_BIAS].flatten(), slope(math.exp(log)), dim=0))

        apart, log = least(unlike, math.log(0.05), math.log(20.0), steps=40)
        value = math.exp(log)
        if abs(value - 1) < 1e-4 or apart > ALIKE - 1:
            return False
        for guess in dict.fromkeys((float(f"{value:.4g}"), 1 / float(f"{1 / value:.3g}"), value)):
            if not self.predictor.can_try:
                return False
            made = self._gradients(factor=guess)
            if len(self.comparison.matched(got, made.whole)[1]) <= len(got) / 2:
                detail = f"the logits are multiplied by {guess:.6g} before the softmax"
                return self._note(reading, made, "logits-scaled", detail)
        return False

    def _rows(self, got: Weights, reading: GradientReading) -> bool:
        """Explain the gradient as a weighted sum of those of the rows: a part of the batch lost, or weighed otherwise."""
        ids, rows = self.batch.ids, len(self.batch.ids)
        if not 2 <= rows <= MAX_ROWS or rows * self.predictor.config.num_parameters() > MAX_NUMBERS:
            return False
        alone = torch.eye(rows, dtype=torch.float64)[:, :, None].expand(rows, *ids.shape)
        basis = [self.predictor.gradients(self.state, ids, self.batch.targets, weights).whole for weights in alone]
        shares = combined(got, basis)
        mixed = {n: sum((w * one[n] for w, one in zip(shares, basis, strict=True)), torch.zeros_like(g)) for n, g in got.items()}
        if not self.comparison.mostly_same(got, mixed):
            return False
        top, stage = max(map(abs, shares)), reading.stage
        kept = [row for row, w in enumerate(shares) if abs(w) > 1e-3 * top]
        levels = [shares[row] for row in kept]
        if len(kept) < rows and max(levels) - min(levels) <= CLOSE * top:
            if kept == list(range(rows - len(kept), rows)):
                detail = f"only the last {len(kept)} of {rows} rows are in the gradient"
                stage.causes.append(cause("accumulation-last-only", "gradient", detail, SEEN))
            else:
                detail = f"only rows {', '.join(map(str, kept))} of {rows} are in the gradient"
                stage.causes.append(cause("tokens-left-out", "loss", detail, SEEN))
        elif self.parts and self.parts > 1 and rows % self.parts == 0:
            detail = f"rows weigh between {min(shares):.4g} and {max(shares):.4g}"
            reading.clip_causes.append(cause("clip-before-accumulation", "clip", detail, SEEN))
        else:
            count = self.batch.count
            detail = f"rows weigh between {min(shares) * count:.4g} and {max(shares) * count:.4g}"
            stage.causes.append(cause("loss-average-wrong", "loss", detail, SEEN))
        reading.predicted = []
        return True
