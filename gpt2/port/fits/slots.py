"""Read off attention's recorded weights what the slots of a cache hold: keys and values of which block, row, token and head.

Shapes: queries by heads (B, H, T, K); numbers and sources as in ``bank.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.fault import Fault
from gpt2.port.fits.bank import Bank
from gpt2.port.fits.observed import Fit, Observed

AMBIGUOUS = 2  # sources that fit a slot, above which none is concluded
CLEAR = (2000.0, 100.0)  # times its rounding: a weight from which the others are measured
WHOLE = 0.2  # the largest error of a number of empty slots
MOST = 2**24  # numbers that are computed at once


@dataclass(frozen=True, eq=False)
class Found:
    """What one query reads: the ``sources`` (H, S) of its slots in front, behind them ``unseen`` vectors and ``empty`` slots."""

    sources: Tensor
    unseen: tuple[int, ...] = ()
    empty: int = 0


class Weighed(NamedTuple):
    """One query's weights (H, S) and its scores (H, N) with the bank's vectors, each with its rounding; its row and token."""

    weights: Tensor
    loose: Tensor
    scores: Tensor
    inexact: Tensor
    row: int
    token: int


Query = Callable[[Observed, int, int, dict[int, list[int]]], Found | None]


class Slots:
    """Reads sources off recorded weights of queries ``q``; GPT-2's factor of the scores is ``scale``.

    ``taken`` (B, H, T, S), by source: the weight with which each query mixes the value of each, after a fit.
    """

    def __init__(self, q: Tensor, bank: Bank, scale: float, in_time: Callable[[], None]) -> None:
        self.q, self.bank, self.scale, self.in_time = q, bank, scale, in_time
        self.taken: Tensor | None = None
        self.inexact = torch.zeros(1, dtype=q.dtype)  # (B, H, T, 1), the relative error of these weights
        self.fault: Fault | None = None

    def fit(self, seen: Observed, rows: Tensor) -> Fit | None:
        """Return the weights if each slot of each wrong query holds some vector of the bank, and not all hold the right one."""
        bank = self.bank
        batch, heads, tokens, _ = self.q.shape
        if batch * heads**2 * tokens * bank.zero > MOST:
            return None
        found = self._read(seen, rows, self._query, range(tokens)) or self._read(
            seen, rows, self._apart, range(tokens - 1, -1, -1)
        )
        if found is None:
            return None
        if (fault := self.fault_of(found, rows, "keys")) is None:
            return None
        taken, value, inexact = (
            torch.zeros(batch, heads, tokens, (bank.zero + 1) * heads),
            seen.value * 0,
            seen.value[..., :1] * 0,
        )
        taken = taken.to(value)
        for (row, token), one in found.items():
            scores = self._scores(row, token)
            loose = self._loose(row, token)
            behind = [self._whole(number) for number in one.unseen]
            sources = torch.cat([one.sources, torch.tensor(behind, dtype=torch.long).view(-1, heads).T], 1)
            some = torch.cat([scores.gather(1, sources), scores.new_zeros(heads, one.empty)], 1).softmax(1)
            taken[row, :, token].scatter_add_(1, sources, some[:, : sources.shape[1]])
            count = min(one.sources.shape[1], value.shape[-1])
            value[row, :, token, :count] = some[:, :count]
            inexact[row, :, token] = 2 * loose.gather(1, sources).amax(1, keepdim=True)
        fit = replace(seen, slack=seen.slack + inexact * value).fitted(value, rows, fault)
        if fit is not None:
            self.taken, self.inexact, self.fault = taken, inexact, fault
        return fit

    def _read(self, seen: Observed, rows: Tensor, way: Query, tokens: range) -> dict[tuple[int, int], Found] | None:
        """Return what each query reads; None if some query cannot be explained."""
        found: dict[tuple[int, int], Found] = {}
        for row in range(self.bank.rows):
            held: dict[int, list[int]] = {}  # the sources of each slot, by head, as the query before found them
            for token in tokens:
                self.in_time()
                right = torch.tensor([self._whole(self.bank.number(row, slot)) for slot in range(token + 1)]).T
                one = way(seen, row, token, held) if bool(rows[row, token]) else Found(right)
                if one is None:
                    return None
                found[row, token] = one
                held |= {slot: one.sources[:, slot].tolist() for slot in range(one.sources.shape[1])}
        return found

    def unit(self) -> float:
        """Return the largest rounding of the vectors that were found."""
        if self.taken is None:
            return 0.0
        used = (self.taken > 0).flatten(0, 2).any(0).unflatten(0, (-1, self.bank.heads)).any(1)
        return float(self.bank.unit[used].max())

    def mixed(self, seen: Observed, rows: Tensor) -> Fit | None:
        """Return the mixture of the values that belong to the keys that were found."""
        if self.taken is None or self.fault is None:
            return None
        values = self.bank.values.flatten(0, 1)
        unit = self.bank.unit.repeat_interleave(self.bank.heads)[:, None]
        slack = seen.slack + 2 * self.taken @ (unit * values.abs()) + self.inexact * (self.taken @ values.abs())
        return replace(seen, slack=slack).fitted(self.taken @ values, rows, self.fault)

    def _whole(self, number: int) -> list[int]:
        """Return the sources of a vector, of all heads."""
        return [number * self.bank.heads + head for head in range(self.bank.heads)]

    def _scores(self, row: int, token: int) -> Tensor:
        """Return the scores (H, S) of a query with each source."""
        return self.scale * torch.einsum("hk,ngk->hng", self.q[row, :, token], self.bank.keys).flatten(1)

    def _loose(self, row: int, token: int) -> Tensor:
        """Return what the rounding of the bank's keys may do to these scores."""
        if not bool(self.bank.unit.any()):
            return torch.zeros(1, 1, dtype=self.q.dtype).expand(self.bank.heads, (self.bank.zero + 1) * self.bank.heads)
        sizes = torch.einsum("hk,ngk,n->hng", self.q[row, :, token].abs(), self.bank.keys.abs(), self.bank.unit)
        return 2 * self.scale * sizes.flatten(1)

    def _query(self, seen: Observed, row: int, token: int, held: dict[int, list[int]]) -> Found | None:
        weights = seen.value[row, :, token]  # (H, S)
        loose = 2 * (seen.slack[row, :, token] + seen.bound * seen.value.square().mean().sqrt())
        visible = (weights > loose).any(0).nonzero().flatten().tolist()
        if not visible or visible[-1] + 1 != len(visible):  # slots in front, without gaps
            return None
        weights, loose = weights[:, : len(visible)], loose[:, : len(visible)]
        every = self._scores(row, token)
        index = torch.arange(self.bank.zero + 1) * self.bank.heads + torch.arange(self.bank.heads)[:, None]  # head with head
        one = Weighed(weights, loose, every.gather(1, index), self._loose(row, token).gather(1, index), row, token)
        clear = (weights / loose).amin(0)
        for slot, number in self._anchors(clear, row, token, held):
            self.in_time()
            sources = self._sources(one, slot, number, held)
            if sources is not None and (found := self._unseen(one, every, sources)) is not None:
                return found
        return None

    def _apart(self, seen: Observed, row: int, token: int, held: dict[int, list[int]]) -> Found | None:
        """Return what a query reads if the heads' slots hold other tokens and heads of this block, each its own."""
        weights = seen.value[row, :, token, : token + 1]
        loose = 2 * (seen.slack[row, :, token, : token + 1] + seen.bound * seen.value.square().mean().sqrt())
        if float((loose / weights.clamp(min=1e-300)).amin()) > 1 / CLEAR[-1]:
            return None
        every = self._scores(row, token)
        some = [*range(self.bank.rows * self.bank.tokens * self.bank.heads), self.bank.zero * self.bank.heads]
        out = []
        if len(some) ** 2 * weights.shape[1] > MOST:
            return None
        for head in range(self.bank.heads):
            scores, mine, error = every[head, some], weights[head], loose[head]
            anchor = int(mine.argmax())
            made = (scores + mine[anchor].log() - scores[:, None]).exp()[:, None]  # (anchor's sources, 1, sources)
            fits = (made - mine[:, None]).abs() <= error[:, None] + made * float(error[anchor] / mine[anchor])
            fits[:, anchor] = torch.eye(len(some), dtype=torch.bool)
            whole = fits.any(-1).all(-1).nonzero().flatten().tolist()
            known = [held[slot][head] if slot in held else -1 for slot in range(len(mine))]
            best = max(whole, key=lambda one: self._agreed(fits[one], some, known)[0], default=None)
            if best is None or (len(whole) > AMBIGUOUS and not any(self._agreed(fits[best], some, known)[1])):
                return None
            picked = self._agreed(fits[best], some, known)[1]
            out.append(
                [held[slot][head] if same else some[int(fits[best, slot].int().argmax())] for slot, same in enumerate(picked)]
            )
        return Found(torch.tensor(out))

    def _agreed(self, fits: Tensor, some: list[int], known: list[int]) -> tuple[int, list[bool]]:
        """Return in how many slots, and in which, a source fits that is known from the query before."""
        places = {source: place for place, source in enumerate(some)}
        same = [source in places and bool(fits[slot, places[source]]) for slot, source in enumerate(known)]
        return sum(same), same

    def _anchors(self, clear: Tensor, row: int, token: int, held: dict[int, list[int]]) -> Iterator[tuple[int, int]]:
        """Yield slots and what each may hold, from which the weights of the others are measured, the ``clear`` ones first."""
        own, heads, slots = self.bank.number(row, token), self.bank.heads, len(clear)
        first = [(min(token, slots - 1), own)]
        first += [(slot, self.bank.number(row, slot)) for slot in range(min(slots, self.bank.tokens))]
        first += [(slot, sources[0] // heads) for slot, sources in held.items() if slot < slots]
        first += [(slot, own) for slot in range(slots)]
        first += [(slot, self.bank.zero) for slot in (0, slots - 1)]
        first += [(int(clear.argmax()), number) for number in range(self.bank.zero)]
        for most, least in zip((float("inf"), *CLEAR), CLEAR, strict=False):
            yield from (one for one in dict.fromkeys(first) if least < float(clear[one[0]]) <= most)

    def _sources(self, one: Weighed, slot: int, number: int, held: dict[int, list[int]]) -> Tensor | None:
        """Return the sources (H, S) if ``slot`` holds vector ``number`` and each other slot some vector."""
        weights, loose, scores, inexact, row, token = one
        heads = self.bank.heads
        level = weights[:, slot].log() - scores[:, number]
        error = loose[:, slot] / weights[:, slot] + inexact[:, number]
        made = (scores + level[:, None]).exp()  # (H, N)
        allowed = loose[:, :, None] + made[:, None] * (error[:, None, None] + inexact[:, None])
        same = ((made[:, None] - weights[:, :, None]).abs() <= allowed).all(0)  # (S, N)
        out = []
        for place in range(weights.shape[1]):
            mine = same[place].nonzero().flatten().tolist()
            before = held.get(place, [])
            likely = [self.bank.number(row, place)] if place < self.bank.tokens else []
            likely += [before[0] // heads] if before and before == self._whole(before[0] // heads) else []
            likely += [self.bank.number(row, token), self.bank.zero]
            best = number if place == slot else next((n for n in likely if bool(same[place, n])), None)
            if (best is None or (len(mine) > AMBIGUOUS and best not in likely[:2])) and not 0 < len(mine) <= AMBIGUOUS:
                return None
            out.append(self._whole(mine[0] if best is None else best))
        return torch.tensor(out).T

    def _unseen(self, one: Weighed, scores: Tensor, sources: Tensor) -> Found | None:
        """Return what the query reads, with what explains a sum of recorded weights below one; None if nothing does.

        ``scores`` (H, N * H): with all sources.
        """
        weights, loose, row, token = one.weights, one.loose, one.row, one.token
        total, sums = weights.sum(1), scores.gather(1, sources).exp().sum(1)
        error = loose.sum(1)
        if bool(((1 - total).abs() <= error + 1e-6).all()):
            return Found(sources)
        if bool((total >= 1).any()) or not bool(sums.isfinite().all()):
            return None
        needed = sums * (1 - total) / total  # exponentials behind
        error = 3 * sums * error / total.square() + 1e-6 * needed
        seen = set((sources[0] // self.bank.heads).tolist())
        missing = [n for n in (self.bank.number(row, slot) for slot in range(token + 1)) if n not in seen]
        own = [n for n in missing if n == self.bank.number(row, token)]
        every = torch.arange(self.bank.heads)
        for some in ([], own, missing):
            left = needed - sum((scores[every, n * self.bank.heads + every].exp() for n in some), torch.zeros_like(needed))
            count = int(left.mean().round())
            if (count or some) and count >= 0 and bool(((left - count).abs() <= error.clamp(max=WHOLE)).all()):
                return Found(sources, tuple(some), count)
        return None

    def fault_of(self, found: dict[tuple[int, int], Found], rows: Tensor, kind: str) -> Fault | None:
        """Return what is wrong with what the queries read; None if nothing is."""
        bank, kinds, shown = self.bank, set[str](), ""
        for (row, token), one in found.items():
            if not bool(rows[row, token]):
                continue
            vectors, wrong = one.sources // bank.heads, set[str]()
            if not torch.equal(one.sources % bank.heads, torch.arange(bank.heads)[:, None].expand_as(one.sources)):
                wrong.add("head-layout")
            places = [None if number == bank.zero else bank.place(number) for number in vectors[0].tolist()]
            for slot, place in enumerate(places):
                if place != (0, row, slot):
                    wrong.add("batch-dependent" if place and place[1] != row else "cache-inconsistent")
            if all(place is not None and place[0] and place[1:] == (row, slot) for slot, place in enumerate(places)):
                wrong = {"wrong-tensor"}  # the token itself is of another block as well
            if one.unseen:
                wrong.add("cache-inconsistent")
            elif one.empty:
                wrong.add("cache-inconsistent" if one.empty == 1 else "mask-multiplied")  # one place too far, or a whole buffer
            if wrong and not shown:
                head = (
                    int((one.sources % bank.heads != torch.arange(bank.heads)[:, None]).any(1).nonzero()[0])
                    if "head-layout" in wrong
                    else 0
                )
                shown = bank.words(kind, one.sources[head].tolist(), row, head)
                if one.empty:
                    shown += f"; the softmax runs over {one.empty} more, of zeros"
                shown = f"token {token} of row {row} reads a cache in which {shown}"
            kinds |= wrong
        order = ("head-layout", "batch-dependent", "cache-inconsistent", "wrong-tensor", "mask-multiplied")
        return next((Fault(id, "attn", shown) for id in order if id in kinds), None)
