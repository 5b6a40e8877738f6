"""All vectors of a checkpoint that a program may hold by mistake, and how one is found among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.config import GPT2Config

MOST_COPIED = 2**24  # entries of matrices whose columns are compared
PROBED = 64  # entries of a vector that sort out places
FEW = 16  # places that are compared whole


class Source(NamedTuple):
    """Where a column of weights is in the checkpoint: a tensor, whether it is one of its rows, and its number."""

    name: str
    row: bool
    number: int


class Library:
    """All vectors of a checkpoint ``state`` that a program may hold by mistake."""

    def __init__(self, state: Mapping[str, Tensor], config: GPT2Config) -> None:
        self.state, self.config = state, config
        self.rounding = ""  # that other weights were seen to have
        self.product = ""  # that other products were seen to be, in words
        self.in_time: Callable[[], None] = lambda: None  # raises TimeUp
        self._columns: dict[int, tuple[Tensor, list[tuple[str, bool, int]]]] = {}

    def columns(self, size: int) -> tuple[Tensor, list[tuple[str, bool, int]]]:
        """Return every column and row of ``size`` entries, (size, M), with the tensors they come from and how many of each."""
        if size not in self._columns:
            parts, origins = [], []
            matrices = {name: tensor for name, tensor in self.state.items() if tensor.ndim == 2 and size in tensor.shape}
            if sum(tensor.numel() for tensor in matrices.values()) > MOST_COPIED:  # a large model: its first blocks
                matrices = {name: tensor for name, tensor in matrices.items() if name.startswith(("h.0.", "h.1."))}
            for name, tensor in matrices.items():
                for one, row in ((tensor, False), (tensor.t(), True)):
                    if one.shape[0] == size:
                        parts.append(one)
                        origins.append((name, row, one.shape[1]))
            self._columns[size] = torch.cat(parts, 1), origins
        return self._columns[size]

    def source(self, size: int, number: int) -> Source:
        for name, row, count in self.columns(size)[1]:
            if number < count:
                return Source(name, row, number)
            number -= count
        raise IndexError

    @cached_property
    def vectors(self) -> dict[str, Tensor]:
        """Biases and norms' weights, and the thirds of c_attn's biases."""
        out = {name: tensor for name, tensor in self.state.items() if tensor.ndim == 1}
        for name, tensor in list(out.items()):
            if name.endswith("c_attn.bias"):
                out |= {f"{name} ({letter})": third for letter, third in zip("qkv", tensor.chunk(3), strict=True)}
        return out

    def pairs(self, name: str, transposed: bool) -> Iterator[Tensor]:
        """Yield a tensor of each block and that of the next one behind it, (2n,); the first follows the last."""
        every = [tensor for other, tensor in self.state.items() if other.split(".", 2)[2:] == name.split(".", 2)[2:]]
        parts = [(one.t() if transposed else one).reshape(-1) for one in every]
        yield from (torch.cat(pair) for pair in zip(parts, parts[1:] + parts[:1], strict=True))


def place_of(wanted: Tensor, flat: Tensor, loose: float) -> int | None:
    """Return where the vector ``wanted`` (n,) begins in ``flat``, to within ``loose``; None if nowhere.

    Places are sorted out entry by entry: to compare all with all entries takes 15 GB for a bias of gpt2.
    """
    starts = torch.arange(max(len(flat) - len(wanted) + 1, 0))
    for offset, value in enumerate(wanted[:PROBED].tolist()):
        starts = starts[(flat[starts + offset] - value).abs() <= loose]
    errors = [(float((flat[start : start + len(wanted)] - wanted).abs().max()), start) for start in starts[:FEW].tolist()]
    error, start = min(errors, default=(float("inf"), 0))
    return start if error <= loose else None


def permutation(order: Tensor) -> str:
    """Return an order of entries in words: where the first ones come from."""
    shown = ", ".join(map(str, order[:6].tolist()))
    if len(order) > 1 and bool((order.diff() == 1).all()):
        return f"{int(order[0])} to {int(order[-1])}"
    if len(order) > 1 and bool((order.diff() == -1).all()):
        return "backwards"
    return f"the first are {shown}"
