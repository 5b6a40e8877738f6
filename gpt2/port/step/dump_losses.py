"""Causes in a dump's losses: compare each with the mean cross-entropy, and with what known mistakes make of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.port.dump.tolerance import UNITS
from gpt2.port.step.causes import Stage, cause
from gpt2.port.step.dump_gradients import GradientReading
from gpt2.port.step.expected import Predictor, Weights
from gpt2.port.step.labels import IGNORED, cause_of

ROUNDING = 2e-6  # of a loss that is computed in float32; sums in half precision are not meant
EXACT = 1e-10
SMOOTHINGS = (0.1, 0.05, 0.2, 0.01, 0.15, 0.3)
TEMPERATURES = [n / 10 for n in range(1, 21) if n != 10]
FACTORS = tuple(dict.fromkeys([*TEMPERATURES, *(1 / one for one in TEMPERATURES)]))  # of the logits
MAX_LOSSES = 64
SEEN = "the dump's loss is this number, from the parameters before the step"


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


@dataclass
class LossStage(Stage):
    """What the losses show; ``judged``: whether one is explained, as right or by a cause, and the formula that gives it."""

    judged: bool = False
    smoothing: float = 0.0
    factor: float = 1.0  # of the logits


def loss_stage(
    losses: Sequence[Losses],
    parameters: Sequence[Weights],
    predictor: Predictor,
    reading: GradientReading | None,
    known: Collection[str],
    exact: bool,
    asked: bool,
) -> LossStage:
    """Compare losses with those at the parameters before each step.

    ``reading``: of the gradients, which tell what was trained; ``known``: the causes that were found there. ``exact``: computed
    in float64. ``asked``: the dump is one of steps, so that some array must be a loss.
    """
    whole = list(takewhile(lambda weights: weights.keys() == parameters[0].keys(), parameters))
    steps = range(len(whole))
    first = predictor.logits(whole[0], predictor.batch(0).ids)
    logits = (first if step == 0 else predictor.logits(whole[step], predictor.batch(step).ids) for step in steps)
    expected = [_mean(one, predictor.batch(step).targets) for step, one in zip(steps, logits, strict=True)]
    for one in losses:
        values = one.values.tolist()
        pairs = [(values[0], value) for value in expected] if len(values) == 1 else list(zip(values, expected, strict=False))
        near = [one.near(a, b, exact) for a, b in pairs]
        if any(near) if len(values) == 1 else all(near):
            return LossStage(judged=True)
    for one in losses:
        value = float(one.values[0])
        made = next((made for right, made in _ways(first, predictor, reading) if one.near(value, right, exact)), None)
        if made is None:
            continue
        named, smoothing, factor = made
        stage = LossStage(judged=True, smoothing=smoothing, factor=factor)
        unknown = [(id, words) for id, words in named if id not in known]
        if reading is not None and reading.explained and reading.clipped is None and len(unknown) == len(named):
            said = ", ".join(words for _, words in named)
            stage.notes.append(f"the loss that is dumped is not the one that is trained ({said}); the gradients are of the mean")
        else:
            stage.causes = [cause(id, "loss", f"{words}: {value:.6g}", SEEN) for id, words in unknown]
            stage.error = abs(value / expected[0] - 1)
        return stage
    stage = LossStage()
    if not {"label-smoothing", "logits-scaled"} & set(known) and (len(losses) == 1 or asked):
        said = ", ".join(f"{float(one.values[0]):.6g}" for one in losses[:3])
        stage.leave_open(f"the loss {said} is of no known mistake; the mean cross-entropy is {expected[0]:.6g}")
    return stage


def _ways(
    logits: Tensor, predictor: Predictor, reading: GradientReading | None
) -> Iterator[tuple[float, tuple[list[tuple[str, str]], float, float]]]:
    """Yield losses of known mistakes, each with its causes and what they do, a smoothing, and a factor of the logits."""
    known = predictor.labelings(0)
    told = [reading.label] if reading is not None and reading.label else []  # by the gradient
    for key in [*told, *known]:
        mean, base = _mean(logits, known[key]), [cause_of(key)] if key else []
        if base:
            yield mean, (base, 0.0, 1.0)
        for factor, ids, words in predictor.averages(known[key]):
            yield mean * factor, ([*base, *((id, words) for id in ids)], 0.0, 1.0)
    targets = predictor.batch(0).targets
    for share in SMOOTHINGS:
        yield _mean(logits, targets, smoothing=share), ([("label-smoothing", f"a label smoothing of {share:g}")], share, 1.0)
    for factor in FACTORS:
        yield _mean(logits, targets, factor=factor), ([("logits-scaled", f"the logits times {factor:.4g}")], 0.0, factor)


def _mean(logits: Tensor, labels: Tensor, smoothing: float = 0.0, factor: float = 1.0) -> float:
    scaled = factor * logits.flatten(0, 1)
    return float(F.cross_entropy(scaled, labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing))
