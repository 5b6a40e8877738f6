"""A third set of programs, written after the second had been used to develop the engine: plain lists in pure Python.

With one tensor a block, it is another one in each dump: the block's result, the stream between the branches, a branch, the
second norm, the activations or the attention weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..bed import Bed, Shape
from . import lists

FAULTS: dict[str, dict[str, tuple[str, ...]]] = {"lists": lists.FAULTS}
SHAPES = (Shape(3, 24, 2, 61, 16, 9, 81), Shape(2, 30, 5, 53, 14, 11, 82), Shape(4, 20, 4, 47, 15, 8, 83))


def missing(program: str) -> None:
    """Python needs nothing else."""


class ListBed(Bed):
    """A random model and ids, as :class:`Bed` has them, for the program over lists; it computes in float64."""

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, dict[str, np.ndarray]]:
        weights = {name: array.astype(float).tolist() for name, array in self.weights.items()}
        kept = lists.Lists(weights, self.shape.heads, set(faults)).run(self.ids[0].tolist())
        return self.ids[0], {name: np.array(rows) for name, rows in kept.items()}

    def one_a_block(self, program: str, seed: int) -> str:
        return lists.ONE_A_BLOCK[seed % len(lists.ONE_A_BLOCK)]
