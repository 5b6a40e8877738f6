"""What the slots of a cache may hold: keys and values of all blocks, rows, tokens and heads, by number, and in words.

Shapes: by heads (B, H, T, K). A bank numbers its N = A * B * T vectors array by array, row by row, token by token; number N is
zeros. A *source* is such a number times H plus a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpt2.port.fits.observed import SHOWN


class Bank:
    """What slots may hold: ``keys`` and ``values`` (B, H, T, K) of the ``blocks``, this block's first.

    ``units``: the relative rounding of each block's arrays, 0 for those that are known exactly.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], blocks: Sequence[int], units: Sequence[float]) -> None:
        self.rows, self.heads, self.tokens, size = keys[0].shape
        self.blocks, self.zero = tuple(blocks), len(blocks) * self.rows * self.tokens
        empty = keys[0].new_zeros(1, self.heads, size)
        self.keys, self.values = (
            torch.cat([torch.stack(list(one)).permute(0, 1, 3, 2, 4).flatten(0, 2), empty]) for one in (keys, values)
        )
        self.unit = torch.tensor(units, dtype=empty.dtype).repeat_interleave(self.rows * self.tokens)
        self.unit = torch.cat([self.unit, empty.new_zeros(1)])

    def place(self, number: int) -> tuple[int, int, int]:
        """Return the array, row and token of a vector that is not zeros."""
        array, rest = divmod(number, self.rows * self.tokens)
        return array, *divmod(rest, self.tokens)

    def number(self, row: int, token: int, array: int = 0) -> int:
        return (array * self.rows + row) * self.tokens + token

    def words(self, kind: str, sources: Sequence[int], row: int, head: int) -> str:
        """Return in words what slots hold, by source, seen by a query in ``row``."""
        runs: list[list[int]] = []  # of slots
        for slot, source in enumerate(sources):
            last = runs[-1] if runs else []
            near = bool(last) and self._follows(sources[last[-1]], source)
            runs = [*runs[:-1], [*last, slot]] if near else [*runs, [slot]]
        parts = []
        for run in runs[:SHOWN]:
            where = f"slot {run[0]} holds" if len(run) == 1 else f"slots {run[0]} to {run[-1]} hold"
            number, other = divmod(sources[run[0]], self.heads)
            if number == self.zero:
                parts.append(f"{where} zeros")
                continue
            array, of, token = self.place(number)
            last_token = self.place(sources[run[-1]] // self.heads)[2]
            tokens = f"token {token}" if token == last_token else f"tokens {token} to {last_token}"
            where += f" the {kind} of {tokens}"
            where += f" of block {self.blocks[array]}" if array else ""
            where += f" of row {of} of the batch" if of != row else ""
            parts.append(where + (f" of head {other}" if other != head else ""))
        return "; ".join(parts) + ("; ..." if len(runs) > SHOWN else "")

    def _follows(self, one: int, other: int) -> bool:
        """Return whether a source is the next token of another one, or both are zeros."""
        (a, head), (b, second) = divmod(one, self.heads), divmod(other, self.heads)
        if self.zero in (a, b):
            return a == b
        first, next_one = self.place(a), self.place(b)
        return head == second and first[:2] == next_one[:2] and first[2] + 1 == next_one[2]
