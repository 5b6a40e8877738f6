"""Find the least value of a function of one number, which falls and then rises, by the golden section."""

from __future__ import annotations

import math
from collections.abc import Callable

RATIO = (math.sqrt(5) - 1) / 2


def least(function: Callable[[float], float], low: float, high: float, steps: int) -> tuple[float, float]:
    """Return the least value between ``low`` and ``high``, and where it is.

    The function is called once for each of ``steps``, which shorten the range to 0.618 of it, and twice before them.
    """
    left, right = high - RATIO * (high - low), low + RATIO * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(steps):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - RATIO * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + RATIO * (high - low)
            at_right = function(right)
    return min((at_left, left), (at_right, right))
