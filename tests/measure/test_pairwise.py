"""KL of all pairs of models: the same figures as of one pair measured alone."""

from __future__ import annotations

import math

import torch

from gpt2.measure.pairwise import pairwise
from gpt2.measure.per_token import measure_rows


def test_all_pairs_are_what_each_pair_is_alone() -> None:
    """A swapped row and column gives KL in the other direction; other sums than those of one pair make two reports differ."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(40, 3001, generator=generator) * 3
    models = [a, a + 0.01 * torch.randn(a.shape, generator=generator), a.bfloat16(), a.clone()]
    models[1][3, 5], models[2][4, 6], models[1][7, 8] = -math.inf, -math.inf, math.nan
    found, targets = pairwise(models), torch.arange(40)
    assert torch.equal(found.kl[:, 0, 3], torch.zeros(40, dtype=torch.float64))
    for i, x in enumerate(models):
        for j, y in enumerate(models):
            logp, _, kl, *_ = measure_rows(x, y, targets, 1)
            torch.testing.assert_close(found.kl[:, i, j], kl, rtol=1e-9, atol=1e-14, equal_nan=True)
        right = x.gather(1, targets[:, None])[:, 0].double() - found.log_sums[:, i]
        torch.testing.assert_close(right, logp, rtol=0, atol=1e-12, equal_nan=True)
    assert (found.kl[:, 1, 2] != found.kl[:, 2, 1]).any()
