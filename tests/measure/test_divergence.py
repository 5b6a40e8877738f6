"""KL in float32: what arithmetic with 40 digits gives, for tiny and large divergences, and for logits that are no numbers."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor

from gpt2.measure.divergence import divergences, log_sums
from gpt2.measure.per_token import measure_rows

VOCAB = 400
SPREADS = {"flat": 0.8, "steep": 3.0, "steeper": 12.0}


def _exact(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return KL(a||b) and the log of the sums' ratio of logits (V,), to 40 digits."""
    with mpmath.workdps(40):
        x, z = ([mpmath.mpf(value) for value in each.tolist()] for each in (a, b))
        sums = [mpmath.log(mpmath.fsum(map(mpmath.exp, each))) for each in (x, z)]
        kl = mpmath.fsum(mpmath.exp(p - sums[0]) * ((p - sums[0]) - (q - sums[1])) for p, q in zip(x, z, strict=True))
        return float(kl), float(sums[1] - sums[0])


def _logits() -> list[tuple[str, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    cases = []
    for name, spread in SPREADS.items():
        a = torch.randn(VOCAB, generator=generator) * spread
        noise = torch.randn(VOCAB, generator=generator)
        cases += [(f"{name}, moved by {by:g}", a, a + noise * by) for by in (1e-6, 1e-4, 1e-2, 0.3, 1, 5)]
        cases += [(f"{name}, as log-probabilities, moved by {by:g}", a, (a + noise * by).log_softmax(0)) for by in (1e-6, 1e-3)]
        rare = a.clone()
        rare[a.argmin()] += 3  # far, and hardly seen: differences of exp(y) and y are rounded where y is small
        cases.append((f"{name}, a rare token moved", a, rare + noise * 1e-4))
        cases.append((f"{name}, away from 0", a - 100, a - 100 + noise * 1e-3))
    hidden = torch.zeros(VOCAB)
    hidden[7] = -110  # its exponential is 0 in float32
    shown = hidden.clone()
    shown[7] = -20
    return [*cases, ("a token of probability e^-110", hidden, shown)]


def test_every_divergence_is_that_of_forty_digits() -> None:
    """In float32 a sum of p (x - y) cancels to nothing but rounding: single tokens were wrong by half at a mean KL of 3e-7."""
    naive = 0.0
    for name, a, b in _logits():
        kl, ratio = _exact(a, b)
        found = divergences(a[None], [b[None]])
        assert abs(found.kl.item() - kl) <= 1e-15 + 3e-6 * kl, name
        assert abs(found.log_ratio.item() - ratio) <= 1e-14 + 1e-6 * max(math.sqrt(kl), kl), name
        p, q = a.log_softmax(0), b.log_softmax(0)
        naive = max(naive, abs(float((p.exp() * (p - q)).sum()) / kl - 1))
    assert naive > 0.1


def test_all_others_at_once_are_what_each_pair_is_alone() -> None:
    """Rows that were computed again, in float64, fell on another model or row."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(12, 701, generator=generator) * 3
    models = [a, a + 0.01 * torch.randn(a.shape, generator=generator), a.bfloat16(), a.clone(), a.double()]
    models[1][3, 5], models[2][4, 6], models[1][7, 8], models[0][9], models[3][9] = -math.inf, -math.inf, math.nan, 700.0, 700.0
    for i, one in enumerate(models):
        sums, first = log_sums(one)
        found = divergences(one, models)
        assert torch.equal(found.kl[:, i].nan_to_num(), torch.zeros(12, dtype=torch.float64))
        for j, other in enumerate(models):
            logp, logp_other, kl, _, _, top, top_other, *_ = measure_rows(one, other, torch.zeros(12, dtype=torch.long), 1)
            torch.testing.assert_close(found.kl[:, j], kl, rtol=3e-6, atol=1e-15, equal_nan=True)
            valid = ~kl.isnan()
            right = other[:, 0].double() - sums - found.log_ratio[:, j]
            torch.testing.assert_close(right[valid], logp_other[valid], rtol=0, atol=1e-8)
            assert torch.equal(found.top[valid, j], top_other[valid, 0])
            assert torch.equal(first[valid], top[valid, 0])
        torch.testing.assert_close(one[:, 0].double() - sums, logp, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_logits_have_no_divergence(dtype: torch.dtype) -> None:
    """Two models that agree to the last bit were 1e-17 apart, so no gate of 0 could pass."""
    a = torch.randn(9, 999, dtype=dtype) * 5
    a[2, 3:] = -math.inf
    found = divergences(a, [a.clone()])
    assert not found.kl.any()
    assert not found.log_ratio.any()
