"""Causes in a dump's losses: compare each with the mean cross-entropy, and with what known mistakes make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.port.dump.tolerance import UNITS
from gpt2.port.step.causes import cause
from gpt2.port.step.gradient_formulas import GradientReading
from gpt2.port.step.gradients import IGNORED
from gpt2.port.step.predictions import Batch, Predictor, factors_of
from gpt2.port.step.settings import Settings
from gpt2.port.step.trained import Stage

ROUNDING = 2e-6  # of a loss that is computed in float32; sums in half precision are not meant
EXACT = 1e-10
SMOOTHINGS = (0.1, 0.05, 0.2, 0.01, 0.15, 0.3)
TEMPERATURES = [n / 10 for n in range(1, 21) if n != 10]
FACTORS = tuple(dict.fromkeys([*TEMPERATURES, *(1 / one for one in TEMPERATURES)]))  # of the logits
MAX_LOSSES = 64
SEEN = "the dump's loss is this number, from the parameters before the step"


@dataclass
class LossStage(Stage):
    """What a loss shows, with the formula that gives it: ``smoothing`` of the labels, ``factor`` of the logits."""

    smoothing: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class Losses:
    """A dump's losses in one array, and its name."""

    name: str
    values: Tensor  # (n,), float64
    dtype: torch.dtype

    def near(self, value: float, expected: float, exact: bool) -> bool:
        """Whether a value is the expected one, up to rounding."""
        unit = UNITS[self.dtype][0]
        return abs(value - expected) <= (4 * unit + (EXACT if exact else ROUNDING)) * abs(expected)


def losses_of(arrays: Mapping[str, Tensor]) -> list[Losses]:
    """Return the arrays that may be losses: single numbers, or a few in a row."""
    return [
        Losses(name, array.double().reshape(-1), array.dtype)
        for name, array in arrays.items()
        if array.numel() == 1 or (array.ndim == 1 and 1 < array.numel() <= MAX_LOSSES)
    ]


def mean_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0, factor: float = 1.0) -> float:
    return float(
        F.cross_entropy(factor * logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)
    )


def right_losses(found: Sequence[Losses], expected: Sequence[float], exact: bool) -> list[Losses]:
    """Return the arrays whose values are those expected of steps: of some step for a number, of the first ones in a row."""
    right = []
    for one in found:
        values = one.values.tolist()
        if (len(values) == 1 and any(one.near(values[0], value, exact) for value in expected)) or (
            len(values) > 1 and all(one.near(a, b, exact) for a, b in zip(values, expected, strict=False))
        ):
            right.append(one)
    return right


def loss_stage(
    one: Losses,
    logits: Tensor,
    predictor: Predictor,
    settings: Settings,
    exact: bool,
    reading: GradientReading | None,
) -> LossStage | None:
    """Return the causes in a first loss that is not right; None if no known mistake gives it."""
    value = float(one.values[0])
    batch, labels = predictor.batch(0), predictor.labelings(0)
    for expected, causes in _ways(logits, batch, labels, settings, reading):
        if one.near(value, expected, exact):
            stage = LossStage(error=abs(value / mean_loss(logits, batch.targets) - 1))
            stage.causes = [cause(id, "loss", f"{detail}: {value:.6g}", SEEN) for id, detail in causes]
            return stage
    return next((stage for expected, stage in _formulas(logits, batch) if one.near(value, expected, exact)), None)


def _ways(
    logits: Tensor, batch: Batch, labels: Mapping[str, Tensor], settings: Settings, reading: GradientReading | None
) -> Iterator[tuple[float, list[tuple[str, str]]]]:
    """Yield losses of known mistakes, each with its causes and what they do."""
    names = list(labels)
    if reading is not None and reading.label:  # the gradient has said already what the labels are
        names = [reading.label, *names]
    for name in names:
        mean = mean_loss(logits, labels[name])
        id = name.partition(" ")[0]
        base = [(id, f"the loss of these labels ({name})")] if id else []
        if base:
            yield mean, base
        for factor, wrong, words in factors_of(Batch(batch.ids, labels[name]), settings.grad_accum):
            yield mean * factor, [*base, (wrong, words)]


def _formulas(logits: Tensor, batch: Batch) -> Iterator[tuple[float, LossStage]]:
    """Yield losses of other formulas than the cross-entropy of the logits."""
    for share in SMOOTHINGS:
        stage = LossStage(smoothing=share)
        stage.causes.append(cause("label-smoothing", "loss", f"a label smoothing of {share:g}", SEEN))
        yield mean_loss(logits, batch.targets, smoothing=share), stage
    for factor in FACTORS:
        stage = LossStage(factor=factor)
        stage.causes.append(cause("logits-scaled", "loss", f"the logits times {factor:.4g}", SEEN))
        yield mean_loss(logits, batch.targets, factor=factor), stage
