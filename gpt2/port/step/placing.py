"""Which parameters and which step a dumped gradient belongs to, and whether a second set is the first one after clipping."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gpt2.port.step.layouts import View, Weights

MAX_STEPS = 5  # whose gradients are put in order


@dataclass
class Piece:
    """An array in one view; ``units`` are its keys."""

    name: str
    view: View
    kind: str  # "parameter", "gradient"
    score: float
    label: str = ""  # of the predicted gradient that is most like it
    size: float = 1.0  # its norm over that of this gradient

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(self.view)


def shared_out(candidates: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Return one piece for each array, so that parameters of one shape get equally many: the most alike first."""
    arrays: Counter[int] = Counter()
    units: dict[int, set[frozenset[str]]] = {}
    for group in candidates:
        size = sum(tensor.numel() for tensor in group[0].view.values())
        arrays[size] += 1
        units.setdefault(size, set()).update(frozenset(piece.units) for piece in group)
    room: dict[frozenset[str], int] = {}
    # how many gradients of one parameter the dump may hold: of each step, before and after clipping
    each = max((math.ceil(arrays[size] / len(own)) for size, own in units.items()), default=0)
    for own in units.values():
        room |= dict.fromkeys(own, each)
    given: dict[int, Piece] = {}
    order = sorted(
        ((piece.score, number, piece) for number, group in enumerate(candidates) for piece in group), key=lambda one: -one[0]
    )
    for _, number, piece in order:
        if number not in given and room[frozenset(piece.units)] > 0:
            given[number] = piece
            room[frozenset(piece.units)] -= 1
    return [given[number] for number in sorted(given)]


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
