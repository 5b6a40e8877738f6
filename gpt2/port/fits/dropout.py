"""Read off a value that some of its entries are zero at random, as dropout makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2.port.fits.observed import Fit, Observed, nice
from gpt2.port.terms.causes import Cause

CLEAR = 10.0  # times the rounding: entries that are surely not zero
LEAST = 40  # entries that show a share
MOST = 0.6  # the largest share of zeros that is dropout


def dropped(seen: Observed, rows: Tensor, part: str) -> Fit | None:
    """Return the fit of GPT-2's value with entries that are zero at random, and a factor for the others."""
    value, right = seen.value, seen.right
    at = (rows[..., None] if value.ndim == 3 else rows[:, None, :, None]).expand_as(value)
    loose = seen.slack + seen.bound * right.square().mean().sqrt()
    clear = at & (right.abs() > CLEAR * loose) & (right.abs() > CLEAR * seen.bound * right.abs().max())
    zero, count = clear & (value.abs() <= loose), int(clear.sum())
    kept, share = clear & ~zero, int(zero.sum()) / max(count, 1)
    if count < LEAST or not 0.01 < share < MOST:
        return None
    factor = float((value[kept] @ right[kept]) / right[kept].square().sum())
    factor = nice(factor, seen.loose, [100 / (100 - p) for p in range(1, 100)])
    expected = 1 / (1 - share)
    loose_share = 4 * (share * (1 - share) / count) ** 0.5 * expected**2
    if factor < 1 + 1e-3 or abs(factor - expected) > max(loose_share, 0.01):
        return None
    words = f"{share:.0%} of the entries are zero, and the others are multiplied by {factor:.5g}, "
    words += f"as by dropout with p = {1 - 1 / factor:.3g}"
    fault = Cause.at("ffn-dropout" if part == "mlp.act" else "dropout-active", part, words)
    return seen.fitted(torch.where(zero | (at & (value == 0)), 0.0, factor * right), rows, fault)
