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
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.comparison.distributions import perplexity_ratio
from gpt2.comparison.loaded import Loaded
from gpt2.comparison.passage import Passage
from gpt2.comparison.server_checks import Finding, Seen, check, shares
from gpt2.comparison.sides.server import RunningServer
from gpt2.comparison.sides.side import Shown, Top
from gpt2.errors import InputError
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.metrics import Progress

ROWS = 64  # measured at a time: several arrays of their float64 logits are needed


@dataclass(frozen=True)
class Bounds:
    """What is known of two distributions of which one is shown in part, over ``tokens`` places; nats.

    ``kl_low`` and ``kl_high`` bound the mean KL(a||b); each has its own 95 % interval. ``assumed`` says whether the upper bound
    needs the assumption above. ``shown`` is the mean probability of the shown tokens, ``top`` how many they are at most.
    ``ratio`` is b's perplexity over a's on the places whose token was shown.
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

    def summary(self) -> Iterator[tuple[str, str, str]]:
        """Yield the rows of a report: a name, a figure, and a remark."""
        high = "at most, if the tokens left out are like the shown" if self.assumed else "at most"
        yield "KL(a‖b)", f"{self.kl_low.value:.3g} nats", f"at least; from {self.kl_low.text('.3g')}"
        yield "", f"{self.kl_high.value:.3g} nats", high
        yield "same top token", *self.same_top.cells(".1%")
        yield "perplexity", "", f"× {self.ratio.text('.3f')}"
        if self.not_finite:
            yield "not finite", f"{self.not_finite:,} places", "whose KL is infinite or NaN, not counted above"
        sent = f"; {self.sent:,} tokens sent" if self.sent else ""
        yield "shown", f"{self.shown:.1%}", f"of the probability, in {self.top} tokens, at {self.tokens:,} places{sent}"


@torch.inference_mode()
def measure_bounds(a: Loaded, b: Loaded, passage: Passage, seed: int, progress: Progress) -> Bounds | None:
    """Compare a side that shows all logits with one that shows the likeliest tokens, on a text; None for any other two."""
    full_is_a = Shown.LOGITS in a.side.shows
    whole, part = (a, b) if full_is_a else (b, a)
    if Shown.LOGITS not in whole.side.shows or Shown.TOP not in part.side.shows:
        return None
    server, ids = part.running if isinstance(part.running, RunningServer) else None, passage.ids
    columns: list[tuple[Tensor, ...]] = []
    seen: list[Seen] = []
    spans = list(passage.windows.of(len(ids)))
    checked = {0, len(spans) // 2, len(spans) - 1}
    if server is not None:
        server.plan([span.end - span.start for span in spans])
    for number, span in enumerate(spans):
        window = ids[span.start : span.end + 1]
        logp = whole.logits(window[None, :-1])[0, :, : a.vocab].double().log_softmax(-1).cpu()
        top = part.running.top(window)
        rows = [slice(at, at + ROWS) for at in range(span.first - span.start, len(logp), ROWS)]
        columns += [_places(logp[places], top.at(places), window[1:][places]) for places in rows]
        if number in checked:
            seen.append(Seen(number + 1, window, logp, top))
        progress(f"top tokens: {span.end:,} of {len(ids) - 1:,}")
    joined = (torch.cat(each) for each in zip(*columns, strict=True))
    forward, forward_high, backward, backward_high, same, logp_full, logp_other, shown = joined
    known, not_finite = forward.isfinite(), int((~forward.isfinite() & (shown > 0)).sum())
    if int(known.sum()) < 2:
        why = (server.other_tokens if server else "") or "no place was shown"
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
        top=max(each.top.ids.size(1) for each in seen),
        tokens=int(known.sum()),
        not_finite=not_finite,
        sent=server.sent if server else 0,
        findings=check(whole.logits if server and whole.answers else None, seen, a.vocab, whole.tokenizer, server),
    )


def _places(logp: Tensor, top: Top, targets: Tensor) -> tuple[Tensor, ...]:
    """Return both bounds of both KLs, whether the first choices agree, the target's two log-probabilities and Q(S), each (T,).

    NaN where the side showed nothing.
    """
    known, q, log_q, ratio, shown, rest_p, rest_q, forward = shares(logp, top)
    tail = (rest_p / rest_q).log()
    backward = ((-q * ratio).sum(1) - rest_q * tail).clamp(min=0)
    stray = torch.where(known, (ratio - tail[:, None]).abs(), 0.0).amax(1)
    forward_high = forward + rest_p * stray
    likeliest = known & (top.ids != targets[:, None])
    m = torch.where(likeliest, log_q, math.inf).amin(1).clamp(max=0.0).exp()
    backward_high = torch.maximum(backward, (-q * ratio).sum(1) + _largest_tail(logp, top.ids, known, m, rest_q))
    bounds = (forward, forward_high, backward, backward_high)
    columns = [column.masked_fill(~known.any(1), math.nan) for column in bounds]
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
