"""Fit one number, a factor of the scores or the epsilon of the norms, where no known one gives a program's values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gpt2.port.alternative import Alternative, Changed
from gpt2.port.alternatives.attention import scale_faults
from gpt2.port.alternatives.moments import OWN, WAYS, every_reading
from gpt2.port.alternatives.norms import in_norms, moved, of_moments
from gpt2.port.deadline import Deadline
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.evaluate import Evaluator
from gpt2.port.dump.lenses import Lens
from gpt2.port.golden_section import least
from gpt2.port.graph import Program, right_scale

POINTS, STEPS = 16, 45  # numbers that are tried first, and steps that refine the best
DIGITS = 3  # of a number that a program has


def fitted(lens: Lens, blocks: Sequence[int], deadline: Deadline) -> Iterator[Candidate]:
    """Yield the nearest program with a fitted factor of the scores in all ``blocks``, and with a fitted epsilon of all norms.

    Each as a short number, and as fitted.
    """
    config, layer = lens.model.config, lens.span.first
    own = every_reading((*lens.model.ids.shape, config.n_embd), config.n_head)[OWN]

    def scaled(factor: float) -> Alternative:
        times = factor / right_scale(config, layer)
        faults = scale_faults(config, layer, factor)
        id, words = (faults[0].id, faults[0].detail) if faults else ("scale-wrong", "the scores have another factor")
        return Alternative(id, words, {"attn.scores": Changed("attn.scores", lambda c, y: times * y)}, key=f"{times:.6g}")

    def with_epsilon(eps: float) -> Alternative:
        return next(in_norms(moved(OWN, WAYS[0], eps, config.layer_norm_epsilon), of_moments(own, WAYS[0], eps)))

    for make, low, high in ((scaled, 1e-3, 30.0), (with_epsilon, 1e-7, 3.0)):
        value = _nearest(lens, partial(_everywhere, make, blocks), (low, high), deadline)
        for one in dict.fromkeys((float(f"{value:.{DIGITS}g}"), value)):
            yield _everywhere(make, blocks, one)


def _everywhere(make: Callable[[float], Alternative], blocks: Sequence[int], value: float) -> Candidate:
    one = make(value)
    return Candidate((*((one, n) for n in blocks), *[(one, None)] * bool(one.outside)))


def _nearest(lens: Lens, make: Callable[[float], Candidate], limits: tuple[float, float], deadline: Deadline) -> float:
    """Return the number between two limits with which a program comes nearest to the values."""

    def errors(*logs: float) -> list[float]:
        programs = [make(math.exp(log)).program or Program() for log in logs]
        near = Evaluator(lens, programs, deadline).nearness()
        return [near[number].log if number in near else math.inf for number in range(len(logs))]

    low, high = map(math.log, limits)
    step = (high - low) / (POINTS - 1)
    tried = errors(*(low + step * number for number in range(POINTS)))
    middle = low + step * min(range(POINTS), key=tried.__getitem__)
    return math.exp(least(lambda log: errors(log)[0], middle - step, middle + step, STEPS)[1])
