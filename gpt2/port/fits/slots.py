"""Read off attention's recorded weights and results which keys and values a cache held in place of GPT-2's.

Shapes: by heads (B, H, T, K); weights (B, H, T, S). A bank numbers its vectors array by array, row by row, token by token; the
last number is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gpt2.port.fits.observed import Fit, Observed
from gpt2.port.terms.causes import Cause

AMBIGUOUS = 2  # vectors that fit a slot, above which none is concluded
CLEAR = 100.0  # times its rounding: a weight from which the others are measured
MOST = 2**24  # numbers that are computed at once


class Bank:
    """What slots may hold: ``arrays`` of keys or values (B, H, T, K), this block's first, and zeros."""

    def __init__(self, arrays: Sequence[Tensor]) -> None:
        self.rows, self.heads, self.tokens, size = arrays[0].shape
        self.zero = len(arrays) * self.rows * self.tokens
        vectors = torch.stack(list(arrays)).transpose(2, 3).flatten(0, 2)
        self.vectors = torch.cat([vectors, vectors.new_zeros(1, self.heads, size)])  # (N, H, K)

    def number(self, row: int, token: int) -> int:
        return row * self.tokens + token

    def place(self, number: int) -> tuple[int, int, int]:
        """Return the array, row and token of a vector that is not zeros."""
        array, rest = divmod(number, self.rows * self.tokens)
        return array, *divmod(rest, self.tokens)


class Slots:
    """Reads what each query's slots hold; ``q``: the queries, ``scale``: GPT-2's factor of the scores. ``check`` raises Spent.

    ``taken`` (B, H, T, N): the weight of each of the bank's vectors, and ``fault``, after a fit.
    """

    def __init__(
        self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, check: Callable[[], None]
    ) -> None:
        self.q, self.keys, self.values, self.scale, self.check = q, Bank(keys), Bank(values), scale, check
        self.taken: Tensor | None = None
        self.fault: Cause | None = None

    def weights(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Yield the weights if each slot of each wrong query holds some vector."""
        batch, heads, tokens, _ = self.q.shape
        if batch * heads * tokens * self.keys.zero > MOST:
            return
        held: dict[tuple[int, int], list[int]] = {}
        for row, token in rows.nonzero().tolist():
            self.check()
            read = self._read(seen, row, token, held.get((row, token - 1), []))
            if read is None:
                return
            held[row, token] = read
        yield from self._found(seen, rows, held)

    def results(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Yield the mixtures of the values that belong to the keys that were found."""
        if self.taken is not None and self.fault is not None:
            yield from seen.fits(torch.einsum("bhtn,nhk->bhtk", self.taken, self.values.vectors), rows, self.fault)

    def _read(self, seen: Observed, row: int, token: int, before: list[int]) -> list[int] | None:
        """Return what the slots of a query hold, None if that is not known."""
        bank, weights = self.keys, seen.value[row, :, token]
        loose = 2 * (seen.slack[row, :, token] + seen.bound * seen.value.square().mean().sqrt())
        count = int((weights > loose).any(0).sum())
        if not bool((weights[:, :count] > loose[:, :count]).any(0).all()) or not 0 < count <= bank.tokens:
            return None  # slots in front, without gaps
        weights, loose = weights[:, :count], loose[:, :count]
        scores = self.scale * torch.einsum("hk,nhk->hn", self.q[row, :, token], bank.vectors)
        clear = (weights / loose.clamp(min=1e-300)).amin(0)
        for slot, number in self._anchors(row, token, int(clear.argmax()), count, before):
            if float(clear[slot]) < CLEAR:
                continue
            made = (scores + (weights[:, slot].log() - scores[:, number])[:, None]).exp()  # (H, N)
            error = loose[:, slot] / weights[:, slot]
            same = ((made[:, None] - weights[..., None]).abs() <= loose[..., None] + (made * error[:, None])[:, None]).all(0)
            read = [self._vector(place, row, token, some, before) for place, some in enumerate(same)]
            if bool((same.any(1)).all()) and None not in read:
                return [one for one in read if one is not None]
        return None

    def _anchors(self, row: int, token: int, clear: int, count: int, before: list[int]) -> Iterator[tuple[int, int]]:
        """Yield slots and what each may hold, to measure the others by; ``clear``: one that may hold anything."""
        own, last = self.keys.number(row, token), count - 1
        first = [(last, own), *((slot, self.keys.number(row, slot)) for slot in range(count))]
        likely = [*first, *enumerate(before[:count]), (0, self.keys.zero), (last, self.keys.zero)]
        yield from dict.fromkeys([*likely, *((clear, number) for number in range(self.keys.zero))])

    def _vector(self, slot: int, row: int, token: int, same: Tensor, before: list[int]) -> int | None:
        """Return the number of the vector that a slot holds, of those that are the ``same``; None if several may be."""
        numbers = same.nonzero().flatten().tolist()
        likely = [self.keys.number(row, slot), *before[slot : slot + 1], self.keys.number(row, token), self.keys.zero]
        best = next((number for number in likely if bool(same[number])), None)
        if best in likely[:2] or len(numbers) <= AMBIGUOUS:
            return best if best is not None or not numbers else numbers[0]
        return None

    def _found(self, seen: Observed, rows: Tensor, held: dict[tuple[int, int], list[int]]) -> Iterator[Fit]:
        """Yield the softmax over what the slots hold, with what is wrong with it."""
        bank, ids, shown = self.keys, set[str](), (0, list[int]())
        value, taken = seen.value * 0, seen.value.new_zeros(*seen.value.shape[:3], bank.zero + 1)
        for row in range(bank.rows):
            for token in range(bank.tokens):
                numbers = held.get((row, token), [bank.number(row, slot) for slot in range(token + 1)])
                scores = self.scale * torch.einsum("hk,shk->hs", self.q[row, :, token], bank.vectors[numbers])
                value[row, :, token, : len(numbers)] = some = scores.softmax(1)
                taken[row, :, token].index_add_(1, torch.tensor(numbers), some)
                wrong = [slot for slot, number in enumerate(numbers) if number != bank.number(row, slot)]
                if (row, token) in held and wrong:
                    shown = min(shown, (token, wrong)) if ids else (token, wrong)
                    ids.add(self._id(row, numbers))
        for id in ("batch-dependent", "cache-inconsistent", "wrong-tensor"):
            if id in ids:
                fault = _until(*shown, id)
                for fit in seen.fits(value, rows, fault):
                    self.taken, self.fault = taken, fault
                    yield fit
                return

    def _id(self, row: int, numbers: Sequence[int]) -> str:
        """Return the cause where a query of ``row`` reads these vectors."""
        places = [None if number == self.keys.zero else self.keys.place(number) for number in numbers]
        if any(place is not None and place[1] != row for place in places):
            return "batch-dependent"
        other_block = all(place is not None and place[0] and place[2] == slot for slot, place in enumerate(places))
        return "wrong-tensor" if other_block else "cache-inconsistent"  # the token itself is of another block as well


def _until(token: int, slots: Sequence[int], id: str = "cache-inconsistent") -> Cause:
    """Return the fault of a cache that is right until a token."""
    where = f"slot{'s' * (len(slots) > 1)} {', '.join(map(str, slots))}"
    return Cause.at(id, "attn", f"right until token {token}, where the cache holds other keys than GPT-2's, in {where}")
