"""Compare gradients of a dump with expected ones, up to the rounding of computing and storing them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from gpt2.port.dump.tolerance import UNITS
from gpt2.port.step.gradients import TABLE
from gpt2.port.step.layouts import Weights
from gpt2.port.step.predictions import Predictor
from gpt2.port.step.recognition import Recorded
from gpt2.port.step.settings import Settings
from gpt2.port.step.trained import Places


@dataclass(frozen=True)
class Compared:
    """What was ``recorded``, and what it is compared with; ``allowed``: the rounding of the first step's gradients."""

    recorded: Recorded
    predictor: Predictor
    settings: Settings
    places: Places
    allowed: Mapping[str, float]


class Comparison:
    """Which gradients are the expected ones.

    ``allowed``: each parameter's absolute error of computing its gradient. ``inexact``: the relative error of gradients at
    parameters that the dump has rounded. ``unit`` and ``smallest``: the relative and absolute rounding of ``dtypes``.
    """

    def __init__(self, allowed: Mapping[str, float], dtypes: Iterable[torch.dtype]) -> None:
        units = [UNITS[dtype] for dtype in dtypes] or [(0.0, 0.0)]
        self.allowed, self.inexact = allowed, 0.0
        self.unit, self.smallest = max(unit for unit, _ in units), max(least for _, least in units)

    def same(self, name: str, got: Tensor, expected: Tensor, factor: float = 1.0) -> bool:
        """Whether a gradient is ``factor`` times the expected one, up to the rounding of computing and storing it."""
        apart = float((got - factor * expected).square().mean().sqrt())
        size = float(expected.square().mean().sqrt()) * abs(factor)
        return apart <= abs(factor) * self.allowed[name] + (self.unit + self.inexact) * size + self.smallest

    def matched(self, got: Weights, right: Mapping[str, Tensor]) -> tuple[float, list[str]]:
        """Return the factor that explains most gradients, and the names of those that it does not."""
        factors = list(multiples(got, right).values())
        best: tuple[float, list[str]] = (1.0, list(got))
        for factor in [1.0, *sorted(factors, key=lambda f: abs(f - median(factors)))[:8]] if factors else []:
            wrong = [name for name, g in got.items() if not self.same(name, g, right[name], factor)]
            if len(wrong) < len(best[1]):
                best = factor, wrong
        return best

    def mostly_same(self, got: Weights, expected: Mapping[str, Tensor]) -> bool:
        """Whether more than half of the gradients are the expected ones."""
        return sum(self.same(n, g, expected[n]) for n, g in got.items()) > len(got) / 2


def multiples(got: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    """Return by parameter what brings the right gradient nearest; without those whose right gradient is zero or unknown."""
    known = ((n, g, right[n]) for n, g in got.items() if n in right and float(right[n].norm()) > 0)
    return {n: float((g * r).sum() / (r**2).sum()) for n, g, r in known}


def total_norm(gradient: Mapping[str, Tensor]) -> float:
    """Return the norm of all gradients together."""
    return math.hypot(*(float(g.norm()) for g in gradient.values()))


def combined(got: Mapping[str, Tensor], basis: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """Return the coefficients of ``basis`` that give most of ``got``, fitted on all parameters but the token embedding."""
    names = [n for n in got if n != TABLE] or list(got)
    gram = torch.tensor([[sum(float((a[n] * b[n]).sum()) for n in names) for b in basis] for a in basis], dtype=torch.float64)

    def solved(target: Mapping[str, Tensor]) -> Tensor:
        right = torch.tensor([sum(float((a[n] * target[n]).sum()) for n in names) for a in basis], dtype=torch.float64)
        return torch.linalg.lstsq(gram, right[:, None]).solution[:, 0]

    shares = torch.zeros(len(basis), dtype=torch.float64)
    left = {n: got[n] for n in names}
    for _ in range(2):  # the second time removes what the normal equations have rounded
        shares = shares + solved(left)
        left = {n: got[n] - sum(float(s) * one[n] for s, one in zip(shares, basis, strict=True)) for n in names}
    found: list[float] = shares.tolist()
    return found
