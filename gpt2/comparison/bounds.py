"""Compare a model with a side that shows only the likeliest tokens: bounds of KL by the probability that is left out.

At each place P is known in full and Q at the shown tokens S; r = 1 - Q(S) is what Q leaves out, and t are the tokens left out,
each with at most m: the smallest shown probability, not counting the right token, which servers show wherever it ranks. From
below, by the log-sum inequality, each holds for every Q with these figures::

    KL(P||Q) >= sum_S p log(p / q) + P(t) log(P(t) / r)
    KL(Q||P) >= sum_S q log(q / p) + r log(r / P(t))

From above, KL(Q||P) is largest where the tokens of t with the smallest p have m each (the sum is convex in q). KL(P||Q) has no
upper bound without an assumption, since a token that was left out may have any probability above 0. The one made here: in t,
log(p / q) strays from its mean log(P(t) / r) no further than that of any shown token does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpt2.comparison.bounds_result import Bounds
from gpt2.comparison.distributions import perplexity_ratio
from gpt2.comparison.server_checks import Seen, Shares, check
from gpt2.comparison.sides.server import RunningServer
from gpt2.comparison.sides.side import Running, Top
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.metrics import Logits, Progress
from gpt2.measure.windows import Windows

ROWS = 64  # measured at a time: several arrays of their float64 logits are needed


@torch.inference_mode()
def measure_bounds(
    full: Logits,
    other: Running,
    ids: Tensor,
    windows: Windows,
    *,
    vocab: int,
    full_is_a: bool,
    recorded: bool,
    tokenizer: Tokenizer | None,
    seed: int,
    progress: Progress,
) -> Bounds:
    """Measure ``other``, which shows the likeliest tokens, beside ``full``, which shows all, on a text (N,).

    ``recorded``: ``full`` cannot be run on anything else.
    """
    columns: list[tuple[Tensor, ...]] = []
    seen: list[Seen] = []
    parts = list(windows.of(len(ids)))
    checked = {0, len(parts) // 2, len(parts) - 1}
    if isinstance(other, RunningServer):
        other.plan([part.end - part.start for part in parts])
    for number, part in enumerate(parts):
        window = ids[part.start : part.end + 1]
        logp = full(window[None, :-1])[0, :, :vocab].double().log_softmax(-1).cpu()
        top = other.top(window)
        rows = [slice(at, at + ROWS) for at in range(part.first - part.start, len(logp), ROWS)]
        columns += [_places(logp[places], top.at(places), window[1:][places]) for places in rows]
        if number in checked:
            seen.append(Seen(number + 1, window, logp, top))
        progress(f"top tokens: {part.end:,} of {len(ids) - 1:,}")
    joined = (torch.cat(each) for each in zip(*columns, strict=True))
    forward, forward_high, backward, backward_high, same, logp_full, logp_other, shown = joined
    known, not_finite = forward.isfinite(), int((~forward.isfinite() & (shown > 0)).sum())
    if int(known.sum()) < 2:
        why = getattr(other, "other_tokens", "") or "no place was shown"
        raise InputError(f"nothing of the text could be compared: {why}; does the server run a model with this tokenizer?")
    low, high = (forward, forward_high) if full_is_a else (backward, backward_high)
    bootstrap = Bootstrap(int(known.sum()), seed)
    both = known & logp_full.isfinite() & logp_other.isfinite()
    ratio = Estimate(math.nan, math.nan, math.nan)
    if count := int(both.sum()):
        logp_a, logp_b = (logp_full, logp_other) if full_is_a else (logp_other, logp_full)
        ratio = perplexity_ratio(logp_a[both], logp_b[both], Bootstrap(count, seed))
    return Bounds(
        kl_low=bootstrap.mean(low[known]),
        kl_high=bootstrap.mean(high[known]),
        assumed=full_is_a,
        same_top=bootstrap.fraction(same[known].bool()),
        ratio=ratio,
        shown=shown[known].mean().item(),
        top=max(part.top.ids.size(1) for part in seen),
        tokens=int(known.sum()),
        not_finite=not_finite,
        sent=other.sent if isinstance(other, RunningServer) else 0,
        findings=check(None if recorded else full, seen, vocab, tokenizer, other if isinstance(other, RunningServer) else None),
    )


def _places(logp: Tensor, top: Top, targets: Tensor) -> tuple[Tensor, ...]:
    """Return both bounds of both KLs, whether the first choices agree, the target's two log-probabilities and Q(S), each (T,).

    NaN where the side showed nothing.
    """
    shares = Shares.of(logp, top)
    known, _, q, log_q, ratio, shown, rest_p, rest_q = shares
    tail, forward = (rest_p / rest_q).log(), shares.forward
    backward = ((-q * ratio).sum(1) - rest_q * tail).clamp(min=0)
    stray = torch.where(known, (ratio - tail[:, None]).abs(), 0.0).amax(1)
    forward_high = forward + rest_p * stray
    likeliest = known & (top.ids != targets[:, None])
    m = torch.where(likeliest, log_q, math.inf).amin(1).clamp(max=0.0).exp()
    backward_high = torch.maximum(backward, (-q * ratio).sum(1) + _largest_tail(logp, top.ids, known, m, rest_q))
    unseen = ~known.any(1)
    columns = [forward, forward_high, backward, backward_high]
    columns = [column.masked_fill(unseen, math.nan) for column in columns]
    same = (top.ids[:, 0] == logp.argmax(1)).double()
    return *columns, same, logp.gather(1, targets[:, None])[:, 0], top.target, shown


def _largest_tail(logp: Tensor, ids: Tensor, known: Tensor, m: Tensor, rest: Tensor) -> Tensor:
    """Return the largest sum of q log(q / p) over the tokens left out: the unlikeliest of them have m (T,) each."""
    hidden = torch.cat((logp, logp.new_zeros(len(logp), 1)), 1).scatter(1, ids.where(known, logp.size(1)), math.inf)[:, :-1]
    ascending = hidden.sort(1).values
    tokens = torch.arange(logp.size(1), dtype=torch.float64)
    m = m.clamp(min=1e-300)[:, None]
    share = (rest[:, None] - tokens * m).clamp(min=0).minimum(m)  # m for the unlikeliest, a rest for the next, then nothing
    terms = share * (share.clamp(min=1e-300).log() - ascending)
    return torch.where((share > 0) & ascending.isfinite(), terms, 0.0).sum(1)
