"""Read off attention's weights with which factor scores were multiplied, and what a masked score became.

Logarithms of weights are scores, up to a constant for each softmax. Shapes: q, k (B, H, T, K); weights (B, H, T, T).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.alternatives.attention import scale_faults
from gpt2.port.fits.observed import SHOWN, Fit, Observed, nice
from gpt2.port.graph import right_scale
from gpt2.port.terms.causes import SCORES, Cause

CLEAR = 100.0  # times the rounding of a weight: those whose logarithm is fitted
LEAST = 1e-4  # the least weight whose logarithm is fitted
SCALED = "weights = scores.softmax(-1)  # divided by nothing: dropout divides by 1 - p while training only"
LEAST_SEEN = 4  # differences of scores that show a factor


def weights_fit(seen: Observed, q: Tensor, k: Tensor, config: GPT2Config, layer: int, rows: Tensor) -> Iterator[Fit]:
    """Yield the softmax of scores with another factor, for all heads or each, and with other hidden scores."""
    scale = right_scale(config, layer)
    scores, y = q @ k.mT * scale, seen.value
    visible = torch.ones_like(scores, dtype=torch.bool).tril()
    clear = (y > CLEAR * seen.slack) & (y > LEAST) & rows[:, None, :, None]
    log = y.clamp(min=1e-300).log()
    times = nice(_slope(scores, log, clear & visible), seen.loose)
    for factor in dict.fromkeys((times, 1.0)):
        if not math.isfinite(factor):
            continue
        scaled = scale_faults(config, layer, factor * scale)
        yield from seen.fits(softmax(factor * scores, visible), rows, *scaled)
        for value, words in _hidden(factor * scores, log, clear & ~visible, visible, seen.loose):
            fault = Cause.at("mask-multiplied", "attn", f"{words}: the softmax gives them a share")
            yield from seen.fits(value.softmax(-1), rows, *scaled, fault)
    yield from multiplied(seen, rows)
    yield from _placed(seen, scores, log, clear & visible, visible, rows)
    heads = torch.tensor(
        [nice(_slope(scores[:, [h]], log[:, [h]], (clear & visible)[:, [h]]), 10 * seen.loose) for h in range(q.shape[1])],
        dtype=scores.dtype,
    )
    if bool(heads.isfinite().all()):
        shown = ", ".join(f"{float(one):.4g}" for one in heads[:SHOWN])
        words = f"each head multiplies its scores by another factor: {shown} times GPT-2's"
        yield from seen.fits(softmax(scores * heads[:, None, None], visible), rows, Cause.at("head-layout", "attn", words))


def multiplied(seen: Observed, rows: Tensor) -> Iterator[Fit]:
    """Yield GPT-2's weights, or the mixtures by them, times a number; the first query's one weight is a multiple of any other."""
    if not bool(rows[:, 1:].any()):
        return
    value, right = (one.transpose(1, 2)[rows] for one in (seen.value, seen.right))
    times = nice(float((value * right).sum() / right.square().sum()), seen.loose)
    fault = Cause.at("softmax-missing", "attn", f"the weights are multiplied by {times:.6g} after the softmax", mend=SCALED)
    if math.isfinite(times) and times:
        yield from seen.fits(seen.right * times, rows, fault)


def _placed(seen: Observed, scores: Tensor, log: Tensor, clear: Tensor, visible: Tensor, rows: Tensor) -> Iterator[Fit]:
    """Yield scores to which the same number is added in every row of the batch, by head, query and key."""
    if len(scores) < 2 or not bool(rows.all(0)[1:].any()):
        return
    more = torch.where(clear, log - scores, 0.0)
    more = torch.where(clear, more - more[..., :1], 0.0).mean(0, keepdim=True)
    words = "a number that depends on the two positions is added to each score (as in ALiBi)"
    yield from seen.fits(softmax(scores + more, visible), rows, Cause.at("extra-bias", "attn", words, mend=SCORES))


def _hidden(scores: Tensor, log: Tensor, clear: Tensor, visible: Tensor, loose: float) -> Iterator[tuple[Tensor, str]]:
    """Yield scores of which hidden ones are replaced by a number, or have one added, with words."""
    if not bool(clear.any()):
        return
    level = (log - scores).masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
    fill, more = (nice(float(one[clear].median()), 10 * loose) for one in (log - level, log - level - scores))
    yield scores.masked_fill(~visible, fill), f"masked scores are {fill:.6g}, not minus infinity"
    if more:  # else there is no mask
        yield scores + more * ~visible, f"{more:.6g} is added to masked scores, not minus infinity"


def softmax(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -math.inf).softmax(-1)


def _slope(scores: Tensor, log: Tensor, clear: Tensor) -> float:
    """Return f if ``log`` is f times ``scores`` plus a constant for each query; NaN if too little shows it."""
    if int(clear.sum()) - int(clear.any(-1).sum()) < LEAST_SEEN:
        return math.nan
    count = clear.sum(-1, keepdim=True).clamp(min=1)
    z, level = (torch.where(clear, one, 0.0) for one in (scores, log))
    z, level = (torch.where(clear, one - one.sum(-1, keepdim=True) / count, 0.0) for one in (z, level))
    squares = float(z.square().sum())
    return float((z * level).sum()) / squares if squares > 0 else math.nan
