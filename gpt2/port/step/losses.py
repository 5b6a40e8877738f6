"""Read the loss that a step trains from the gradient of its logits: each position's label and weight, and the formula.

For logits l with p = softmax(l), label k and weight w, the gradient of a mean cross-entropy is w (p - 1_k). A label smoothing
of s gives w (p - (1 - s) 1_k - s/V), and logits times c give w c (softmax(c l) - 1_k). So each row says what it was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.port.step.records import Watched

BOUND = 1e-7  # relative error of a row that a formula explains; float32 constants reach 1e-8
NOTHING = -1  # in place of a label: the position is not trained on


@dataclass
class LossReading:
    """What one call was trained on, by position of its batch (B, T).

    ``labels``: int64, NOTHING where the weight is zero. ``weights``: float64. ``parts``: the number of the forward pass.
    ``smoothing`` and ``temperature`` (the factor of the logits) hold for all positions. ``error``: of the worst row, relative.
    """

    labels: Tensor
    weights: Tensor
    parts: Tensor
    smoothing: float = 0.0
    temperature: float = 1.0
    error: float = 0.0
    unmatched: int = 0  # rows of ids that are not of the batch

    @property
    def total(self) -> float:
        return float(self.weights.sum())


def read_loss(seen: Watched, ids: Tensor) -> LossReading | None:
    """Return what a call on the batch ``ids`` (B, T + 1) was trained on; None if no gradient of the logits was seen."""
    forwards = [one for one in seen.forwards if one.gradient is not None]
    if not forwards:
        return None
    rows, length = ids.size(0), ids.size(1) - 1
    blank = torch.full((rows, length), NOTHING)
    reading = LossReading(blank, torch.zeros(rows, length, dtype=torch.float64), blank.clone())
    forms = []
    for number, forward in enumerate(forwards):
        assert forward.gradient is not None
        logits, gradient = forward.logits.cpu().double(), forward.gradient.cpu().double()
        logits = logits.reshape(forward.ids.size(0), -1, logits.shape[-1])
        gradient = gradient.reshape(logits.shape)
        placed = [_row_of(row, ids) for row in forward.ids.cpu()]
        reading.unmatched += sum(row is None for row in placed)
        form = _Form(logits.flatten(0, 1), gradient.flatten(0, 1))
        forms.append(form)
        shape = logits.shape[:2]
        labels, weights = form.labels.view(shape), form.weights.view(shape)
        for at, row in enumerate(placed):
            count = min(shape[1], length)
            if row is None:
                continue
            trained = weights[at, :count] != 0
            reading.weights[row, :count] += weights[at, :count]
            reading.labels[row, :count] = torch.where(trained, labels[at, :count], reading.labels[row, :count])
            reading.parts[row, :count] = number
    heavy = max(forms, key=lambda form: form.error)
    reading.smoothing, reading.temperature, reading.error = heavy.smoothing, heavy.temperature, heavy.error
    if reading.error <= BOUND:
        reading.smoothing = max(form.smoothing for form in forms)
        reading.temperature = max((form.temperature for form in forms), key=lambda value: abs(value - 1))
    return reading


def _row_of(row: Tensor, ids: Tensor) -> int | None:
    """Return the number of the row of ``ids`` that begins with ``row``, which may be shorter; None if there is none."""
    for number, whole in enumerate(ids):
        count = min(len(row), len(whole))
        if torch.equal(row[:count], whole[:count]):
            return number
    return None


class _Form:
    """The gradient (n, V) of the logits (n, V), explained: labels and weights by row, smoothing, and the logits' factor."""

    def __init__(self, logits: Tensor, gradient: Tensor) -> None:
        self.smoothing, self.temperature = 0.0, 1.0
        size = gradient.abs().amax(-1)
        trained = size > 0
        self.labels = torch.where(trained, gradient.argmin(-1), NOTHING)
        self.weights = torch.zeros(len(logits), dtype=torch.float64)
        self.error = 0.0
        if not bool(trained.any()):
            return
        logits, gradient, labels = logits[trained], gradient[trained], self.labels[trained]
        fits = [self._plain, self._smoothed, self._scaled]
        best: tuple[float, Tensor, float, float] | None = None
        for fit in fits:
            found = fit(logits, gradient, labels)
            if best is None or found[0] < best[0] / 100:
                best = found
            if best[0] <= BOUND:
                break
        assert best is not None
        self.error, weights, self.smoothing, self.temperature = best
        self.weights[trained] = weights

    @staticmethod
    def _plain(logits: Tensor, gradient: Tensor, labels: Tensor, factor: float = 1.0) -> tuple[float, Tensor, float, float]:
        shape = logits.mul(factor).softmax(-1)
        shape.scatter_add_(1, labels[:, None], -torch.ones_like(labels[:, None], dtype=torch.float64))
        weights = (gradient * shape).sum(-1) / (shape * shape).sum(-1)
        return _error(gradient, weights[:, None] * shape), weights / factor, 0.0, factor

    @staticmethod
    def _smoothed(logits: Tensor, gradient: Tensor, labels: Tensor) -> tuple[float, Tensor, float, float]:
        p, size = logits.softmax(-1), logits.shape[-1]
        others = torch.ones_like(p).scatter_(1, labels[:, None], 0.0)
        count = others.sum(-1)
        mean_p, mean_g = (p * others).sum(-1) / count, (gradient * others).sum(-1) / count
        deviation = (p - mean_p[:, None]) * others
        weights = (deviation * gradient).sum(-1) / (deviation * deviation).sum(-1)
        shares = (weights * mean_p - mean_g) / weights * size
        smoothing = float(shares.median())
        target = torch.full_like(p, smoothing / size)
        target.scatter_add_(1, labels[:, None], torch.full_like(mean_p[:, None], 1 - smoothing))
        return _error(gradient, weights[:, None] * (p - target)), weights, smoothing, 1.0

    @classmethod
    def _scaled(cls, logits: Tensor, gradient: Tensor, labels: Tensor) -> tuple[float, Tensor, float, float]:
        others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, labels[:, None], False) & (gradient > 0)
        weight = others.double()
        count = weight.sum(-1, keepdim=True).clamp(min=1)
        logs = torch.where(others, gradient.clamp(min=1e-300).log(), 0.0)
        x = (logits - (logits * weight).sum(-1, keepdim=True) / count) * weight
        factors = (x * logs).sum(-1) / (x * x).sum(-1).clamp(min=1e-300)
        factor = float(factors.median())
        if not 1e-3 < factor < 1e3:
            return float("inf"), torch.zeros(len(logits), dtype=torch.float64), 0.0, 1.0
        return cls._plain(logits, gradient, labels, factor)


def _error(gradient: Tensor, predicted: Tensor) -> float:
    """Return the worst row's largest difference over its largest entry."""
    return float(((gradient - predicted).abs().amax(-1) / gradient.abs().amax(-1)).max())


def logits_gradients(seen: Watched) -> list[tuple[Tensor, Tensor]]:
    """Return ids (b, T) and the gradient of the logits (b, T, V) of each forward pass that was trained."""
    return [(one.ids, one.gradient) for one in seen.forwards if one.gradient is not None]
