"""Find overfitting in the lines of a run's metrics."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

MARGIN = 0.02  # nats per token


def overfitting(rows: Sequence[Mapping[str, Any]], best_step: int) -> str:
    """Return a warning if the held-out loss is :data:`MARGIN` above its best, and the training loss lower than then; else ""."""
    evaluated = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    steps = [step for step, _ in evaluated]
    if len(steps) < 2 or best_step not in steps[1:-1]:
        return ""
    best = steps.index(best_step)
    val, best_val = evaluated[-1][1], evaluated[best][1]
    now, then = (
        [row["loss"] for row in rows if "loss" in row and first < row["step"] <= last]
        for first, last in ((steps[-2], steps[-1]), (steps[best - 1], steps[best]))
    )
    if val <= best_val + MARGIN or not now or not then or fmean(now) >= fmean(then):
        return ""
    return (
        f"overfitting: since step {best_step} the training loss fell from {fmean(then):.4f} to {fmean(now):.4f} "
        f"and the held-out loss rose from {best_val:.4f} to {val:.4f}"
    )
