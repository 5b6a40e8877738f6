"""Causes in a dump's gradients: compare them with those that right and wrong losses have at the program's own parameters."""

from __future__ import annotations

from gpt2.port.dump.tolerance import UNITS
from gpt2.port.step.causes import cause
from gpt2.port.step.clipping import LIMITS
from gpt2.port.step.gradient_comparison import Compared, Comparison, combined, total_norm
from gpt2.port.step.gradient_formulas import Formulas, GradientReading, read_cut
from gpt2.port.step.gradient_parts import SEEN, part_causes
from gpt2.port.step.gradients import TABLE, Gradients
from gpt2.port.step.layouts import Weights
from gpt2.port.step.predictions import factors_of


class GradientExamination:
    """The comparison of one dump's gradients; ``exact``: the right ones of the first step."""

    def __init__(self, given: Compared, exact: Gradients) -> None:
        self.recorded, self.predictor, self.settings, self.places = given.recorded, given.predictor, given.settings, given.places
        self.state, self.exact = self.recorded.parameters[0], exact
        self.comparison = Comparison(given.allowed, self.recorded.gradient_dtypes)

    def reading(self) -> GradientReading:
        """Read the first step's gradients, then those of later steps."""
        got = self.recorded.raw[0]
        reading = self._first(got)
        self._later(reading)
        return reading

    def _first(self, got: Weights) -> GradientReading:
        batch = self.predictor.batch(0)
        best: tuple[int, str, float, list[str], Gradients] | None = None
        for label, labels in self.predictor.labelings(0).items():
            made = self.exact if not label else self.predictor.gradients(self.state, batch.ids, labels)
            factor, wrong = self.comparison.matched(got, made.whole)
            if best is None or len(wrong) < best[0]:
                best = len(wrong), label, factor, wrong, made
            if not wrong or not self.predictor.can_try:
                break
        assert best is not None
        count, label, factor, wrong, made = best
        reading = GradientReading(label=label, factor=factor, predicted=[made])
        stage = reading.stage
        if count and read_cut(got, reading, self.comparison):
            return reading
        parts = self.settings.grad_accum
        formulas = Formulas(self.predictor, self.state, batch, self.exact, self.comparison, parts)
        if count > len(got) / 2 and formulas.read(got, reading):
            if reading.predicted:
                reading.factor, wrong = self.comparison.matched(got, reading.predicted[0].whole)
                self._finish(got, wrong, reading)
            return reading
        if label:
            id, _, detail = label.partition(" ")
            said = {"rolled": "the last label is the row's first token", "next": "the last label is the next row's first token"}
            stage.causes.append(cause(id, "loss", said.get(detail, f"these labels give the dump's gradients ({label})"), SEEN))
        if count == len(got):
            reading.explained = False
            worst = max(float((g - made.whole[n]).norm() / made.whole[n].norm().clamp(min=1e-300)) for n, g in got.items())
            stage.error = worst
            late = "the search ended at its time limit: " if self.predictor.deadline.passed else ""
            stage.leave_open(
                f"{late}the gradients are those of no known mistake in the loss; dump the gradient of the logits as well"
            )
            return reading
        self._finish(got, wrong, reading)
        return reading

    def _finish(self, got: Weights, wrong: list[str], reading: GradientReading) -> None:
        """Explain the gradients ``wrong`` that are not like most, and the factor of these."""
        if wrong:
            made, comparison, unchanged = reading.predicted[0], self.comparison, self.recorded.unchanged
            reading.stage.causes += part_causes(got, wrong, (reading.factor, made), comparison, unchanged, self.places)
        self._factor(reading, got)

    def _factor(self, reading: GradientReading, got: Weights) -> None:
        factor, stage, batch = reading.factor, reading.stage, self.predictor.batch(0)
        if abs(factor - 1) <= max(1e-5, 4 * self.comparison.unit):
            return
        parts = self.settings.grad_accum or 1
        if reading.label == "accumulation-last-only" and abs(factor * parts - 1) < max(1e-4, 4 * self.comparison.unit):
            return
        norm = total_norm(got)
        limits = (self.settings.clip,) if self.settings.clip else LIMITS
        limit = next((one for one in limits if one and abs(norm / one - 1) < max(1e-4, 4 * self.comparison.unit)), None)
        if limit is not None and factor < 1:
            reading.clipped = limit
            if not self.recorded.used or not any(self.recorded.used):
                stage.notes.append(
                    f"the gradients are those after clipping to a norm of {limit:g}; a factor of the loss is not seen"
                )
            return
        for value, id, words in factors_of(batch, self.settings.grad_accum):
            if abs(factor / value - 1) < max(1e-4, 4 * self.comparison.unit):
                stage.causes.append(cause(id, "loss", f"the gradient is that of {words}: {factor:.6g} times the mean's", SEEN))
                return
        detail = f"the gradient is {factor:.6g} times that of the mean loss"
        stage.causes.append(cause("gradient-scaled", "gradient", detail, SEEN))

    def _later(self, reading: GradientReading) -> None:
        """Compare the gradients of later steps, from the program's own parameters: what is left of the step before."""
        recorded = self.recorded
        if not reading.predicted:
            return
        self.comparison.inexact = 30 * max((UNITS[dtype][0] for dtype in recorded.parameter_dtypes), default=0.0)
        unknown = []
        for step in range(1, len(recorded.raw)):
            got, weights = recorded.raw[step], recorded.parameters[step]
            if weights.keys() != self.state.keys():
                break
            labels = self.predictor.labelings(step).get(reading.label)
            if labels is None:
                break
            made = self.predictor.gradients(weights, self.predictor.batch(step).ids, labels)
            reading.predicted.append(made)
            before = recorded.raw[step - 1]
            names = [n for n in got if n in before and n != TABLE]
            if not names or any(one.id in ("label-smoothing", "logits-scaled") for one in reading.stage.causes):
                continue
            part = {n: got[n] for n in names}
            if self.comparison.mostly_same(part, {n: reading.factor * made.whole[n] for n in names}):
                continue
            share, kept = combined(part, [made.whole, before])
            mixed = {n: share * made.whole[n] + kept * before[n] for n in names}
            if self.comparison.mostly_same(part, mixed) and kept > 0.01:
                detail = f"the gradient of step {step + 1} holds {kept:.3g} times that of the step before"
                known = {one.id for one in reading.stage.causes}
                if "gradient-not-zeroed" not in known:
                    reading.stage.causes.append(cause("gradient-not-zeroed", "gradient", detail, SEEN))
            elif reading.clipped is None and not reading.clip_causes:
                unknown.append(step + 1)
        if unknown and not reading.stage.causes:
            words = f"the gradients of step {unknown[0]} are not those of its batch at the parameters before it"
            reading.stage.leave_open(words)
