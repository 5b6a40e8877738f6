"""What verify has found so far: points, check by check, in the order of the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from gpt2.measure.environment import dtype_label
from gpt2.measure.metrics import FLOAT64_BOUND, Progress, silent
from gpt2.measure.rounding import FORWARD_RATIO, TRAINING_RATIO, root_mean_square
from gpt2.parity.report import EXACT, MAPPING, ROUNDING, Check, Point

# Every check, in the order of the report: its kind, title, and whether it belongs to training, which ``quick`` leaves out.
PLAN = {
    "weights": (EXACT, "bits of {n} tensors", False),
    "adapter": (MAPPING, "{n} merged matrices", False),
    "activations": (MAPPING, "{n} points", False),
    "logits": (MAPPING, "whole contexts", False),
    "cache": (MAPPING, "read in three parts", False),
    "padding": (MAPPING, "three rows", False),
    "rounding": (ROUNDING, "{n} points", False),
    "text": (EXACT, "a greedy text", False),
    "loss": (MAPPING, "every token", True),
    "gradients": (MAPPING, "every parameter", True),
    "adamw": (MAPPING, "change by 2 steps", True),
    "loss-rounding": (ROUNDING, "every token", True),
    "gradients-rounding": (ROUNDING, "every parameter", True),
    "adamw-rounding": (ROUNDING, "change by 2 steps", True),
    "tokens": (EXACT, "{n} texts and back", False),
}


class DifferenceFound(Exception):
    """A point does not hold, and the run is to stop there."""


@dataclass
class Findings:
    """The points found so far. ``watch`` is called after every step; without ``keep_going`` a difference ends the run."""

    dtype: torch.dtype
    quick: bool = False
    keep_going: bool = False
    progress: Progress = silent
    watch: Callable[[], None] = lambda: None
    points: dict[str, list[Point]] = field(default_factory=lambda: {id: [] for id in PLAN})
    skipped: dict[str, str] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.quick:
            self.skipped = {id: "quick" for id, (_, _, training) in PLAN.items() if training}

    def exact(self, id: str, name: str, differing: float) -> None:
        """Add a count of entries that differ; none may."""
        self.points[id].append(Point(name, float(differing), 0.0))

    def mapping(self, id: str, name: str, error: float) -> None:
        """Add a relative error in float64; only rounding is allowed."""
        self.points[id].append(Point(name, error, FLOAT64_BOUND))

    def rounding(self, id: str, name: str, errors: Sequence[float], noise: Sequence[float]) -> None:
        """Add :func:`errors_of_both` in the same dtype, against the float64 run, and the errors of noisy runs."""
        (ours, theirs, apart), explained = errors, root_mean_square(noise)
        ratio = TRAINING_RATIO if PLAN[id][2] else FORWARD_RATIO
        self.points[id].append(Point(name, ours, ratio * explained, explained, theirs, apart))

    def only_rounding(self, before: dict[str, int]) -> bool:
        """Whether nothing but what random errors bound does not hold, of the points behind those that were there ``before``."""
        since = [(id, point) for id, points in self.points.items() for point in points[before[id] :]]
        doubtful = [(id, p) for id, p in since if not p.ok or p.of_the_machine or (p.imprecise and id == "rounding")]
        return bool(doubtful) and all(id == "text" or point.explained is not None for id, point in doubtful)

    def settle(self, *finished: str) -> None:
        """End a step, and the checks that it ``finished``. Raises DifferenceFound: a point does not hold."""
        self.finished.update(finished)
        self.watch()
        if not self.keep_going and any(not point.ok for points in self.points.values() for point in points):
            raise DifferenceFound

    def checks(self, why_unfinished: str = "") -> tuple[Check, ...]:
        """Return every check; those that did not finish say why."""
        checks, dtypes = [], {EXACT: "", MAPPING: "float64", ROUNDING: dtype_label(self.dtype)}
        for id, (kind, title, _) in PLAN.items():
            points, skipped = tuple(self.points[id]), self.skipped.get(id, "")
            if id not in self.finished and not skipped:
                skipped = why_unfinished
            if id == "adapter" and not points:
                continue
            dtype = "stored" if id == "weights" else dtypes[kind]
            title = "a short text" if self.quick and id == "logits" else title.format(n=len(points))
            checks.append(Check(id, kind, title, dtype, points, skipped))
        return tuple(checks)
