"""Read the loss that a step trains from the gradient of its logits: each position's label and weight, and the formula.

For logits l with p = softmax(l), label k and weight w, the gradient of a mean cross-entropy is w (p - 1_k). A label smoothing
of s gives w (p - (1 - s) 1_k - s/V), and logits times c give w c (softmax(c l) - 1_k). So each row says what it was trained on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.port.diagnosis.report import Cause
from gpt2.port.step.causes import Stage, cause
from gpt2.port.step.labels import AVERAGED, IGNORED, Batch, average_of, averages, cause_of, shifts
from gpt2.port.step.records import Forward

BOUND = 1e-7  # relative error of a row that a formula explains; float32 constants reach 1e-8
EVEN = 1e-6  # relative difference of weights that are meant to be equal
SEEN = "read from the gradient of the logits, position by position"


@dataclass
class LossReading:
    """What one call was trained on, by position of its batch (B, T).

    ``labels``: int64, IGNORED where the weight is zero. ``weights``: float64. ``parts``: the number of the forward pass.
    ``smoothing`` and ``temperature`` (the factor of the logits) hold for all positions. ``error``: of the worst row, relative.
    """

    labels: Tensor
    weights: Tensor
    parts: Tensor
    smoothing: float = 0.0
    temperature: float = 1.0
    error: float = 0.0
    unmatched: int = 0  # rows of ids that are not of the batch


def read_loss(forwards: Iterable[Forward], batch: Batch) -> LossReading | None:
    """Return what a call on a batch was trained on; None if no gradient of the logits was seen."""
    trained = [one for one in forwards if one.gradient is not None]
    if not trained:
        return None
    blank = torch.full_like(batch.ids, IGNORED)
    reading = LossReading(blank, torch.zeros(blank.shape, dtype=torch.float64), blank.clone())
    for number, forward in enumerate(trained):
        assert forward.gradient is not None
        logits = forward.logits.cpu().double().reshape(forward.ids.size(0), -1, forward.logits.shape[-1])
        labels, weights, smoothing, temperature, error = _row_formula(
            logits, forward.gradient.cpu().double().reshape(logits.shape)
        )
        if error > max(reading.error, BOUND) or number == 0:
            reading.smoothing, reading.temperature = smoothing, temperature
        elif reading.error <= BOUND:
            reading.smoothing = max(smoothing, reading.smoothing)
            reading.temperature = max(temperature, reading.temperature, key=lambda value: abs(value - 1))
        reading.error = max(error, reading.error)
        count = min(logits.shape[1], blank.shape[1])
        for at, ids in enumerate(forward.ids.cpu()):
            row = _row_of(ids, batch.tokens)
            if row is None:
                reading.unmatched += 1
                continue
            known = weights[at, :count] != 0
            reading.weights[row, :count] += weights[at, :count]
            reading.labels[row, :count] = torch.where(known, labels[at, :count], reading.labels[row, :count])
            reading.parts[row, :count] = number
    return reading


def _row_of(row: Tensor, tokens: Tensor) -> int | None:
    """Return the number of the row of ``tokens`` that begins with ``row``, which may be shorter; None if there is none."""
    count = min(len(row), tokens.shape[1])
    same = (tokens[:, :count] == row[:count]).all(1)
    return int(same.int().argmax()) if bool(same.any()) else None


Row = tuple[float, Tensor, float, float]  # error, weights (n,), smoothing, factor of the logits


def _row_formula(logits: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, float, float, float]:
    """Return labels and weights (b, T) that explain the gradient of logits (b, T, V), smoothing, temperature, and the error."""
    trained = gradient.abs().amax(-1) > 0
    labels = torch.where(trained, gradient.argmin(-1), IGNORED)
    weights = torch.zeros(labels.shape, dtype=torch.float64)
    best: Row = (float("inf") if bool(trained.any()) else 0.0, weights[trained], 0.0, 1.0)
    for formula in (_plain, _smoothed, _scaled):
        if best[0] <= BOUND:
            break
        found = formula(logits[trained], gradient[trained], labels[trained])
        best = found if found[0] < best[0] / 100 else best
    weights[trained] = best[1]
    return labels, weights, best[2], best[3], best[0]


def _fitted(gradient: Tensor, weights: Tensor, shape: Tensor) -> float:
    """Return the worst row's largest difference of a gradient (n, V) from ``weights`` times ``shape``, over its largest entry."""
    return float(((gradient - weights[:, None] * shape).abs().amax(-1) / gradient.abs().amax(-1)).max())


def _plain(logits: Tensor, gradient: Tensor, labels: Tensor, factor: float = 1.0) -> Row:
    shape = logits.mul(factor).softmax(-1)
    shape[torch.arange(len(labels)), labels] -= 1
    weights = (gradient * shape).sum(-1) / (shape * shape).sum(-1)
    return _fitted(gradient, weights, shape), weights / factor, 0.0, factor


def _smoothed(logits: Tensor, gradient: Tensor, labels: Tensor) -> Row:
    """Fit w and s where the label is not: there, the gradient is w p - w s/V."""
    p, size, rows = logits.softmax(-1), logits.shape[-1], torch.arange(len(labels))
    others = torch.ones_like(p)
    others[rows, labels] = 0.0
    mean_p, mean_g = (p * others).sum(-1) / (size - 1), (gradient * others).sum(-1) / (size - 1)
    deviation = (p - mean_p[:, None]) * others
    weights = (deviation * gradient).sum(-1) / (deviation * deviation).sum(-1)
    smoothing = float(((weights * mean_p - mean_g) / weights * size).median())
    shape = p - smoothing / size
    shape[rows, labels] -= 1 - smoothing
    return _fitted(gradient, weights, shape), weights, smoothing, 1.0


def _scaled(logits: Tensor, gradient: Tensor, labels: Tensor) -> Row:
    """Fit c where the label is not: there, the logarithm of the gradient is c l, and a constant of the row."""
    others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, labels[:, None], False) & (gradient > 0)
    logs = torch.where(others, gradient.clamp(min=1e-300).log(), 0.0)
    x = (logits - (logits * others).sum(-1, keepdim=True) / others.sum(-1, keepdim=True).clamp(min=1)) * others
    factor = float(((x * logs).sum(-1) / (x * x).sum(-1).clamp(min=1e-300)).median())
    if not 1e-3 < factor < 1e3:
        return float("inf"), torch.zeros(len(logits), dtype=torch.float64), 0.0, 1.0
    return _plain(logits, gradient, labels, factor)


def loss_stage(batch: Batch, reading: LossReading, factor: float) -> Stage:
    """Return the causes in one reading of the loss; ``factor`` is what the step multiplies its gradient by before the update."""
    stage = Stage(error=_distance(batch, reading))
    if reading.unmatched:
        stage.notes.append("your step runs the model on other ids than those that it is given; their rows are not judged")
    if reading.error > max(BOUND, 1e-5):
        stage.leave_open(f"the gradient of your logits is no cross-entropy of them (error {reading.error:.1e})")
        return stage
    found = _labels(batch, reading.labels)
    if reading.smoothing > 1e-6:
        found.append(("label-smoothing", f"a label smoothing of {reading.smoothing:.4g}"))
    if abs(reading.temperature - 1) > 1e-6:
        found.append(("logits-scaled", f"the logits are multiplied by {reading.temperature:.6g} before the softmax"))
    found += _weights(reading, factor)
    stage.causes = [cause(id, "gradient" if id == "gradient-scaled" else "loss", detail, SEEN) for id, detail in found]
    return stage


def _distance(batch: Batch, reading: LossReading) -> float:
    """Return the relative distance of the weights on labels from those of the mean over the next tokens."""
    right = torch.where(batch.targets >= 0, 1 / batch.count, 0.0).double()
    same = (reading.labels == batch.targets) | (reading.weights == 0)
    square = torch.where(same, (reading.weights - right) ** 2, reading.weights**2 + right**2).sum()
    return float((square / (right**2).sum()).sqrt())


def _labels(batch: Batch, labels: Tensor) -> list[tuple[str, str]]:
    """Return the causes in the labels (B, T), with what they are."""
    right, trained = batch.targets, labels != IGNORED
    if not bool(trained.any()):
        return []
    found: list[tuple[str, str]] = []
    key = next((key for key, expected in shifts(batch).items() if bool((labels == expected)[trained].all())), None)
    expected = shifts(batch).get(key or "", right)
    if key:
        found.append(cause_of(key))
    elif key is None and bool((labels == right)[:, :-1][trained[:, :-1]].all()):
        found.append(("last-token-in-loss", f"the last position learns token {int(labels[0, -1])}"))
        expected = torch.cat([right[:, :-1], labels[:, -1:]], 1)
    elif key is None:
        return [("labels-wrong", f"{int((labels != right)[trained].sum())} of {int(trained.sum())} positions have another label")]
    missing = ~trained & (expected >= 0)
    if bool(missing[:, -1].all()) and labels.shape[1] > 1:
        found.append(("last-token-missing", "the last position of each row has no label"))
        missing[:, -1] = False
    left = expected[missing]
    if len(left.unique()) == 1 and bool(((expected == left[0]) == missing)[:, :-1].all()):
        found.append(("token-ignored", f"positions with the label {int(left[0])} are not trained on"))
    elif len(left):
        found.append(("tokens-left-out", f"{int(missing.sum())} of {missing.numel()} positions are not trained on"))
    return found


def _weights(reading: LossReading, factor: float) -> list[tuple[str, str]]:
    """Return the causes in the weights of the positions: a factor of all, or weights that differ."""
    trained = reading.labels != IGNORED
    weights = reading.weights[trained] * factor
    if not len(weights):
        return []
    low, high, total, count = float(weights.min()), float(weights.max()), float(weights.sum()), len(weights)
    if high - low > EVEN * abs(high):
        return [("loss-average-wrong", f"positions weigh between {low * count:.4g} and {high * count:.4g}")]
    if abs(total - 1) <= EVEN:
        return []
    parts = len(reading.parts[trained].unique())
    known = average_of(total, averages(count, int(trained.sum(1).max()), parts), EVEN)
    if known is not None and not (factor != 1 and abs(total / factor - 1) <= EVEN):
        return [(id, f"the gradient is that of {known[2]}: {total:.6g} times the mean's") for id in known[1]]
    return [("gradient-scaled", f"the gradient is {total:.6g} times that of the mean loss")]


def padding_causes(batch: Batch, reading: LossReading, factor: float) -> list[Cause]:
    """Return the causes that show where some targets are -100, in a loss that is right elsewhere."""
    ignored, count = batch.targets < 0, batch.count
    weights = reading.weights * factor
    if bool((weights[ignored] != 0).any()):
        return [cause("padding-in-average", "loss", "targets of -100 are trained on", SEEN)]
    low, high = float(weights[~ignored].min()), float(weights[~ignored].max())
    if high - low <= EVEN * high:
        if abs(low * count - 1) <= EVEN:
            return []
        if abs(low * batch.targets.numel() - 1) <= EVEN:
            return [cause("padding-in-average", "loss", "the sum is divided by all targets, ignored ones too", SEEN)]
    words = f"positions weigh between {low * count:.4g} and {high * count:.4g} of the mean's"
    if len(reading.parts[reading.labels != IGNORED].unique()) > 1:
        return [cause(AVERAGED, "loss", f"each part is averaged alone, however many targets it has; {words}", SEEN)]
    return [cause("loss-average-wrong", "loss", words, SEEN)]


def dropout_stage(found: Iterable[float], wanted: float | None) -> Stage:
    """Compare the probabilities of the dropouts that are active in a step with the expected one; None: only report them."""
    stage = Stage()
    said = ", ".join(f"{p:g}" for p in sorted(set(found)))
    if wanted is None and said:
        stage.notes.append(f"read off: dropout of {said} (it was left out of the comparison)")
    elif wanted == 0 and said:
        stage.causes.append(cause("dropout-active", "h.*", f"dropout of {said} is active in the step", "seen in its operators"))
    elif wanted and not said:
        stage.causes.append(cause("dropout-missing", "h.*", f"no dropout is active, not {wanted:g}", "its operators"))
    return stage
