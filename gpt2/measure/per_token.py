"""Compare two models token by token: log-probabilities, divergences and top tokens from one pass over the vocabulary.

:mod:`gpt2.comparison.distributions` computes the statistics.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2.measure.metrics import Logits, Progress, silent
from gpt2.measure.windows import Windows

TOP = 5
BLOCK = 64  # logits per block; only blocks with the largest maxima are searched for the top tokens
CACHED = 1 << 17  # logits per step of one core, a multiple of a row: less is overhead of calls, more leaves its cache
SHARE = 1 << 18  # logits per thread that are worth a thread


@dataclass(frozen=True, eq=False)
class Tokens:
    """The measurements of N scored tokens, in text order. CPU tensors; nats, float64; ids int64."""

    targets: Tensor  # (N,) the correct token
    index: Tensor  # (N,) its index in the text
    position: Tensor  # (N,) number of tokens that it was predicted from
    logp_a: Tensor  # (N,) its log-probability under a
    logp_b: Tensor
    kl_ab: Tensor  # (N,) KL(a||b), summed over the entries of both, and one for all that the other lacks
    kl_ba: Tensor
    js: Tensor  # (N,) Jensen-Shannon
    top_a: Tensor  # (N, k) a's likeliest tokens, likeliest first; among equals, the lower id
    top_b: Tensor
    top_p_a: Tensor  # (N, k) their probabilities
    top_p_b: Tensor
    only_a: Tensor  # (N,) the probability that a gives to the entries that b lacks, because its vocabulary is shorter
    only_b: Tensor
    windows: Windows

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def same_top(self) -> Tensor:
        """(N,) bool: both models have the same likeliest token."""
        return self.top_a[:, 0] == self.top_b[:, 0]

    @property
    def change(self) -> Tensor:
        """(N,) the correct token's probability under b minus under a."""
        return self.logp_b.exp() - self.logp_a.exp()


@torch.inference_mode()
def measure_pair(
    a: Logits, b: Logits, ids: Tensor, windows: Windows, *, batch_size: int | None = None, progress: Progress = silent
) -> Tokens:
    """Run both models over a text (N,) and compare their predictions of each token but the first, in float64.

    Each model is normalised over all of its logits (B, T, V), which hold no padding; one V may be larger than the other. A
    divergence is exactly 0 for bitwise equal logits, never negative, and otherwise accurate to about 1e-15; infinite where a
    probability is 0 in one model; NaN logits make all of the token's measurements NaN. Raises InputError: no token to predict, a
    protocol that skips tokens.
    """
    ids = ids.long()
    parts: list[tuple[Tensor, ...]] = []
    done = 0
    for inputs, group in windows.batches(ids, batch_size):
        logits_a, logits_b = a(inputs), b(inputs)
        top = min(TOP, logits_a.size(-1), logits_b.size(-1))
        for row, window in enumerate(group):
            first = window.first - window.start
            targets = ids[window.first + 1 : window.end + 1]
            index = torch.arange(window.first + 1, window.end + 1)
            measured = measure_rows(logits_a[row, first:], logits_b[row, first:], targets, top)
            parts.append((targets, index, index - window.start, *(tensor.cpu() for tensor in measured)))
            done += len(targets)
        del logits_a, logits_b  # else two batches of each are alive while the next are computed
        progress(f"distributions: {done:,} of {len(ids) - 1:,} tokens")
    names = [field.name for field in fields(Tokens) if field.type is Tensor]
    columns: dict[str, Any] = {name: torch.cat(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}
    return Tokens(**columns, windows=windows)


def measure_rows(a: Tensor, b: Tensor, targets: Tensor, top: int) -> list[Tensor]:
    """Run :func:`_measure` on slices of the rows, one thread each; concatenate the columns.

    torch's own threads would synchronise after each small step, which was measured as thirty times slower than one thread.
    """
    count, threads = len(a), torch.get_num_threads()
    workers = 1 if a.is_cuda else max(1, min(threads, count, a.numel() // SHARE))
    if workers == 1:
        return _measure(a, b, targets, top)

    def share(i: int) -> list[Tensor]:
        torch.set_num_threads(1)  # of this thread
        mine = slice(count * i // workers, count * (i + 1) // workers)
        with torch.inference_mode():
            return _measure(a[mine], b[mine], targets[mine], top)

    try:
        with ThreadPoolExecutor(workers) as pool:
            shares = list(pool.map(share, range(workers)))
    finally:
        torch.set_num_threads(threads)  # for new threads
    return [torch.cat(columns) for columns in zip(*shares, strict=True)]


def _measure(a: Tensor, b: Tensor, targets: Tensor, top: int) -> list[Tensor]:
    """Measure logits (R, Va), (R, Vb) and targets (R,): the columns of :class:`Tokens` from ``logp_a`` on.

    With x, y the logits minus their maxima, P = exp(x), Q = exp(y) and Sa, Sb their sums over each model's own entries, where
    other sums are over the entries that both have, with the shares pa and pb of the probability::

        D(a||b) = sum P (x - y) / Sa - pa log(Sa / Sb)
        JS      = D(b||a) / 2 - sum (P / Sa + Q / Sb) L / 2 + (2 - pa - pb) log(2) / 2,    L = log((1 + Q Sa / (P Sb)) / 2)

    KL(a||b) is D(a||b), or infinite where pa < 1: the entries that b lacks have probability 0 there. No large numbers cancel, and
    for x = y every term is exactly 0. All in float64: with float32 exponentials, single tokens were half wrong at a KL of 3e-7.
    """
    a = a if a.is_cuda else a.cpu()  # not every device has float64
    b, targets = b.to(a.device), targets.to(a.device)
    (top_a, value_a), (top_b, value_b) = likeliest(a, top), likeliest(b, top)
    max_a, max_b = value_a[:, :1], value_b[:, :1]
    shared = min(a.size(1), b.size(1))
    rest = torch.zeros(2, len(a), dtype=torch.float64, device=a.device)  # of the sums, by entries that the other lacks
    step = max(1, (1 << 24 if a.is_cuda else CACHED) // shared)
    # Allocated once: allocating in each of a thousand small steps would cost more than the arithmetic.
    work = torch.empty(4, min(step, len(a)), shared, dtype=torch.float64, device=a.device)
    sums = torch.empty(6, len(a), dtype=torch.float64, device=a.device)
    for start in range(0, len(a), step):
        part = slice(start, start + step)
        for own, x, most in ((rest[0], a, max_a), (rest[1], b, max_b)):
            if x.size(1) > shared:
                own[part] = (x[part, shared:].double() - most[part]).exp().sum(1)
        _add_up(a[part, :shared], b[part, :shared], max_a[part], max_b[part], rest[:, part], work, out=sums[:, part])
    (sum_a, sum_b), (dot_a, dot_b, mixed_a, mixed_b) = sums[:2] + rest, sums[2:]
    log_a, log_b = sum_a.log(), sum_b.log()
    only_a, only_b = rest[0] / sum_a, rest[1] / sum_b
    between = torch.log1p((sum_a - sum_b) / sum_b)  # log(Sa / Sb), accurate to 1e-16 for nearly equal sums
    kl_ab, kl_ba = dot_a / sum_a - (1 - only_a) * between, (1 - only_b) * between - dot_b / sum_b
    divergences = torch.stack((kl_ab, kl_ba, (kl_ba - mixed_a / sum_a - mixed_b / sum_b) / 2), 1)
    # -inf among the logits, or a span so wide that a quotient overflowed
    for wide in (~divergences.isfinite().all(1)).nonzero()[:, 0].split(step):
        x = a[wide, :shared].double() - max_a[wide] - log_a[wide, None]
        divergences[wide] = _wide_divergences(x, b[wide, :shared].double() - max_b[wide] - log_b[wide, None])
    infinite = torch.where(torch.stack((only_a, only_b)) > 0, math.inf, 0.0)
    divergences += torch.stack((*infinite, (only_a + only_b) * math.log(2) / 2), 1)
    divergences.clamp_(min=0)  # rounding errors: at most 1e-15 below 0
    logp_a = (a.gather(1, targets[:, None]).double() - max_a)[:, 0] - log_a
    logp_b = (b.gather(1, targets[:, None]).double() - max_b)[:, 0] - log_b
    p_a, p_b = (value_a - max_a - log_a[:, None]).exp(), (value_b - max_b - log_b[:, None]).exp()
    return [logp_a, logp_b, *divergences.T, top_a, top_b, p_a, p_b, only_a, only_b]


def _add_up(a: Tensor, b: Tensor, max_a: Tensor, max_b: Tensor, rest: Tensor, work: Tensor, out: Tensor) -> None:
    """Sum P, Q, P (x - y), Q (x - y), P L and Q L over the vocabulary; ``work`` (4, R or more, V) is a cache-sized buffer.

    ``rest`` (2, R) is what entries beyond add to the sums in L.
    """
    x, y, p, q = work[:, : len(a)]
    exp_into(x.copy_(a).sub_(max_a), p)
    exp_into(y.copy_(b).sub_(max_b), q)
    d = x.sub_(y)
    sum_a, sum_b = p.sum(1), q.sum(1)
    dot_a, dot_b = torch.mul(p, d, out=y).sum(1), torch.mul(q, d, out=y).sum(1)
    mixed = torch.div(q, p, out=d).mul_(((sum_a + rest[0]) / (sum_b + rest[1]) / 2)[:, None]).add_(0.5).log_()
    torch.stack((sum_a, sum_b, dot_a, dot_b, p.mul_(mixed).sum(1), q.mul_(mixed).sum(1)), out=out)


def exp_into(x: Tensor, out: Tensor) -> Tensor:
    """Return the exponentials of float64 ``x`` in ``out``; on a CPU by NumPy, which takes half of torch's time."""
    if x.is_cuda:
        return torch.exp(x, out=out)
    np.exp(x.numpy(), out=out.numpy())
    return out


def _wide_divergences(x: Tensor, y: Tensor) -> Tensor:
    """Return the three divergences (R, 3) of any log-probabilities (R, V): 0 log 0 is 0, and p log(p / 0) is infinite."""
    p, q, d = x.exp(), y.exp(), x - y
    # log of a's, or b's, share in the mean of both, from the side that does not overflow; at d = 0 exactly 0
    of_a = torch.where(d >= 0, -(torch.expm1(-d) / 2).log1p(), d - (torch.expm1(d) / 2).log1p())
    of_b = torch.where(d <= 0, -(torch.expm1(d) / 2).log1p(), -d - (torch.expm1(-d) / 2).log1p())

    def expected(weight: Tensor, value: Tensor) -> Tensor:
        return torch.where(weight == 0, 0, weight * value).sum(-1, keepdim=True)

    return torch.cat((expected(p, d), expected(q, -d), (expected(p, of_a) + expected(q, of_b)) / 2), 1)


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids (R, k) and float64 values of each row's largest logits (R, V), largest first; among equals the lower id first.

    Only the k blocks with the largest maxima are searched: ``torch.topk`` takes ten times as long, and its ties are undefined.
    """
    vocab = logits.size(1)
    whole = vocab // BLOCK * BLOCK
    maxima = logits[:, :whole].unflatten(1, (vocab // BLOCK, BLOCK)).amax(-1)
    if whole < vocab:
        maxima = torch.cat((maxima, logits[:, whole:].amax(-1, keepdim=True)), 1)
    blocks = _largest(maxima, min(k, maxima.size(1))).sort(1).values
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    candidates = logits.gather(1, ids.clamp(max=vocab - 1)).double()
    candidates[ids >= vocab] = -math.inf
    places = _largest(candidates, k)
    return ids.gather(1, places), candidates.gather(1, places)


def _largest(values: Tensor, k: int) -> Tensor:
    """Return the indices (R, k) of each row's k largest values; among equals, the first."""
    remaining, places = values.clone(), []
    for _ in range(k):
        largest, place = remaining.max(1, keepdim=True)  # the first among equals, as torch documents
        if largest.isneginf().any():  # values already taken are -inf too
            return values.sort(dim=1, descending=True, stable=True).indices[:, :k]
        remaining.scatter_(1, place, -math.inf)
        places.append(place)
    return torch.cat(places, 1)
