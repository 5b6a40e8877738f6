"""The result of ``bounds.py``: bounds of KL between two distributions of which one shows only its likeliest tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpt2.measure.estimates import Estimate


@dataclass(frozen=True)
class Finding:
    """``id`` is stable; ``evidence`` is what was measured."""

    id: str
    evidence: str


@dataclass(frozen=True)
class Bounds:
    """What is known of two distributions of which one is shown in part, over ``tokens`` places; nats.

    ``kl_low`` and ``kl_high`` bound the mean KL(a||b); each has its own 95 % interval. ``assumed`` says whether the upper bound
    needs the assumption of :mod:`gpt2.comparison.bounds`. ``shown`` is the mean probability of the shown tokens, ``top`` how many
    they are at most. ``ratio`` is b's perplexity over a's on the places whose token was shown.
    """

    kl_low: Estimate
    kl_high: Estimate
    assumed: bool
    same_top: Estimate
    ratio: Estimate
    shown: float
    top: int
    tokens: int
    not_finite: int  # further places that were shown, and whose KL is infinite or NaN
    sent: int  # tokens sent to a server
    findings: tuple[Finding, ...]

    @property
    def kl(self) -> Estimate:
        """Everything that KL(a||b) may be: from the lower bound's interval to the upper bound's; NaN if a place's is."""
        if self.not_finite:
            return Estimate(math.nan, math.nan, math.nan)
        return Estimate(self.kl_low.value, self.kl_low.low, self.kl_high.high)
