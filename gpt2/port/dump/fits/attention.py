"""Read off attention's recorded weights how tokens were compared and hidden.

Shapes: weights (B, H, T, S); queries and keys by heads (B, H, T, K); rows (B, T) are the queries that are not GPT-2's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.diagnosis.hypotheses import ALLOWED, MASK_FAULTS, allowed, mask_faults
from gpt2.port.diagnosis.scores import PAIRS, Layout
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.fits.contents import changed, softmax
from gpt2.port.dump.fits.observed import SHOWN, Fit, Observed, nice
from gpt2.port.dump.fits.slots import Slots

CLEAR = 100.0  # times the rounding of a weight: those whose logarithm is fitted
LEAST = 1e-4  # the least weight whose logarithm is fitted
LEAST_SEEN = 4  # differences of scores that show a factor
LEAST_WEIGHTS = 12  # that show that there is no softmax


class Compared(NamedTuple):
    """Scores (B, H, T, S) that may have given the recorded weights, of which ``log`` are the logarithms; ``clear`` are the
    weights that are large enough to show a score."""

    seen: Observed
    rows: Tensor
    scores: Tensor
    log: Tensor
    clear: Tensor


class Weights:
    """Attention weights as a program computes them from ``q``, ``k`` (B, T, D).

    ``others``: further keys (B, T, D), in words. ``slots``: what a cache may hold, with GPT-2's factor of the scores.
    """

    def __init__(self, q: Tensor, k: Tensor, others: Mapping[str, Tensor], slots: Slots) -> None:
        self.q, self.k, self.others, self.slots = q, k, others, slots
        self.heads, self.scale, self.in_time = slots.bank.heads, slots.scale, slots.in_time

    def fit(self, seen: Observed, rows: Tensor) -> Fit | None:
        whole = (self._ones, self._times, self._heads, self._held, self._changed, self._undivided)
        for family in (*whole, self._scored, self._each, self._free):
            self.in_time()
            if (fit := next(iter(family(seen, rows)), None)) is not None:
                return fit
        return None

    def _scores(self) -> Tensor:
        q, k = (Layout.RIGHT.split(y, self.heads) for y in (self.q, self.k))
        return q @ k.mT

    def _ones(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """A softmax over the queries of one step: every weight is one."""
        visible = allowed("right", seen.value).expand_as(seen.value)
        alone = (((seen.value - 1).abs() < 1e-6) | ~visible).all(-1).all(1) & rows
        if bool(alone[:, 1:].any()):
            words = "the softmax runs over the queries (dim=-2), not over the keys: in a step with one query each weight is one"
            ones, others = visible.to(seen.value), rows & ~alone
            scores = self._scores() * self.scale
            within = softmax(scores, visible & others[:, None, :, None], -2)
            value = torch.where(alone[:, None, :, None], ones, within)
            yield from seen.fits(value, rows, Fault("softmax-axis", "attn", words))

    def _times(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """GPT-2's weights, each query's times a number."""
        if not bool(rows[:, 1:].any()):  # the first query has one weight, which is a multiple of any other
            return
        total, right = seen.value.sum(-1, keepdim=True), seen.right.sum(-1, keepdim=True)
        factor = total / right
        some = factor.expand(seen.value.shape)[rows[:, None].expand(seen.value.shape[:3])]
        if bool(some.all()) and float((some - some.mean()).abs().max()) <= 1e-4 * float(some.abs().max()):
            times = nice(float(some.mean()), seen.loose)
            fault = Fault("softmax-missing", "attn", f"the weights are multiplied by {times:.6g} after the softmax")
            yield from seen.fits(seen.right * times, rows, fault)
        scores = self._scores() * self.scale
        after = Fault("mask-multiplied", "attn", "the softmax also runs over what the mask hides: the weights do not sum to one")
        yield from seen.fits(scores.softmax(-1) * allowed("right", scores), rows, after)

    def _held(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Keys of a cache whose slots hold others than they should."""
        yield from filter(None, [self.slots.fit(seen, rows)])

    def _changed(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Keys of a cache in fewer bits, or turned by their position."""
        for fault, scores, _ in changed(*(Layout.RIGHT.split(y, self.heads) for y in (self.q, self.k))):
            self.in_time()
            yield from seen.fits(softmax(scores * self.scale), rows, fault)

    def _undivided(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Each query's weights times another number."""
        if bool(rows[:, 1:].any()):
            words = "each query's weights are multiplied by another number: they are not divided by their sum"
            factor = seen.value.sum(-1, keepdim=True) / seen.right.sum(-1, keepdim=True)
            if bool(factor.transpose(1, 2)[rows].all()):  # else nothing is computed
                yield from seen.fits(seen.right * factor, rows, Fault("softmax-missing", "attn", words))

    def _heads(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Other heads' weights, or the same in every head."""
        mine, right = (value.transpose(1, 2)[rows].transpose(0, 1).flatten(1) for value in (seen.value, seen.right))
        order = torch.cdist(mine, right).argmin(1)
        words = f"the heads' weights are those of heads {', '.join(map(str, order.tolist()))}"
        yield from seen.fits(seen.right[:, order], rows, Fault("head-layout", "attn", words))

    def _compared(self) -> Iterator[tuple[Tensor, tuple[Fault, ...]]]:
        """Yield the scores (B, H, T, T) of other comparisons, not scaled."""
        parts, heads = {"q": self.q, "k": self.k}, self.heads
        yield self._scores(), ()
        for (first, second), words in PAIRS.items():
            if words:
                pair = (Layout.RIGHT.split(parts[name], heads) for name in (first, second))
                yield next(pair) @ next(pair).mT, (Fault("qkv-order", "attn", words),)
        yield self._scores().mT, (Fault("qkv-order", "attn", "queries and keys have changed places"),)
        for one, other in itertools.product(Layout, Layout):
            if one is not Layout.RIGHT or other is not Layout.RIGHT:
                words = "; ".join(f"{name}: {way.value}" for name, way in (("queries", one), ("keys", other)) if way.value)
                value = one.split(self.q, heads) @ other.split(self.k, heads).mT
                yield value, (Fault("head-layout", "attn", words),)
        q, k = (Layout.RIGHT.split(y, heads) for y in (self.q, self.k))
        tokens = torch.arange(k.shape[2])
        maps = {
            f"of tokens {abs(n)} {'earlier' if n > 0 else 'later'} than it should be": (tokens - n).clamp(0, len(tokens) - 1)
            for n in (1, 2, -1, -2)
        }
        maps["of all tokens in reverse order"] = tokens.flip(0)
        for words, order in maps.items():
            yield (
                q @ k[:, :, order].mT,
                (Fault("cache-inconsistent", "attn", f"each query is compared with the keys {words}"),),
            )
        for step in range(1, heads):
            yield (
                q @ k.roll(step, 1).mT,
                (Fault("head-layout", "attn", f"head h compares its queries with the keys of head h - {step}"),),
            )
        yield (
            q @ k.flip(1).mT,
            (Fault("head-layout", "attn", "heads compare their queries with the keys of the heads in reverse order"),),
        )
        for slot, written, words in slots(self.heads, len(tokens)):
            keys = k.flatten(1, 2)[:, slot].unflatten(1, (self.heads, -1))
            yield (q @ keys.mT) * written, (Fault("head-layout", "attn", f"keys are {words}"),)
        for words, keys in self.others.items():
            yield q @ Layout.RIGHT.split(keys, heads).mT, (Fault("wrong-tensor", "attn", f"queries are compared with {words}"),)

    def _scored(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """A softmax of other scores, with another factor or another mask: logarithms of weights are scores, up to a constant."""
        y = seen.value
        at = rows[:, None, :, None].expand_as(y)
        clear = (y > CLEAR * seen.slack) & (y > LEAST) & at
        log = y.clamp(min=1e-300).log()
        masks = [(label, ALLOWED[label](torch.ones_like(y[0, 0], dtype=torch.bool)).expand_as(y)) for label in ALLOWED]
        masks.append(("", y > 0))
        for axis in (-1, -2, 1, 0):
            sums = torch.where(at | (axis != -1), y, 0.0).sum(axis)
            alike = float((sums[sums > 0] - 1).abs().max()) < 1e-2 if bool((sums > 0).any()) else False
            if not alike or y.shape[axis] == 1:
                continue
            over = {-2: "the queries", 1: "the heads", 0: "the batch"}.get(axis)
            wrong = (
                (Fault("softmax-axis", "attn", f"the softmax runs over {over} (dim={axis}), not over the keys"),) if over else ()
            )
            for scores, faults in self._compared():
                self.in_time()
                factor = _slope(scores, log, clear, axis)
                factor = nice(factor / self.scale, seen.loose) * self.scale if math.isfinite(factor) else self.scale
                for label, mask in masks:
                    value = softmax(scores * factor, mask, axis)
                    if seen.fitted(value, rows) is not None:
                        scaled = () if math.isclose(factor, self.scale, rel_tol=1e-6) else (self._scaled(factor),)
                        hidden = MASK_FAULTS[label] if label else self._masked(mask, rows)
                        yield from seen.fits(value, rows, *faults, *scaled, *wrong, *hidden)
                yield from self._filled(Compared(seen, rows, scores * factor, log, clear), faults)
                if axis == -1 and not faults:
                    yield from self._biased(Compared(seen, rows, scores * self.scale, log, clear))

    def _scaled(self, factor: float) -> Fault:
        id = "scale-missing" if math.isclose(factor, 1.0, rel_tol=1e-5) else "scale-wrong"
        return Fault(
            id,
            "attn",
            f"the scores are multiplied by {factor:.6g}; the checkpoint's attention multiplies them by {self.scale:.6g}",
        )

    def _masked(self, mask: Tensor, rows: Tensor) -> tuple[Fault, ...]:
        other = (mask != allowed("right", mask)).any(-1) & rows[:, None]  # (B, H, T)
        if not bool(other.any()):
            return ()
        row, head, _ = other.nonzero()[0].tolist()
        return mask_faults(mask[row, head])

    def _filled(self, one: Compared, faults: tuple[Fault, ...]) -> Iterator[Fit]:
        """Hidden scores that are replaced by one number, which has a share of the softmax."""
        seen, rows, scores, log, _ = one
        visible = allowed("right", scores).expand_as(scores)
        hidden = ~visible & rows[:, None, :, None] & (seen.value > CLEAR * seen.slack) & (seen.value > LEAST)
        if not bool(hidden.any()):
            return
        level = ((log - scores).masked_fill(~visible, -math.inf)).amax(-1, keepdim=True)
        fill = nice(float((log - level)[hidden].median()), 10 * seen.loose)
        value = scores.masked_fill(~visible, fill).softmax(-1)
        fault = Fault(
            "mask-multiplied", "attn", f"masked scores are {fill:.6g}, not minus infinity: the softmax gives them a share"
        )
        yield from seen.fits(value, rows, *faults, fault)

    def _biased(self, one: Compared) -> Iterator[Fit]:
        """Scores plus a number for each distance of two tokens."""
        seen, rows, scores, log, clear = one
        tokens = scores.shape[-1]
        if _shown(clear, -1) < 2 * self.heads * (tokens - 1):
            return
        away = torch.arange(tokens)[:, None] - torch.arange(tokens)
        added = torch.zeros_like(scores)
        left = (log - scores).masked_fill(~clear, 0.0)
        left = (left - left.gather(-1, torch.arange(tokens)[:, None].expand_as(left[..., :1]))).masked_fill(~clear, 0.0)
        for distance in range(1, tokens):
            self.in_time()
            some = clear & (away == distance)
            level = (left * some).sum((0, 2, 3)) / some.sum((0, 2, 3)).clamp(min=1)  # of each head
            added += level[None, :, None, None] * (away == distance)
        words = "a number that depends on the distance of two tokens is added to the scores (as in ALiBi)"
        fault = Fault("scale-wrong", "attn", f"{words}: {float(added[0, 0, 1, 0]):.4g} for neighbours in head 0")
        yield from seen.fits(softmax(scores + added, allowed("right", scores)), rows, fault)

    def _each(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """A factor of its own for each head."""
        scores, visible = self._scores(), allowed("right", seen.value)
        clear = (seen.value > CLEAR * seen.slack) & (seen.value > LEAST) & rows[:, None, :, None] & visible
        log = seen.value.clamp(min=1e-300).log()
        slopes = [_slope(scores[:, [h]], log[:, [h]], clear[:, [h]], -1) / self.scale for h in range(self.heads)]
        if not all(map(math.isfinite, slopes)):
            return
        factors = torch.tensor([nice(one, 10 * seen.loose) for one in slopes], dtype=scores.dtype)
        value = softmax(scores * self.scale * factors[:, None, None], visible)
        shown = ", ".join(f"{float(one):.4g}" for one in factors[:SHOWN])
        words = f"each head multiplies its scores by another factor: {shown} times GPT-2's"
        yield from seen.fits(value, rows, Fault("head-layout", "attn", words))

    def _free(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Weights that are a function of each score alone: there is no softmax."""
        scores = self._scores() * self.scale
        at = (allowed("right", scores) & rows[:, None, :, None]).expand_as(scores)
        if int(at.sum()) < LEAST_WEIGHTS or int(rows.sum()) * self.heads < 2:  # of one query, a softmax keeps the order as well
            return
        order = scores[at].argsort()
        made, slack = seen.value[at][order], float(seen.slack.max()) + 1e-6
        if bool((made.diff() >= -2 * slack).all()) and float(made[-1] - made[0]) > 100 * slack:
            words = "each weight is a function of its own score alone: there is no softmax over the keys"
            yield from seen.fits(seen.value, rows, Fault("softmax-missing", "attn", words))


def slots(heads: int, tokens: int) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Yield which (head, token) a program finds at each place (H * T,) if it reads a cache in another order than it writes.

    Also whether a query has it written there yet, (H, T, T), and words. A cache may have room for more tokens than there are.
    """
    head, token = (one.flatten() for one in torch.meshgrid(torch.arange(heads), torch.arange(tokens), indexing="ij"))
    now = torch.arange(tokens)[:, None]
    for room in range(tokens, 2 * tokens + 1):
        place = token * heads + head
        by_head = place // room, place % room, "written head by head, and read token by token"
        place = head * room + token
        by_token = place % heads, place // heads, "written token by token, and read head by head"
        for whose, when, words in (by_head, by_token):
            there = (whose < heads) & (when < tokens)
            slot = torch.where(there, whose * tokens + when, 0)
            for written in (there.expand(tokens, -1), there & (when <= now)):
                yield slot, written.reshape(tokens, heads, tokens).transpose(0, 1), f"{words} (room for {room} tokens)"


def _slope(scores: Tensor, log: Tensor, clear: Tensor, axis: int) -> float:
    """Return f if ``log`` is f times ``scores`` plus a constant for each softmax along ``axis``; NaN if too little shows it."""
    if _shown(clear, axis) < LEAST_SEEN:
        return math.nan
    count = clear.sum(axis, keepdim=True).clamp(min=1)
    z, level = (torch.where(clear, one, 0.0) for one in (scores, log))
    z, level = (torch.where(clear, one - one.sum(axis, keepdim=True) / count, 0.0) for one in (z, level))
    squares = float(z.square().sum())
    return float((z * level).sum()) / squares if squares > 0 else math.nan


def _shown(clear: Tensor, axis: int) -> int:
    """Return how many differences of scores ``clear`` weights show: each softmax along ``axis`` hides one number."""
    return int(clear.sum()) - int(clear.any(axis).sum())
