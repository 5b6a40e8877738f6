"""Causes in a dump's gradients: compare them with those that right and wrong losses have at the program's own parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from gpt2.port.diagnosis.report import Cause
from gpt2.port.dump.tolerance import UNITS
from gpt2.port.golden_section import least
from gpt2.port.step_dump.gradient_comparison import Comparison, combined, total_norm
from gpt2.port.step_dump.layouts import Weights
from gpt2.port.step_dump.predictions import TABLE, Batch, Gradients, Predictor, labelings, rounding, special_ids
from gpt2.port.step_dump.recognition import Recorded
from gpt2.port.training.causes import cause
from gpt2.port.training.clipping import LIMITS
from gpt2.port.training.settings import Settings
from gpt2.port.training.trained import Stage

SEEN = "the dump's gradients are these, at the parameters that it has before the step"
MAX_WORK = 2e10  # parameters times tokens, of one more backward pass than needed
CLOSE = 2e-3  # relative difference of factors that are meant to be equal
Places = Callable[[Sequence[str]], str]


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


class GradientExamination:
    """The comparison of one dump's gradients."""

    def __init__(
        self, recorded: Recorded, predictor: Predictor, batches: Sequence[Batch], settings: Settings, places: Places
    ) -> None:
        self.recorded, self.predictor, self.batches, self.settings, self.places = recorded, predictor, batches, settings, places
        self.dtype = torch.float64 if recorded.float64 else torch.float32
        self.state = recorded.parameters[0]
        self.special = special_ids(predictor.config)
        self.small = predictor.config.num_parameters() * batches[0].ids.numel() < MAX_WORK
        self.exact = predictor.gradients(self.state, batches[0].ids, batches[0].targets)
        self.allowed = rounding(predictor, self.state, batches[0], self.exact, self.dtype)
        self.comparison = Comparison(self.allowed, recorded.gradient_dtypes)

    def reading(self) -> GradientReading:
        """Read the first step's gradients, then those of later steps."""
        got = self.recorded.raw[0]
        reading = self._first(got)
        self._later(reading)
        return reading

    def _first(self, got: Weights) -> GradientReading:
        batch = self.batches[0]
        best: tuple[int, str, float, list[str], Gradients] | None = None
        for label, labels in labelings(batch, self.special, self.settings.grad_accum).items():
            made = self.exact if not label else self.predictor.gradients(self.state, batch.ids, labels)
            factor, wrong = self.comparison.matched(got, made.whole)
            if best is None or len(wrong) < best[0]:
                best = len(wrong), label, factor, wrong, made
            if not wrong or not self.small:
                break
        assert best is not None
        count, label, factor, wrong, made = best
        reading = GradientReading(label=label, factor=factor, predicted=[made])
        stage = reading.stage
        if count > 0 and (self._clipped_entries(got, reading) or (count > len(got) / 2 and self._other_formula(got, reading))):
            return reading
        if label:
            id, _, detail = label.partition(" ")
            said = {"rolled": "the last label is the row's first token", "next": "the last label is the next row's first token"}
            stage.causes.append(cause(id, "loss", said.get(detail, f"these labels give the dump's gradients ({label})"), SEEN))
        if count == len(got):
            stage.explained = reading.explained = False
            worst = max(float((g - made.whole[n]).norm() / made.whole[n].norm().clamp(min=1e-300)) for n, g in got.items())
            stage.error = worst
            stage.notes.append("the gradients are those of no known mistake in the loss; dump the gradient of the logits as well")
            return reading
        if wrong:
            self._outliers(got, wrong, reading, made)
        self._factor(reading, got)
        return reading

    def _factor(self, reading: GradientReading, got: Weights) -> None:
        factor, stage, batch = reading.factor, reading.stage, self.batches[0]
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
        for value, id, words in _factors(batch, self.settings.grad_accum):
            if abs(factor / value - 1) < max(1e-4, 4 * self.comparison.unit):
                stage.causes.append(cause(id, "loss", f"the gradient is that of {words}: {factor:.6g} times the mean's", SEEN))
                return
        detail = f"the gradient is {factor:.6g} times that of the mean loss"
        stage.causes.append(cause("gradient-scaled", "gradient", detail, SEEN))

    # Other formulas

    def _clipped_entries(self, got: Weights, reading: GradientReading) -> bool:
        """Try gradients that are clipped by tensor, or by value; note what explains all."""
        right = reading.predicted[0].whole
        factors = {n: float((g * right[n]).sum() / (right[n] ** 2).sum()) for n, g in got.items() if float(right[n].norm()) > 0}
        parallel = [n for n, f in factors.items() if f > 0 and self.comparison.same(n, got[n], right[n], f)]
        if len(parallel) == len(factors) and len(factors) > 2:
            top = max(factors.values())
            cut = {n: float(got[n].norm()) for n, f in factors.items() if f < top * (1 - CLOSE)}
            if len(cut) > 1 and max(cut.values()) - min(cut.values()) <= CLOSE * max(cut.values()):
                detail = f"each parameter's gradient is clipped to {median(cut.values()):.4g}"
                reading.clip_causes.append(cause("clip-per-tensor", "gradient", detail, SEEN))
                reading.factor = top
                return True
        limit = max(float(g.abs().max()) for g in got.values())
        inside = [(g, right[n]) for n, g in got.items()]
        kept = torch.cat([r[(g.abs() < 0.99 * limit)] for g, r in inside])
        values = torch.cat([g[(g.abs() < 0.99 * limit)] for g, r in inside])
        factor = float(kept @ values / (kept @ kept)) if len(kept) else 1.0
        clamped = {n: (factor * right[n]).clamp(-limit, limit) for n in got}
        at_limit = sum(int((g.abs() > limit * (1 - 1e-4)).sum()) for g in got.values())
        if at_limit > 2 and all(self.comparison.same(n, g, clamped[n]) for n, g in got.items()):
            reading.clip_causes.append(cause("clip-by-value", "gradient", f"entries beyond {limit:.6g} are cut", SEEN))
            reading.factor = factor
            return True
        return False

    def _other_formula(self, got: Weights, reading: GradientReading) -> bool:
        """Try smoothed labels, scaled logits, and weights of rows; note what explains most gradients."""
        stage, batch = reading.stage, self.batches[0]
        if not self.small:
            return False
        smoothed = self.predictor.gradients(self.state, batch.ids, batch.targets, smoothing=1.0)
        plain = self.exact
        a, b = combined(got, [plain.whole, smoothed.whole])
        whole = {n: a * plain.whole[n] + b * smoothed.whole[n] for n in got}
        if b > 1e-3 * a > 0 and self.comparison.mostly_same(got, whole):
            share = b / (a + b)
            stage.causes.append(cause("label-smoothing", "loss", f"a label smoothing of {share:.4g}", SEEN))
            reading.label, reading.factor = "", a + b
            made = self.predictor.gradients(self.state, batch.ids, batch.targets, smoothing=share)
            reading.predicted = [made]
            self._rest(got, reading, made)
            return True
        scaled = self._temperature(got)
        if scaled is not None:
            value, factor, made = scaled
            stage.causes.append(
                cause("logits-scaled", "loss", f"the logits are multiplied by {value:.6g} before the softmax", SEEN)
            )
            reading.label, reading.factor, reading.predicted = "", factor, [made]
            self._rest(got, reading, made)
            return True
        return self._rows(got, reading)

    def _rest(self, got: Weights, reading: GradientReading, made: Gradients) -> None:
        reading.factor, wrong = self.comparison.matched(got, made.whole)
        if wrong:
            self._outliers(got, wrong, reading, made)
        self._factor(reading, got)

    def _temperature(self, got: Weights) -> tuple[float, float, Gradients] | None:
        batch = self.batches[0]

        def at(value: float) -> tuple[float, Gradients]:
            made = self.predictor.gradients(self.state, batch.ids, batch.targets, factor=value)
            return -_cosine(got, made.whole), made

        value = math.exp(least(lambda log: at(math.exp(log))[0], math.log(0.05), math.log(20.0), steps=40)[1])
        if abs(value - 1) < 1e-4:
            return None
        tidy = float(f"{value:.4g}")
        for guess in (tidy, 1 / float(f"{1 / value:.3g}"), value):
            made = at(guess)[1]
            factor, wrong = self.comparison.matched(got, made.whole)
            if len(wrong) <= len(got) / 2:
                return guess, factor, made
        return None

    def _rows(self, got: Weights, reading: GradientReading) -> bool:
        """Explain the gradient as a weighted sum of those of the rows: a part of the batch lost, or weighed otherwise."""
        batch = self.batches[0]
        rows = len(batch.ids)
        if rows < 2 or rows > 32:
            return False
        basis = []
        for row in range(rows):
            weights = torch.zeros(batch.ids.shape, dtype=torch.float64)
            weights[row] = 1.0
            basis.append(self.predictor.gradients(self.state, batch.ids, batch.targets, weights).whole)
        shares = combined(got, basis)
        mixed = {n: sum((w * one[n] for w, one in zip(shares, basis, strict=True)), torch.zeros_like(g)) for n, g in got.items()}
        if not self.comparison.mostly_same(got, mixed):
            return False
        top = max(map(abs, shares))
        kept = [row for row, w in enumerate(shares) if abs(w) > 1e-3 * top]
        parts = self.settings.grad_accum
        levels = [shares[row] for row in kept]
        if len(kept) < rows and max(levels) - min(levels) <= CLOSE * top:
            if kept == list(range(rows - len(kept), rows)):
                detail = f"only the last {len(kept)} of {rows} rows are in the gradient"
                reading.stage.causes.append(cause("accumulation-last-only", "gradient", detail, SEEN))
            else:
                detail = f"only rows {', '.join(map(str, kept))} of {rows} are in the gradient"
                reading.stage.causes.append(cause("tokens-left-out", "loss", detail, SEEN))
        elif parts and parts > 1 and rows % parts == 0:
            reading.clip_causes.append(
                cause("clip-before-accumulation", "clip", f"rows weigh between {min(shares):.4g} and {max(shares):.4g}", SEEN)
            )
        else:
            detail = f"rows weigh between {min(shares) * batch.count:.4g} and {max(shares) * batch.count:.4g}"
            reading.stage.causes.append(cause("loss-average-wrong", "loss", detail, SEEN))
        reading.predicted, reading.explained = [], True
        return True

    # Some parameters only

    def _outliers(self, got: Weights, wrong: list[str], reading: GradientReading, made: Gradients) -> None:
        stage, factor = reading.stage, reading.factor
        right = made.whole
        dead = [name for name in wrong if float(got[name].norm()) <= 1e-9 * total_norm(got)]
        frozen = [name for name in dead if name in self.recorded.unchanged]
        dead = [name for name in dead if name not in frozen]
        rest = [name for name in wrong if name not in (*dead, *frozen)]
        if TABLE in rest:
            ways = {
                "it gets the head's gradient only, not that of the rows that the ids choose": ("tied-gradient-lost", made.head),
                "it gets the gradient of the rows that the ids choose only, not the head's": ("tied-gradient-lost", made.table),
                "a gradient of it is counted twice": ("tied-gradient-doubled", 2 * right[TABLE]),
                "the head's gradient is counted twice": ("tied-gradient-doubled", 2 * made.head + made.table),
                "the gradient of the rows is counted twice": ("tied-gradient-doubled", made.head + 2 * made.table),
            }
            for detail, (id, value) in ways.items():
                if self.comparison.same(TABLE, got[TABLE], value, factor):
                    stage.causes.append(cause(id, "wte", detail, SEEN))
                    rest.remove(TABLE)
                    break
        if frozen:
            detail = "no gradient reaches these parameters, and they never change"
            stage.causes.append(cause("parameters-frozen", self.places(frozen), detail, SEEN))
        if dead:
            stage.causes.append(cause("gradient-detached", self.places(dead), "no gradient reaches these parameters", SEEN))
        if not rest:
            return
        factors = {n: float((got[n] * right[n]).sum() / (right[n] ** 2).sum()) / factor for n in rest}
        values = list(factors.values())
        if all(self.comparison.same(n, got[n], right[n], f * factor) for n, f in factors.items()) and max(values) - min(
            values
        ) < CLOSE * max(values):
            detail = f"the gradient of these parameters is multiplied by {median(values):.6g}"
            stage.causes.append(cause("gradient-scaled", self.places(rest), detail, SEEN))
        else:
            detail = "the gradients of these parameters lack a part, or have one more"
            stage.causes.append(cause("gradient-detached", self.places(rest), detail, SEEN, 0.8))

    # Later steps

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
            batch = self.batches[min(step, len(self.batches) - 1)]
            labels = labelings(batch, self.special, self.settings.grad_accum).get(reading.label)
            if labels is None:
                break
            made = self.predictor.gradients(weights, batch.ids, labels)
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
            reading.stage.explained = False
            reading.stage.notes.append(
                f"the gradients of step {unknown[0]} are not those of its batch at the parameters before it"
            )


def _factors(batch: Batch, parts: int | None) -> list[tuple[float, str, str]]:
    count, (rows, length) = batch.count, batch.targets.shape
    found = [(float(count), "loss-not-averaged", "the sum over all tokens")]
    if parts and parts > 1:
        found += [
            (float(parts), "accumulation-not-averaged", f"the sum over {parts} parts"),
            (1 / parts, "accumulation-average-wrong", f"the mean over {parts} parts, divided by their number again"),
            (count / parts, "loss-not-averaged", "the sum over the tokens of each part"),
        ]
    per_row = count / rows
    return [
        *found,
        (per_row, "loss-not-averaged", "the sum over the tokens of a row"),
        (float(rows), "loss-not-averaged", "the sum over the rows"),
        (1 / rows, "accumulation-average-wrong", "the mean, divided by the number of rows again"),
        (count / (rows * length), "padding-in-average", "the sum, divided by all targets, ignored ones too"),
    ]


def _cosine(got: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> float:
    product = sum(float((g * made[n]).sum()) for n, g in got.items())
    return product / (total_norm(got) * total_norm({n: made[n] for n in got}) or 1.0)
