"""Causes in a dump's gradients: compare them with those that right and wrong losses have at the program's own parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from gpt2.port.dump.tolerance import UNITS
from gpt2.port.golden_section import least
from gpt2.port.step.causes import Places, Stage, cause
from gpt2.port.step.clipping import LIMITS
from gpt2.port.step.expected import TABLE, Gradients, Predictor, Weights
from gpt2.port.step.gradients import Comparison, Parts, part_causes, ratio, total_norm
from gpt2.port.step.labels import average_of, cause_of
from gpt2.port.step.recognition import Recorded
from gpt2.port.step.settings import Settings

SEEN = "the dump's gradients are these, at the parameters that it has before the step"
CLOSE = 2e-3  # relative difference of factors that are meant to be equal
LAST_BIAS = "ln_f.bias"
ALIKE = 1e-3  # how far the cosine of two gradients of the last bias may be from 1, if a factor of the logits makes them one
MAX_ROWS = 32  # of a batch, whose weights are fitted
MAX_NUMBERS = 6e8  # in the gradients of all these rows: 5 GB


@dataclass
class GradientReading:
    """What the gradients of a dump are: their labels, and their factor; ``clipped`` if they are dumped after clipping."""

    stage: Stage = field(default_factory=Stage)
    clip: Stage = field(default_factory=Stage)
    label: str = ""
    factor: float = 1.0
    clipped: float | None = None  # the norm
    explained: bool = True
    predicted: list[Gradients] = field(default_factory=list)  # by step, with these labels

    def note(self, id: str, where: str, detail: str) -> None:
        """Add a cause, of clipping or of anything before it."""
        stage = self.clip if id.startswith("clip") else self.stage
        if all((one.id, one.where) != (id, where) for one in stage.causes):
            stage.causes.append(cause(id, where, detail, SEEN))


def combined(got: Mapping[str, Tensor], basis: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """Return the coefficients of ``basis`` that give most of ``got``, fitted on all parameters but the token embedding."""
    names = [n for n in got if n != TABLE] or list(got)
    gram = torch.tensor([[sum(float((a[n] * b[n]).sum()) for n in names) for b in basis] for a in basis], dtype=torch.float64)
    shares = torch.zeros(len(basis), dtype=torch.float64)
    for _ in range(2):  # the second time removes what the normal equations have rounded
        left = mixed({n: got[n] for n in names}, [*basis, got], [*(-shares).tolist(), 1.0])
        right = torch.tensor([sum(float((a[n] * left[n]).sum()) for n in names) for a in basis], dtype=torch.float64)
        shares = shares + torch.linalg.lstsq(gram, right[:, None]).solution[:, 0]
    found: list[float] = shares.tolist()
    return found


def mixed(names: Mapping[str, Tensor], basis: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> Weights:
    """Return the sum of gradients, each times its share, of the parameters ``names``."""
    return {n: sum((s * one[n] for s, one in zip(shares, basis, strict=True)), torch.zeros_like(basis[0][n])) for n in names}


class GradientExamination:
    """The comparison of one dump's gradients; ``exact``: the right ones of the first step, ``allowed`` their rounding."""

    def __init__(
        self,
        recorded: Recorded,
        predictor: Predictor,
        settings: Settings,
        places: Places,
        exact: Gradients,
        allowed: Mapping[str, float],
    ) -> None:
        self.recorded, self.predictor, self.settings, self.places = recorded, predictor, settings, places
        self.state, self.batch, self.exact = recorded.parameters[0], predictor.batch(0), exact
        self.got, self.reading = recorded.raw[0], GradientReading()
        units = [UNITS[dtype] for dtype in recorded.gradient_dtypes] or [(0.0, 0.0)]
        self.unit = max(unit for unit, _ in units)
        self.comparison = Comparison(allowed, self.unit, max(smallest for _, smallest in units), CLOSE, SEEN)

    def read(self) -> GradientReading:
        """Read the first step's gradients, then those of later steps."""
        wrong = self._labelled()
        reading, got = self.reading, self.got
        few = len(wrong) <= len(got) / 2
        if (wrong and self._is_cut()) or (not few and self._is_of_rows_or_formula()):
            self._later()
            return reading
        if reading.label:
            id, words = cause_of(reading.label)
            reading.note(id, "loss", words)
        if len(wrong) == len(got):
            right = reading.predicted[0].whole
            reading.explained = False
            reading.stage.error = max(float((g - right[n]).norm() / right[n].norm().clamp(min=1e-300)) for n, g in got.items())
            deadline = self.predictor.deadline
            late = f"the search ended at its limit of {deadline.words}: " if deadline.passed else ""
            words = "the gradients are those of no known mistake in the loss; dump the gradient of the logits as well"
            reading.stage.leave_open(late + words)
        else:
            self._finish(wrong)
        self._later()
        return reading

    # Which loss

    def _gradients(self, labels: Tensor | None = None, *, smoothing: float = 0.0, factor: float = 1.0) -> Gradients:
        labels = self.batch.targets if labels is None else labels
        return self.predictor.gradients(self.state, self.batch.ids, labels, smoothing=smoothing, factor=factor)

    def _labelled(self) -> list[str]:
        """Take the labels whose gradients are most like the dump's; return the parameters of which they are not."""
        best: list[str] | None = None
        for label, labels in self.predictor.labelings(0).items():
            made = self._gradients(labels) if label else self.exact
            factor, wrong = self._matched(made)
            if best is None or len(wrong) < len(best):
                best = wrong
                self.reading.label, self.reading.factor, self.reading.predicted = label, factor, [made]
            if not wrong or not self.predictor.can_try:
                break
        assert best is not None
        return best

    def _matched(self, made: Gradients) -> tuple[float, list[str]]:
        """Return the factor that explains most gradients, and the names of those that it does not."""
        right, factors = made.whole, list(self._factors(made).values())
        best: tuple[float, list[str]] = (1.0, list(self.got))
        for factor in [1.0, *sorted(factors, key=lambda f: abs(f - median(factors)))[:8]] if factors else []:
            wrong = [name for name, g in self.got.items() if not self.comparison.same(name, g, right[name], factor)]
            if len(wrong) < len(best[1]):
                best = factor, wrong
        return best

    def _factors(self, made: Gradients) -> dict[str, float]:
        """Return by parameter what brings the right gradient nearest; without those whose right gradient is zero or unknown."""
        known = ((n, g, made.whole[n]) for n, g in self.got.items() if n in made.whole)
        return {n: ratio(g, right) for n, g, right in known if float(right.norm()) > 0}

    def _mostly_same(self, got: Weights, expected: Mapping[str, Tensor]) -> bool:
        """Whether more than half of the gradients are the expected ones."""
        return sum(self.comparison.same(n, g, expected[n]) for n, g in got.items()) > len(got) / 2

    def _is_cut(self) -> bool:
        """Note gradients that are clipped by tensor, or by value, if that explains all; return whether it does."""
        got, made, reading, comparison = self.got, self.reading.predicted[0], self.reading, self.comparison
        right, factors = made.whole, self._factors(made)
        if len(factors) > 2 and all(f > 0 and comparison.same(n, got[n], right[n], f) for n, f in factors.items()):
            top = max(factors.values())
            cut = [float(got[n].norm()) for n, f in factors.items() if f < top * (1 - CLOSE)]
            if len(cut) > 1 and max(cut) - min(cut) <= CLOSE * max(cut):
                reading.note("clip-per-tensor", "gradient", f"each parameter's gradient is clipped to {median(cut):.4g}")
                reading.factor = top
                return True
        limit = max(float(g.abs().max()) for g in got.values())
        inside = {n: g.abs() < 0.99 * limit for n, g in got.items()}
        kept, values = (torch.cat([one[n][inside[n]] for n in got]) for one in (right, got))
        factor = ratio(values, kept) if len(kept) else 1.0
        at_limit = sum(int((g.abs() > limit * (1 - 1e-4)).sum()) for g in got.values())
        if at_limit > 2 and all(comparison.same(n, g, (factor * right[n]).clamp(-limit, limit)) for n, g in got.items()):
            reading.note("clip-by-value", "gradient", f"entries beyond {limit:.6g} are cut")
            reading.factor = factor
            return True
        return False

    def _is_of_rows_or_formula(self) -> bool:
        """Note another formula of the loss, or weights of rows, that give most of the gradients; return whether one does."""
        for find in (self._smoothing, self._temperature):
            found = find() if self.predictor.can_try else None
            if found is not None:
                id, detail, made = found
                self.reading.note(id, "loss", detail)
                self.reading.label, self.reading.predicted = "", [made]
                self.reading.factor, wrong = self._matched(made)
                self._finish(wrong)
                return True
        return self.predictor.can_try and self._are_weighed()

    def _smoothing(self) -> tuple[str, str, Gradients] | None:
        basis = [self.exact.whole, self._gradients(smoothing=1.0).whole]
        a, b = combined(self.got, basis)
        if not b > 1e-3 * a > 0 or not self._mostly_same(self.got, mixed(self.got, basis, (a, b))):
            return None
        share = b / (a + b)
        return "label-smoothing", f"a label smoothing of {share:.4g}", self._gradients(smoothing=share)

    def _temperature(self) -> tuple[str, str, Gradients] | None:
        if LAST_BIAS not in self.got:
            return None
        slope, last = self.predictor.slope_of_last_bias(self.state, self.batch), self.got[LAST_BIAS].flatten()
        apart, log = least(
            lambda log: -float(torch.cosine_similarity(last, slope(math.exp(log)), dim=0)),
            math.log(0.05),
            math.log(20.0),
            steps=40,
        )
        value = math.exp(log)
        if abs(value - 1) < 1e-4 or apart > ALIKE - 1:
            return None
        for guess in dict.fromkeys((float(f"{value:.4g}"), 1 / float(f"{1 / value:.3g}"), value)):
            if not self.predictor.can_try:
                return None
            made = self._gradients(factor=guess)
            if len(self._matched(made)[1]) <= len(self.got) / 2:
                return "logits-scaled", f"the logits are multiplied by {guess:.6g} before the softmax", made
        return None

    def _are_weighed(self) -> bool:
        """Explain the gradient as a weighted sum of those of the rows: a part of the batch lost, or weighed otherwise."""
        ids, rows = self.batch.ids, len(self.batch.ids)
        if not 2 <= rows <= MAX_ROWS or rows * self.predictor.config.num_parameters() > MAX_NUMBERS:
            return False
        alone = torch.eye(rows, dtype=torch.float64)[:, :, None].expand(rows, *ids.shape)
        basis = [self.predictor.gradients(self.state, ids, self.batch.targets, weights).whole for weights in alone]
        shares = combined(self.got, basis)
        if not self._mostly_same(self.got, mixed(self.got, basis, shares)):
            return False
        top, parts, count = max(map(abs, shares)), self.settings.grad_accum, self.batch.count
        kept = [row for row, share in enumerate(shares) if abs(share) > 1e-3 * top]
        levels = [shares[row] for row in kept]
        if len(kept) < rows and max(levels) - min(levels) <= CLOSE * top:
            if kept == list(range(rows - len(kept), rows)):
                id, where = "accumulation-last-only", "gradient"
                detail = f"only the last {len(kept)} of {rows} rows are in the gradient"
            else:
                id, where = "tokens-left-out", "loss"
                detail = f"only rows {', '.join(map(str, kept))} of {rows} are in the gradient"
        elif parts and parts > 1 and rows % parts == 0:
            id, where = "clip-before-accumulation", "clip"
            detail = f"rows weigh between {min(shares):.4g} and {max(shares):.4g}"
        else:
            id, where = "loss-average-wrong", "loss"
            detail = f"rows weigh between {min(shares) * count:.4g} and {max(shares) * count:.4g}"
        self.reading.note(id, where, detail)
        self.reading.predicted = []
        return True

    # Each parameter, their factor, and later steps

    def _finish(self, wrong: list[str]) -> None:
        """Explain the gradients ``wrong`` that are not like most, and the factor of these."""
        reading = self.reading
        if wrong:
            still = "no gradient reaches these parameters, and they never change"
            positions = [name for name in self.got if name.startswith("wpe")]
            parts = Parts(self.comparison, self.places, self.recorded.unchanged, still, positions, derivatives=True)
            reading.stage.causes += part_causes(self.got, wrong, reading.factor, reading.predicted[0], parts)
        factor, close = reading.factor, max(1e-4, 4 * self.unit)
        of_parts = factor * (self.settings.grad_accum or 1)
        if abs(factor - 1) <= max(1e-5, 4 * self.unit) or (
            reading.label.startswith("accumulation-last-only") and abs(of_parts - 1) < close
        ):
            return
        norm = total_norm(self.got)
        limits = (self.settings.clip,) if self.settings.clip else LIMITS
        limit = next((one for one in limits if one and abs(norm / one - 1) < close), None)
        if limit is not None and factor < 1:
            reading.clipped = limit
            if not any(self.recorded.used):
                words = f"the gradients are those after clipping to a norm of {limit:g}; a factor of the loss is not seen"
                reading.stage.notes.append(words)
            return
        known = average_of(factor, self.predictor.averages(self.batch.targets), close)
        if known is None:
            reading.note("gradient-scaled", "gradient", f"the gradient is {factor:.6g} times that of the mean loss")
            return
        for id in known[1]:
            reading.note(id, "loss", f"the gradient is that of {known[2]}: {factor:.6g} times the mean's")

    def _later(self) -> None:
        """Compare the gradients of later steps, from the program's own parameters: what is left of the step before."""
        recorded, reading, comparison = self.recorded, self.reading, self.comparison
        if not reading.predicted:
            return
        comparison.relative += 30 * max((UNITS[dtype][0] for dtype in recorded.parameter_dtypes), default=0.0)
        unknown = []
        for step in range(1, len(recorded.raw)):
            got, weights, before = recorded.raw[step], recorded.parameters[step], recorded.raw[step - 1]
            labels = self.predictor.labelings(step).get(reading.label)
            if weights.keys() != self.state.keys() or labels is None:
                break
            made = self.predictor.gradients(weights, self.predictor.batch(step).ids, labels)
            reading.predicted.append(made)
            part = {n: got[n] for n in got if n in before and n != TABLE}
            if not part or any(one.id in ("label-smoothing", "logits-scaled") for one in reading.stage.causes):
                continue
            if self._mostly_same(part, mixed(part, [made.whole], [reading.factor])):
                continue
            share, kept = combined(part, [made.whole, before])
            if kept > 0.01 and self._mostly_same(part, mixed(part, [made.whole, before], (share, kept))):
                detail = f"the gradient of step {step + 1} holds {kept:.3g} times that of the step before"
                reading.note("gradient-not-zeroed", "gradient", detail)
            elif reading.clipped is None and not reading.clip.causes:
                unknown.append(step + 1)
        if unknown and not reading.stage.causes:
            words = f"the gradients of step {unknown[0]} are not those of its batch at the parameters before it"
            reading.stage.leave_open(words)
