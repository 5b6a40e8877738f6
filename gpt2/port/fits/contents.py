"""Read off attention's result what a cache held where its weights are not recorded, or only its values are others.

Shapes: by heads (B, H, T, K); weights (B, H, T, T); sources as in ``slots.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from gpt2.port.fault import Fault
from gpt2.port.fits.observed import Fit, Observed
from gpt2.port.fits.rounding import SCHEMES, integers, roundings
from gpt2.port.fits.slots import MOST, Found, Slots

SHIFTS = (0, -1, 1, -2, 2)  # tokens between a slot and what it holds
BASES = (1e4, 5e5, 1e5, 1e6)
MOST_EMPTY = 2**17  # slots
REPLACED = 4  # slots of one query, and one
LIKE = 0.3  # the least cosine with GPT-2's mixture, which the prompt has
MOST_MOVED = 2**20  # numbers of all keys, times the blocks
NEAR = 4  # times the bound: one query that is worth a comparison of all


def stored(y: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what a cache may hold of keys or values in fewer bits, in words."""
    for words, rounded in roundings():
        yield f"rounded {words}", rounded(y)
    groups = {
        "each head of a token": (y.shape[-1], lambda x: x, lambda x: x),
        "each token": (y.shape[1] * y.shape[-1], lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
        "each feature of a row": (y.shape[2], lambda x: x.mT, lambda x: x.mT),
        "all": (y.numel(), lambda x: x, lambda x: x),
    }
    for (where, (size, there, back)), bits, scheme in product(groups.items(), (8, 4), SCHEMES):
        rows = there(y)
        made = integers(rows.reshape(-1, size), bits, scheme, False).reshape(rows.shape)
        yield f"in {bits} bits, {scheme}, a scale for {where}", back(made)


def turned(y: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield queries or keys turned by the position of their token (RoPE), in words."""
    size, places = y.shape[-1], torch.arange(y.shape[2], dtype=y.dtype)
    for width, base, paired, sign in product((size, size // 2, size // 4), BASES, (False, True), (1, -1)):
        half = width // 2
        if not half:
            continue
        angle = sign * places[:, None] / base ** (torch.arange(half, dtype=y.dtype) / half)
        part = y[..., : 2 * half]
        one, other = (part[..., 0::2], part[..., 1::2]) if paired else part.chunk(2, -1)
        ends = one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()
        made = torch.stack(ends, -1).flatten(-2) if paired else torch.cat(ends, -1)
        how = "neighbours as pairs" if paired else "halves as pairs"
        back = ", backwards" if sign < 0 else ""
        few = "" if width == size else f", the first {width} of {size} features"
        yield f"turned by their position (base {base:g}, {how}{few}{back})", torch.cat([made, y[..., 2 * half :]], -1)


def changed(q: Tensor, k: Tensor) -> Iterator[tuple[Fault, Tensor, Tensor]]:
    """Yield scores (B, H, T, T) of keys that a cache holds in fewer bits or turned, and those keys."""
    right, own = q @ k.mT, torch.eye(k.shape[2], dtype=torch.bool)
    for words, keys in stored(k):
        scores = q @ keys.mT
        for rest, some in (("", scores), (", except for the key of the token itself", torch.where(own, right, scores))):
            yield Fault("reduced-precision", "attn", f"keys are {words}{rest}"), some, keys
    for (words, queries), (_, keys) in zip(turned(q), turned(k), strict=True):
        for what, some in (("keys", q @ keys.mT), ("queries", queries @ k.mT), ("queries and keys", queries @ keys.mT)):
            yield Fault("rotary-positions", "attn", f"{what} are {words}"), some, keys


def softmax(scores: Tensor, visible: Tensor | None = None, axis: int = -1) -> Tensor:
    """Return attention weights of what is ``visible``, GPT-2's tokens if none is given; where nothing is, zeros."""
    visible = torch.ones_like(scores, dtype=torch.bool).tril() if visible is None else visible
    return scores.masked_fill(~visible, -math.inf).softmax(axis).nan_to_num(0.0)


def _padded(weights: Tensor) -> Tensor:
    """Return weights (H, S) with one more slot, which is not read."""
    return torch.nn.functional.pad(weights, (0, 1))


class Contents:
    """What a cache may hold, by what follows from it; ``weights`` and ``v``: those that the program should mix."""

    def __init__(self, slots: Slots, weights: Tensor, v: Tensor) -> None:
        self.slots, self.bank, self.weights, self.v = slots, slots.bank, weights, v

    def fit(self, seen: Observed, rows: Tensor) -> Fit | None:
        if float(torch.cosine_similarity(seen.value.flatten(), seen.right.flatten(), 0)) < LIKE:
            return None
        moved = () if bool(rows.all()) else (self._followed, self._moved)  # the first token of a cache is right
        for family in (self._stored, self._emptied, *moved):
            self.slots.in_time()
            if (fit := next(iter(family(seen, rows)), None)) is not None:
                return fit
        return None

    def _stored(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Keys, values or both in fewer bits, or turned keys."""
        if self.weights.numel() > MOST // 4:
            return
        own = torch.eye(self.v.shape[2], dtype=self.v.dtype)
        values = dict(stored(self.v))
        for words, value in values.items():
            self.slots.in_time()
            past = (self.weights * (1 - own)) @ value + (self.weights * own) @ self.v
            for rest, made in (("", self.weights @ value), (", except for the value of the token itself", past)):
                fault = Fault("reduced-precision", "attn", f"values are {words}{rest}")
                yield from seen.fits(made, rows, fault)
        k = self.bank.keys[: self.v.shape[0] * self.v.shape[2]].unflatten(0, (self.v.shape[0], -1)).transpose(1, 2)
        for fault, scores, _ in changed(self.slots.q, k):
            self.slots.in_time()
            weights, words = softmax(scores * self.slots.scale), fault.detail.partition(" are ")[2].partition(", except")[0]
            both = replace(fault, detail=f"values as well: {fault.detail}")
            yield from seen.fits(weights @ self.v, rows, fault)
            if words in values:
                yield from seen.fits(weights @ values[words], rows, both)

    def _emptied(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """A softmax that runs over slots of zeros as well: so many that each head's mixture is as much smaller as it is."""
        bank, value, found = self.bank, seen.right.clone(), {}
        for row, token in rows.nonzero().tolist():
            keys = bank.keys[bank.number(row, 0) : bank.number(row, token) + 1]
            sums = (self.slots.scale * torch.einsum("hk,shk->hs", self.slots.q[row, :, token], keys)).exp().sum(1)
            own, right = seen.value[row, :, token], seen.right[row, :, token]
            part = (own * right).sum(1) / right.square().sum(1).clamp(min=1e-300)  # of the whole softmax, by head
            count = int((sums * (1 / part - 1)).median().round()) if bool((part > 0).all() & sums.isfinite().all()) else 0
            if not 0 < count <= MOST_EMPTY:
                return
            value[row, :, token] = right * (sums / (sums + count))[:, None]
            found[row, token] = Found(self._whole(row, token), (), count)
        if (fault := self.slots.fault_of(found, rows, "keys and values")) is not None:
            yield from seen.fits(value, rows, fault)

    def _whole(self, row: int, token: int) -> Tensor:
        """Return the right sources (H, S) of a query."""
        numbers = torch.arange(token + 1) + self.bank.number(row, 0)
        return numbers * self.bank.heads + torch.arange(self.bank.heads)[:, None]

    def _followed(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Values of slots that hold others from some token on: a few more with each query, which keep what they hold."""
        bank, value, slack, found = self.bank, seen.right.clone(), seen.slack.clone(), {}
        heads, size = torch.arange(bank.heads), seen.value.square().mean().sqrt()
        if bank.values.numel() * bank.tokens > MOST:
            return
        for row in range(bank.rows):
            held = torch.tensor([bank.number(row, slot) for slot in range(bank.tokens)])
            for token in range(bank.tokens):
                self.slots.in_time()
                if not bool(rows[row, token]):
                    held[: token + 1] = torch.tensor([bank.number(row, slot) for slot in range(token + 1)])
                    continue
                weights, target = self.weights[row, :, token, : token + 1], seen.value[row, :, token]
                for _ in range(REPLACED):
                    made = torch.einsum("hs,shk->hk", weights, bank.values[held[: token + 1]])
                    unit = float(bank.unit[held[: token + 1]].max())
                    loose = seen.slack[row, :, token] + (seen.bound + 4 * unit) * size
                    if bool(((made - target).abs() <= loose).all()):
                        break
                    changes = bank.values[:, None] - bank.values[held[: token + 1]]  # (N, S, H, K)
                    left = (target - made - weights.T[None, ..., None] * changes).square().sum((2, 3))
                    number, slot = divmod(int(left.argmin()), token + 1)
                    held[slot] = number
                else:
                    return
                value[row, :, token], slack[row, :, token] = made, loose
                found[row, token] = Found(held[None, : token + 1] * bank.heads + heads[:, None])
        if (fault := self.slots.fault_of(found, rows, "values")) is not None:
            yield from filter(None, [replace(seen, slack=slack).fitted(value, rows, fault)])

    def _moved(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Slots of a kind that hold vectors of other tokens, rows or blocks, or zeros, or that are not read."""
        bank, slots = self.bank, self.slots
        heads = torch.arange(bank.heads)
        if slots.q.shape[2] * bank.zero * bank.heads > MOST:
            return
        row, token = max(rows.nonzero().tolist(), key=lambda one: (one[1], one[0]))
        prompt = int(rows.any(0).nonzero()[0])
        scores = slots.scale * torch.einsum("hk,nhk->hn", slots.q[row, :, token], bank.keys)
        scores = torch.cat([scores, torch.full_like(scores[:, :1], -math.inf)], 1)  # the last is hidden
        values = torch.cat([bank.values, torch.zeros_like(bank.values[:1])])
        kinds = list(product(self._regions(), self._holdings()))
        sources = torch.stack([self._source(kind, row, token, prompt) for kind in kinds])  # (kinds, S)
        right = self._source(kinds[0], row, token, prompt)
        target, size = seen.value[row, :, token], seen.value.square().mean().sqrt()
        loose = NEAR * (seen.slack[row, :, token] + (seen.bound + 4 * float(bank.unit.max())) * size)
        chunk = max(1, MOST // max(1, bank.values[0].numel() * len(right)))
        for what, empty in product(("keys and values", "values", "keys"), (0, 1, 2)):
            if what == "values" and empty:
                continue
            for first in range(0, len(kinds), chunk):
                slots.in_time()
                some = sources[first : first + chunk]
                keys = some if "keys" in what else right.expand_as(some)
                mixed = some if "values" in what else right.expand_as(some)
                if what == "values":
                    weights = _padded(self.weights[row, :, token, : token + 1]).expand(len(some), -1, -1)
                else:
                    logits = scores[heads[:, None], keys[:, None]]  # (kinds, H, S)
                    weights = torch.cat([logits, logits.new_zeros(*logits.shape[:2], empty)], 2).softmax(2)[..., : len(right)]
                made = torch.einsum("fhs,fshk->fhk", weights, values[mixed])
                for number in ((made - target).abs() <= loose).all(-1).all(-1).nonzero().flatten().tolist():
                    yield from self._compared(kinds[first + number], what, empty, seen, rows, prompt)

    def _compared(
        self, kind: tuple[str, tuple[str, int, int, int]], what: str, empty: int, seen: Observed, rows: Tensor, prompt: int
    ) -> Iterator[Fit]:
        """Yield the fit if a kind of cache gives what all wrong queries read."""
        bank, value, found = self.bank, seen.right.clone(), {}
        heads = torch.arange(bank.heads)
        for row, token in rows.nonzero().tolist():
            source = self._source(kind, row, token, prompt)
            right = self._source(("none", ("zero", 0, 0, 0)), row, token, prompt)
            kept = source != bank.zero + 1
            weights = _padded(self.weights[row, :, token, : token + 1])
            if "keys" in what:
                keys = bank.keys[source.clamp(max=bank.zero)]
                scores = self.slots.scale * torch.einsum("hk,shk->hs", self.slots.q[row, :, token], keys)
                scores = torch.cat([scores.masked_fill(~kept, -math.inf), scores.new_zeros(bank.heads, empty)], 1)
                weights = scores.softmax(1)[:, : token + 2]
            mixed = bank.values[(source if "values" in what else right).clamp(max=bank.zero)] * kept[:, None, None]
            value[row, :, token] = torch.einsum("hs,shk->hk", weights, mixed)
            found[row, token] = Found(source[kept, None].mT * bank.heads + heads[:, None], (), empty)
        fault = self.slots.fault_of(found, rows, what)
        slack = seen.slack + 8 * float(bank.unit.max()) * value.abs().amax()
        if fault is not None:
            yield from filter(None, [replace(seen, slack=slack).fitted(value, rows, fault)])

    def _regions(self) -> list[str]:
        return ["none", "past", "prompt", "steps", "own", "before", "last of the prompt", "first", "whole", "more"]

    def _holdings(self) -> list[tuple[str, int, int, int]]:
        """Return what slots of a region may hold: a kind, an array, a row and a shift.

        A row of 0 or more counts from the query's; -1 is row 0 for all queries, -2 is row 1.
        """
        rows, blocks = self.bank.rows, len(self.bank.blocks)
        if self.bank.values.numel() * blocks > MOST_MOVED:  # a large model: this block alone
            blocks = 1
        every = [("other", *one) for one in product(range(blocks), range(-rows if rows > 1 else 0, rows), SHIFTS)]
        return [(kind, 0, 0, 0) for kind in ("zero", "hidden", "own", "last of the prompt")] + every

    def _source(self, kind: tuple[str, tuple[str, int, int, int]], row: int, token: int, prompt: int) -> Tensor:
        """Return the vectors (token + 2,) that a query's slots hold; zero + 1 for one that is not read, as the last."""
        region, (what, array, other, by) = kind
        bank, slot = self.bank, torch.arange(token + 2)
        right = torch.where(slot <= token, bank.number(row, 0) + slot, bank.zero + 1)
        past, step = slot < token, token >= prompt
        where = {
            "none": slot < 0,
            "past": past,
            "prompt": (slot < prompt) & past & step,
            "steps": (slot >= prompt) & past,
            "own": slot == token,
            "before": slot == token - 1,
            "last of the prompt": (slot == prompt - 1) & step,
            "first": slot == 0,
            "whole": slot <= token,
            "more": (slot == token + 1) & step,
        }[region]
        if what == "other":
            at = slot + by
            held = bank.number(-1 - other if other < 0 else (row + other) % bank.rows, 0, array) + at
            held = torch.where((at < 0) | (at >= bank.tokens), bank.zero, held)
        else:
            one = {"zero": bank.zero, "own": bank.number(row, token), "last of the prompt": bank.number(row, max(prompt - 1, 0))}
            held = torch.full_like(slot, one.get(what, bank.zero + 1))
        return torch.where(where, held, right)
