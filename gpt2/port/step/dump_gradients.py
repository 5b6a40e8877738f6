"""Causes in a dump's gradients: compare them with those that right and wrong losses have at the program's own parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch

from gpt2.port.dump.tolerance import UNITS
from gpt2.port.step.causes import Places, Stage, cause
from gpt2.port.step.clipping import LIMITS, ClipKind, clip_stage, passage, read_clipping
from gpt2.port.step.expected import TABLE, Gradients, Predictor
from gpt2.port.step.gradients import Comparison, ratio, total_norm
from gpt2.port.step.labels import Formula, average_of
from gpt2.port.step.recognition import Recorded
from gpt2.port.step.records import Gradient, Update
from gpt2.port.step.settings import Settings

SEEN = "the dump's gradients are these, at the parameters that it has before the step"
CLOSE = 2e-3  # relative difference of factors that are meant to be equal
LAST_BIAS = "ln_f.bias"
NUMBERS = 3  # smoothings and factors of the logits that are tried


@dataclass
class GradientReading:
    """What the first gradients of a dump are: ``factor`` times ``made``, those of a ``formula``, except for ``wrong`` ones."""

    formula: Formula
    made: Gradients
    factor: float
    wrong: list[str]
    stage: Stage = field(default_factory=Stage)
    clip: Stage = field(default_factory=Stage)
    clipped: float | None = None  # the norm, if they are dumped after clipping

    def note(self, id: str, where: str, detail: str) -> None:
        """Add a cause."""
        if all((one.id, one.where) != (id, where) for one in self.stage.causes):
            self.stage.causes.append(cause(id, where, detail, SEEN))


@dataclass
class Evidence:
    """What a dump's gradients and updates are compared with.

    ``exact``: the right gradients of the first step; ``allowed``: the rounding of each.
    """

    recorded: Recorded
    predictor: Predictor
    settings: Settings
    places: Places
    exact: Gradients
    allowed: Mapping[str, float]


@dataclass
class GradientExamination(Evidence):
    """The comparison of one dump's gradients."""

    def __post_init__(self) -> None:
        self.state, self.got = self.recorded.parameters[0], self.recorded.raw[0]
        units = [UNITS[dtype] for dtype in self.recorded.gradient_dtypes] or [(0.0, 0.0)]
        (self.unit, _), smallest = max(units), max(smallest for _, smallest in units)
        still = "no gradient reaches these parameters, and they never change"
        wpe, frozen = [name for name in self.got if name.startswith("wpe")], self.recorded.unchanged
        how = self.allowed, self.unit, smallest, CLOSE, SEEN
        self.comparison = Comparison(*how, self.places, frozen, still, wpe, derivatives=True)

    def read(self) -> GradientReading:
        """Read the first step's gradients, then those of later steps."""
        right, *others = self.predictor.formulas(0).values()
        reading = self._best(one for some in ([right], others) for one in self._sorted(some))
        if not (reading.wrong and self._is_cut(reading)):
            if len(reading.wrong) > len(self.got) / 2 and LAST_BIAS in self.got and self.predictor.can_try:
                free = self._best(self._sorted(self.predictor.numbers())[:NUMBERS])
                reading = free if len(free.wrong) <= len(self.got) / 2 else reading
            for id, words in reading.formula.wrong:
                reading.note(id, "loss", words)
            if len(reading.wrong) == len(self.got):
                pairs, deadline = [(g, reading.made.whole[n]) for n, g in self.got.items()], self.predictor.deadline
                reading.stage.error = max(float((g - right).norm() / right.norm().clamp(min=1e-300)) for g, right in pairs)
                late = f"the search ended at its limit of {deadline.words}: " if deadline.passed else ""
                words = "the gradients are those of no known mistake in the loss; dump the gradient of the logits as well"
                reading.stage.leave_open(late + words)
                return reading
            reading.stage.causes += self.comparison.causes(self.got, reading.wrong, reading.factor, reading.made)
            self._judge_factor(reading)
        self._later(reading)
        return reading

    def _sorted(self, formulas: list[Formula]) -> list[Formula]:
        """Return formulas, first those that give the gradient of the last bias, which needs no backward pass."""
        if LAST_BIAS not in self.got:
            return formulas
        logits, last = self.predictor.logits(self.state, 0), self.got[LAST_BIAS].flatten()
        made = torch.stack([self.predictor.last_bias(self.state, one.slope(logits)) for one in formulas])
        order = torch.cosine_similarity(made, last[None]).argsort(descending=True, stable=True)
        return [formulas[number] for number in order.tolist()]

    def _best(self, formulas: Iterable[Formula]) -> GradientReading:
        """Return the reading with fewest wrong gradients; the first without, or as long as there is time."""
        best: GradientReading | None = None
        for formula in formulas:
            made = self.predictor.gradients(self.state, 0, formula) if formula.wrong else self.exact
            right = made.whole
            factors = [ratio(g, right[n]) for n, g in self.got.items() if float(right[n].norm()) > 0]
            near = sorted(factors, key=lambda f: abs(f - median(factors)))[:8]
            tries = [(self.comparison.wrong(self.got, right, f), f) for f in ([1.0, *near] if near else [])]
            wrong, factor = min(tries, key=lambda one: len(one[0]), default=(list(self.got), 1.0))
            if best is None or len(wrong) < len(best.wrong):
                best = GradientReading(formula, made, factor, wrong)
            if not wrong or not self.predictor.can_try:
                break
        assert best is not None
        return best

    def _is_cut(self, reading: GradientReading) -> bool:
        """Note gradients that are clipped by tensor, or by value, if that explains all; return whether it does."""
        held, used = Gradient.of({n: reading.made.whole[n] for n in self.got}), Gradient.of(self.got)
        ratios = passage(held, used, CLOSE).ratios.values()
        factor = max(ratios, default=1.0)
        cut = read_clipping([[Update(held=held, gradient=used)]], factor, CLOSE)
        least = {ClipKind.ENTRY: 0, ClipKind.PARAMETER: 2}  # parameters that are cut
        several = sum(one < factor * (1 - CLOSE) for one in ratios)
        if cut.odd or cut.clip is None or several < least.get(cut.clip.kind, math.inf) or min(ratios, default=1.0) <= 0:
            return False
        reading.clip, reading.factor = clip_stage(cut, None, ""), factor
        return True

    def _judge_factor(self, reading: GradientReading) -> None:
        """Note the factor of the gradients, unless clipping or an average explains it."""
        factor, close = reading.factor, max(1e-4, 4 * self.unit)
        parts = self.settings.grad_accum or 1
        of_one = reading.formula.key.startswith("accumulation-last-only") and abs(factor * parts - 1) < close
        if abs(factor - 1) <= max(1e-5, 4 * self.unit) or of_one:
            return
        norm, limits = total_norm(self.got), [self.settings.clip] if self.settings.clip else LIMITS
        limit = next((one for one in limits if abs(norm / one - 1) < close), None)
        if limit is not None and factor < 1:
            reading.clipped = limit
            if not any(self.recorded.used):
                words = f"the gradients are those after clipping to a norm of {limit:g}; a factor of the loss is not seen"
                reading.stage.notes.append(words)
            return
        known = average_of(factor, self.predictor.averages(self.predictor.batch(0).targets), close)
        if known is None:
            reading.note("gradient-scaled", "gradient", f"the gradient is {factor:.6g} times that of the mean loss")
            return
        for id in known[1]:
            reading.note(id, "loss", f"the gradient is that of {known[2]}: {factor:.6g} times the mean's")

    def _later(self, reading: GradientReading) -> None:
        """Compare the gradients of later steps, from the program's own parameters: what is left of the step before."""
        recorded, comparison, unknown = self.recorded, self.comparison, list[int]()
        comparison.relative += 30 * max((UNITS[dtype][0] for dtype in recorded.parameter_dtypes), default=0.0)
        for step, (before, got) in enumerate(itertools.pairwise(recorded.raw), 1):
            part = {n: g for n, g in got.items() if n in before and n != TABLE}
            if not part or (weights := recorded.parameters[step]).keys() != self.state.keys():
                break
            made = self.predictor.gradients(weights, step, self.predictor.again(reading.formula, step)).whole
            new = {n: reading.factor * made[n] for n in part}
            if len(comparison.wrong(part, new)) < len(part) / 2:
                continue
            square = sum(float(before[n].square().sum()) for n in part)
            kept = sum(float(((g - new[n]) * before[n]).sum()) for n, g in part.items()) / max(square, 1e-300)
            summed = {n: new[n] + kept * before[n] for n in part}
            if kept > 0.01 and len(comparison.wrong(part, summed)) < len(part) / 2:
                detail = f"the gradient of step {step + 1} holds {kept:.3g} times that of the step before"
                reading.note("gradient-not-zeroed", "gradient", detail)
            elif reading.clipped is None and not reading.clip.causes:
                unknown.append(step + 1)
        if unknown and not reading.stage.causes:
            words = f"the gradients of step {unknown[0]} are not those of its batch at the parameters before it"
            reading.stage.leave_open(words)
