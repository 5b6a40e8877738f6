"""Which step a dumped gradient belongs to, and whether a second set of gradients is the first one after clipping."""

from __future__ import annotations

import itertools
import math

from torch import Tensor

from gpt2.port.step_dump.layouts import Weights

MAX_STEPS = 5  # whose gradients are put in order


def with_sums(options: list[list[Weights]]) -> list[list[Weights]]:
    """Return by step the gradients, and their sums with all before them, as they are without zeroing."""
    found = []
    total: Weights = {}
    for ways in options:
        total = {name: g + total[name] if total else g for name, g in ways[-1].items()}
        found.append([*ways, total])
    return found


def assigned(likeness: list[list[float]], steps: int) -> list[int]:
    """Return the step of each array: all different where there are as many arrays as steps."""
    if steps and len(likeness) == steps and steps <= MAX_STEPS:
        orders = itertools.permutations(range(steps))
        return list(max(orders, key=lambda order: sum(row[at] for row, at in zip(likeness, order, strict=True))))
    return [max(range(steps), key=lambda step: row[step]) for row in likeness]


def is_clipped(raw: list[Weights], used: list[Weights]) -> bool:
    """Whether the second gradients are the first ones after clipping, not Adam's first moments.

    The moments of the first step are a tenth of its gradient (after clipping); later ones have another direction.
    """
    if not used or len(used[0]) < len(raw[0]) / 2 or not used[0]:
        return False
    shares = [[_along(one[n], r[n]) for n in one if n in r] for r, one in zip(raw, used, strict=True)]
    parallel = [bool(each) and sum(share > 1 - 1e-4 for share in each) > len(each) / 2 for each in shares]
    if parallel[0] and not all(parallel):
        return False
    norms = [math.hypot(*(float(g.norm()) for g in sets[0].values())) for sets in (raw, used)]
    return not any(abs(norms[1] / (share * limit) - 1) < 2e-3 for share in (0.1, 0.05) for limit in (norms[0], 1.0))


def _along(one: Tensor, other: Tensor) -> float:
    return cosine(one.reshape(-1), other.reshape(-1))


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of two flat tensors; 0 if one of them is zero."""
    size = float(one.norm() * other.norm())
    return float(one @ other) / size if size > 0 else 0.0
