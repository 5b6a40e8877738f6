"""The gradients that belong to a dump's changes: its own, or those of our model at its parameters where it has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from gpt2.port.step.gradients import TABLE, Gradients
from gpt2.port.step.layouts import Weights
from gpt2.port.step.predictions import Predictor
from gpt2.port.step.recognition import Recorded


def own_gradients(recorded: Recorded) -> list[Weights] | None:
    """Return the dump's own gradients of all steps, after clipping where it has them; None if it lacks some."""
    for sets in (recorded.used, recorded.raw):
        if len(sets) == recorded.steps and all(len(one) > len(recorded.parameters[0]) / 2 for one in sets):
            return sets
    return None


def predicted_gradients(recorded: Recorded, predictor: Predictor, label: str, smoothing: float, factor: float) -> list[Gradients]:
    """Return gradients at the dump's own parameters, with these labels; none if it lacks parameters between the steps."""
    made = []
    for step, weights in enumerate(recorded.parameters[:-1]):
        if weights.keys() != recorded.parameters[0].keys():
            return []
        batch = predictor.batch(step)
        labels = predictor.labelings(step).get(label, batch.targets)
        made.append(predictor.gradients(weights, batch.ids, labels, smoothing=smoothing, factor=factor))
    return made


def label_of_change(recorded: Recorded, predictor: Predictor, names: Sequence[str], allowed: Mapping[str, float]) -> str:
    """Return the labels with whose gradient the first change agrees best: the share of entries that move against it."""
    first, second = recorded.parameters[:2]

    def agreement(name: str, gradient: Tensor) -> float:
        change, clear = second[name] - first[name], gradient.abs() > 100 * allowed[name]
        return float((change[clear].sign() == -gradient[clear].sign()).double().mean()) if bool(clear.any()) else 0.0

    matrices = [n for n in names if first[n].ndim == 2 and n != TABLE] or names
    best = ("", -1.0)
    for label, labels in predictor.labelings(0).items():
        made = predictor.gradients(first, predictor.batch(0).ids, labels).whole
        mean = float(np.mean([agreement(n, made[n]) for n in matrices]))
        if mean > best[1] + 0.01:
            best = label, mean
        if not predictor.can_try:
            break
    return best[0]
