"""Search the arrays of a dump by value, in any layout, with the tolerance that was measured for the dump."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.recording.pool import Match, Pool
from gpt2.port.terms.tolerance import HALVES, UNITS, Tolerance, excess

FAULT_MARGIN = 4  # how many times better than the tolerance a wrong formula has to fit
MASKED = -1e4  # scores of this size or below hide a token


class DumpPool(Pool):
    """The arrays of a dump, and their parts: blocks, thirds, lower triangles.

    Errors are measured beyond the rounding of each array's dtype. Values from a narrow dtype are not adopted: the program had
    more digits than it wrote, and our own numbers are closer to them.
    """

    def __init__(self, tolerance: Tolerance, config: GPT2Config, shape: tuple[int, int]) -> None:
        super().__init__()
        self.tolerance, self.config = tolerance, config
        self._bound = tolerance.stage
        self.narrow = tolerance.dtype != torch.float64
        self.rows, self.tokens = shape
        self.whole: list[bool] = []  # by entry: an array of the dump, and not a part of one

    def fill(self, arrays: Iterable[tuple[str, Tensor]], logits: Tensor) -> None:
        """Add arrays by name, with their parts, and the logits (B, T', V)."""
        for name, array in arrays:
            for part, tensor in parts(name, array, self.config, self.rows, self.tokens):
                self.whole.append(part == name)
                self.add(tensor, part, array.dtype)
        self.logits_dtype = logits.dtype
        self.logits = logits.double()

    @property
    def bound(self) -> float:
        return self._bound

    def fault_bound(self, place: str) -> float:
        # Narrower than for what is right: noise above the measured tolerance must not look like a fault.
        return self._at(place) / FAULT_MARGIN

    def find_at(self, place: str, value: Tensor, *axes: int) -> Match | None:
        return self.find_within(self._at(place), value, *axes)

    def find_within(self, bound: float, value: Tensor, *axes: int) -> Match | None:
        """Do :meth:`find` with another bound."""
        self._bound = bound
        try:
            return self.find(value, *axes)
        finally:
            self._bound = self.tolerance.stage

    def tolerance_at(self, place: str) -> float:
        return self._at(place)

    def _at(self, place: str) -> float:
        part = {"act": "mlp.act", "weights": "attn.weights"}.get(place, place)
        return self.tolerance.stages.get(part, self.tolerance.stage)

    @property
    def allowance(self) -> dict[str, float]:
        return self.tolerance.points

    def logits_error(self, value: Tensor, logits: Tensor) -> float:
        return excess(logits, value, self.logits_dtype)

    def find(self, value: Tensor, *axes: int) -> Match | None:
        match = super().find(value, *axes)
        if match is None or not match.axes:
            return match
        whole = {self.whole[number] for number in match.entries}
        origins = {self.names[number].partition("[")[0] for number in match.entries}
        return match if whole == {True} or len(origins) == 1 else None  # not pieces of several arrays

    def adopt(self, value: Tensor, match: Match) -> Tensor:
        if any(self.dtypes[number] in HALVES for number in match.entries):
            return value.clone(memory_format=torch.contiguous_format)
        return super().adopt(value, match)

    def unit(self, number: int) -> float:
        return UNITS[self.dtypes[number]][0]

    @property
    def largest_unit(self) -> float:
        return max(UNITS[dtype][0] for dtype in set(self.dtypes))

    def compared(self, number: int, ordered: Tensor) -> float:
        return excess(self._in_order(number), ordered, self.dtypes[number])


def parts(name: str, array: Tensor, config: GPT2Config, rows: int, tokens: int) -> list[tuple[str, Tensor]]:
    """Return an array and what it may be made of, named: blocks in a stack, q, k and v (or k and v) in one, unmasked scores."""
    array = array.squeeze()
    found = [(name, array)]
    layers, width = config.n_layer, config.n_embd
    for stack in (layers, layers + 1, 2 * layers):
        axis = next((axis for axis, size in enumerate(array.shape[:-1]) if size == stack and array.ndim > 2), None)
        if axis is not None and stack > 1:
            found += [(f"{name}[{n}]", part) for n, part in enumerate(array.unbind(axis))]
    for label, part in list(found):
        for axis, size in enumerate(part.shape):
            if size == 3 * width:
                found += [(f"{label}[{third}]", one) for third, one in zip("qkv", part.chunk(3, axis), strict=True)]
            elif (size == 3 and part.ndim > 2) or (size == 2 and part.numel() == 2 * rows * tokens * width):
                found += [(f"{label}[{n}]", one) for n, one in enumerate(part.unbind(axis))]
    for label, part in list(found):
        if part.ndim >= 2 and part.shape[-2:] == (tokens, tokens) and tokens > 1:
            future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            hidden = part[..., future]
            if bool((hidden <= MASKED).all()) or bool((hidden == 0).all()) or bool((hidden == hidden.flatten()[0]).all()):
                found.append((f"{label} masked", part.masked_fill(future, 0.0)))
    return found
