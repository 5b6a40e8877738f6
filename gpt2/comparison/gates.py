"""Judge a comparison by thresholds, such as ``kl>1e-3``: ``--fail-if``."""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

from gpt2.comparison.ranking import Comparisons, Pair
from gpt2.comparison.results import Comparison, Measured
from gpt2.errors import InputError
from gpt2.measure.estimates import Estimate

PASSES = {">": operator.le, ">=": operator.lt, "<": operator.ge, "<=": operator.gt}  # what NaN does not
Figure = float | Estimate | None


class Metric(NamedTuple):
    """What a metric is in words, and where it is read (None: not measured); ``least``: a good model has at least so much."""

    words: str
    read: Callable[[Any], Figure]
    least: bool = False


def _at(path: str) -> Callable[[Any], Figure]:
    """Return what reads a field of a field of a comparison; None where one of them is."""
    return lambda found: reduce(lambda part, name: None if part is None else getattr(part, name), path.split("."), found)


def _beyond(found: Measured) -> Figure:
    if (weights := found.weights) is None:
        return None
    rounded = weights.same_numbers or bool(weights.rounded_to)
    beyond = 0 if rounded else len(weights.beyond) or len(weights.tensors) - len(weights.unchanged)
    return float(beyond + len(found.compatibility.departures))


def _error(found: Measured, *points: str) -> Figure:
    """Return the largest relative error of the traced points, or of some of them."""
    traced = found.activations.points if found.activations else ()
    errors = [each.error for each in traced if each.point in points or not points]
    return None if not errors else math.nan if any(map(math.isnan, errors)) else max(errors)


METRICS = {
    "kl": Metric("mean KL(a‖b) in nats", _at("distributions.kl_ab.mean")),
    "kl_max": Metric("largest KL(a‖b) of a token, in nats", _at("distributions.kl_ab.max")),
    "js": Metric("mean Jensen-Shannon divergence in nats", _at("distributions.js.mean")),
    "same_top": Metric("fraction of tokens with the same first choice", _at("distributions.same_top"), least=True),
    "perplexity_ratio": Metric("perplexity of b over that of a", _at("distributions.ratio")),
    "weights": Metric("norm of the weights' change over their norm", _at("moved")),
    "beyond_rounding": Metric("number of tensors of b that are not a's, rounded to one type, and of other settings", _beyond),
    "activation": Metric("largest relative error of a traced point", _error),
    "exact_match": Metric("fraction of the --cases that b has right", _at("cases.right_b"), least=True),
    "contains": Metric("fraction of the --cases where b's answer holds the expected text", _at("cases.contains_b"), least=True),
    "lost_cases": Metric("number of the --cases that a has right and b wrong", _at("cases.lost")),
    "answer_ratio": Metric("probability of an expected text under b over that under a", _at("cases.likelier"), least=True),
    "logit": Metric("relative error of the logits on the traced tokens", lambda found: _error(found, "logits")),
}


@dataclass(frozen=True)
class Gate:
    """A condition under which a build fails: ``metric`` ``op`` ``threshold``."""

    metric: str
    op: str
    threshold: float

    @classmethod
    def parse(cls, text: str) -> "Gate":
        """Read ``METRIC OP NUMBER``, such as ``kl>1e-3``; raises InputError, with the metrics and operators that exist."""
        parts = re.fullmatch(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
        if parts is None:
            raise InputError(f"--fail-if {text!r}: is not METRIC OP NUMBER; write it as in 'kl>1e-3' or 'same_top<0.98', quoted")
        metric, op, number = parts.groups()
        if metric not in METRICS:
            raise InputError(f"--fail-if {text!r}: there is no metric {metric!r}; use one of {', '.join(METRICS)}")
        threshold = math.nan
        with suppress(ValueError):
            threshold = float(number)
        if not math.isfinite(threshold):
            raise InputError(f"--fail-if {text!r}: {number!r} is no finite number; write one such as 1e-3 or 0.98")
        return cls(metric, op, threshold)

    def __str__(self) -> str:
        return f"{self.metric}{self.op}{self.threshold:g}"

    def judge(self, found: Measured) -> "Judgement":
        """Apply the condition; raises InputError if the metric was not measured of two models, or of one of several."""
        if (measured := METRICS[self.metric].read(found)) is None:
            of, instead = "", "; gate on another metric"
            if isinstance(found, Pair):
                of, instead = f" of {found.model.name}", "; compare two models for it"
            why = "; ".join(dict.fromkeys(found.compatibility.impossible.values())) or "this comparison has no such part"
            raise InputError(f"--fail-if {self}: {self.metric}{of} was not measured ({why}){instead}")
        interval = measured if isinstance(measured, Estimate) else Estimate(*[float(measured)] * 3)
        judged = (interval.high if self.op in (">", ">=") else interval.low) if interval.known else interval.value
        return Judgement(self, interval, judged, not PASSES[self.op](judged, self.threshold))


@dataclass(frozen=True)
class Judgement:
    """Whether a gate's condition is met; ``judged`` is the figure that was held against the threshold.

    That is the far end of its 95 % interval: the upper one for ``>``, the lower one for ``<``. NaN meets every condition.
    """

    gate: Gate
    measured: Estimate
    judged: float
    met: bool

    def __str__(self) -> str:
        interval = f" (95 % interval {span})" if (span := self.measured.span(".4g")) else ""
        interval = interval if self.measured.known else " (a single value has no interval)"
        words = f"{self.gate}: {METRICS[self.gate.metric].words} is {self.measured.value:.4g}{interval}"
        return f"{words}, {self._distance()}" if self.met else f"{words}, within the limit"

    verdict = property(lambda self: f"{'failed' if self.met else 'passed'}: {self}")

    def _distance(self) -> str:
        if math.isnan(self.judged):
            return "a figure that passes no limit"
        more = {"same_top": "--tokens", "exact_match": "cases"}.get(self.gate.metric)
        if more and self.measured.value == 1 and self.judged < self.gate.threshold < 1:  # Wilson's interval of n of n
            enough = math.ceil(1.96**2 * self.gate.threshold / (1 - self.gate.threshold)) + 2
            return f"but of too few to tell: {more} {enough} that all agree would pass"
        end = "which" if self.judged == self.measured.value else f"whose far end {self.judged:.4g}"
        past = abs(self.judged - self.gate.threshold)
        return f"{end} is {past:.2g} past the limit" if past else f"{end} is the limit itself"


Judged = Mapping[str, Sequence[Judgement]]  # "" of two models, "A, model and B, other" of several -> what its gates say


def judge(result: Comparison | Comparisons, gates: Sequence[Gate]) -> tuple[Comparison | Comparisons, Judged]:
    """Return the result with its gates judged, and the judgements; raises InputError as :meth:`Gate.judge` does."""
    if isinstance(result, Comparison):
        of_two = tuple(gate.judge(result) for gate in gates)
        return replace(result, gates=of_two), {"": of_two}
    first, *others = (f"{letter}, {each.model.name}" for letter, each in zip(result.letters, result.candidates, strict=True))
    of_each = tuple(tuple(gate.judge(each) for gate in gates) for each in result.candidates[1:])
    return replace(result, gates=of_each), dict(zip((f"{first} and {other}: " for other in others), of_each, strict=True))
