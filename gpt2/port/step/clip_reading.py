"""Read from a dump's gradients, before and after clipping, how they were clipped."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch import Tensor

from gpt2.port.step.clipping import LIMITS, NORMS, Clip, ClipKind, ClipReading, Norms
from gpt2.port.step.gradient_comparison import multiples
from gpt2.port.step.gradients import role_of
from gpt2.port.step.layouts import Weights


def norms_of(gradients: Sequence[Mapping[str, Tensor]], stacks: Collection[Sequence[str]] = ()) -> Norms:
    """Return the norms of K whole gradients; ``stacks``: the parameters that are one array of the dump."""
    own = {n: np.array([float(one[n].norm()) for one in gradients]) for n in gradients[0] if all(n in one for one in gradients)}
    one = np.array([sum(float(g[n].abs().sum()) for n in own) for g in gradients])
    largest = np.array([max((float(g[n].abs().max()) for n in own), default=0.0) for g in gradients])
    two = np.sqrt(sum((v**2 for v in own.values()), np.zeros(len(gradients))))
    stack = dict(own) if stacks else {}
    for names in stacks:
        known = [n for n in names if n in own]
        stack |= dict.fromkeys(known, np.sqrt(sum((own[n] ** 2 for n in known), np.zeros(len(gradients)))))
    large = [norm**2 for n, norm in own.items() if role_of(n) in ("matrix", "embedding")]
    matrices = np.sqrt(sum(large, np.zeros(len(gradients))))
    whole = {ClipKind.NORM: two, ClipKind.SUM: one, ClipKind.LARGEST: largest}
    return Norms(whole | {ClipKind.SQUARES: two**2, ClipKind.MATRICES: matrices}, own, stack)


def dumped_clip(raw: Sequence[Weights], used: Sequence[Weights], wanted: float | None) -> ClipReading:
    """Compare the gradients after clipping, ``used``, with those before, step by step; ``wanted``: the norm to clip to."""
    ratios = [multiples(after, before) for before, after in zip(raw, used, strict=True)]
    of_raw = norms_of(raw)
    norms, own = of_raw.whole, of_raw.own
    reading = ClipReading(largest=float(norms[ClipKind.NORM].max()))
    extremes = [(min(one.values()), max(one.values())) for one in ratios if one]
    spread = max((most / least if least > 0 else math.inf for least, most in extremes), default=1.0)
    cut = max(range(len(raw)), key=lambda step: norms[ClipKind.NORM][step])
    parallel = all(
        float((used[cut][n] - f * raw[cut][n]).norm()) <= 1e-3 * float(used[cut][n].norm()) for n, f in ratios[cut].items()
    )
    if not parallel:
        limit = max(float(g.abs().max()) for g in used[cut].values())
        reading.clip = Clip(ClipKind.ENTRY, limit)
    elif spread > 1.001:
        bounds = [f * own[n][step] for step, one in enumerate(ratios) for n, f in one.items() if f < 0.999 and n in own]
        if not bounds:  # some are larger after than before
            reading.odd = ("the gradient",)
            return reading
        reading.clip = Clip(ClipKind.PARAMETER, float(np.median(bounds)))
    elif min(ratios[cut].values(), default=1.0) < 0.9999:
        factor = float(np.median(list(ratios[cut].values())))
        likely = [Clip(kind, factor * float(norms[kind][cut])) for kind in NORMS]
        meant = (wanted,) if wanted else LIMITS
        usual = (clip for clip in likely if any(abs(clip.limit / one - 1) < 1e-3 for one in meant))
        reading.clip = next(usual, likely[0])
    return reading
