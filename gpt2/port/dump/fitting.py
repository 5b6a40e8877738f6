"""Fit the factor of attention's scores, where no known one gives a program's values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gpt2.config import GPT2Config
from gpt2.port.deadline import Deadline
from gpt2.port.diagnosis.hypotheses import right_scale, scale_faults
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.sieve import Lens
from gpt2.port.dump.simulation import Program, Simulation, Stages
from gpt2.port.dump.variants import Variant
from gpt2.port.golden_section import least

RANGE = 32.0  # a factor between the right one over this, and the right one times this
GRID, STEPS = 24, 48  # factors that are tried first, and steps of the search around the best of them
DIGITS = 3  # of a factor that a program multiplies the right one with
NEAR = 1e-4  # how far a fitted factor may be from such a short number


def scaled(config: GPT2Config, layer: int, times: float) -> Variant:
    """Return the variant whose scores are multiplied by ``times`` what GPT-2 multiplies them with; the words are of ``layer``."""

    def replaced(simulation: Simulation, layer: int) -> Stages:
        factor = times * right_scale(config, layer)
        return {"attn.scores": lambda s: simulation.scores(s, layer, factor=factor)}

    shown = layer if config.scale_attn_by_inverse_layer_idx else 0  # a fitted factor has nothing to do with the layer
    return Variant.of(f"scale times {times:.6g}", scale_faults(config, shown, times * right_scale(config, shown)), replaced)


def fitted_scales(lens: Lens, blocks: Sequence[int], deadline: Deadline) -> Iterator[Candidate]:
    """Yield the factor of the scores in all ``blocks`` that comes nearest: as a short number if it is near one, and as fitted.

    Behind the deadline, it is the nearest of those that were tried.
    """

    def candidate(times: float) -> Candidate:
        variant = scaled(lens.simulation.config, blocks[0], times)
        return Candidate(tuple((variant, n) for n in blocks))

    def errors(logarithms: list[float]) -> list[float]:
        programs = [candidate(math.exp(one)).program(lens.simulation) or Program() for one in logarithms]
        near = lens.nearness(programs, deadline)
        return [near[number].log if number in near else math.inf for number in range(len(programs))]

    step = 2 * math.log(RANGE) / (GRID - 1)
    grid = [-math.log(RANGE) + number * step for number in range(GRID)]
    tried = errors(grid)
    best = grid[tried.index(min(tried))]
    times = math.exp(least(lambda one: errors([one])[0], best - step, best + step, STEPS)[1])
    short = float(f"{times:.{DIGITS}g}")
    if math.isclose(times, short, rel_tol=NEAR):
        yield candidate(short)
    yield candidate(times)
