"""The first set of programs in the form of the later ones: a bed, faults with the ids that say them, sizes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from . import LINES, SIZES, Home, Program, missing, read_dump, shuffled

__all__ = ["FAULTS", "SHAPES", "Bed", "missing"]

SHAPES = (("tiny", 11, 0), ("wider", 16, 1))  # a size, tokens, seed of the weights
APART = (
    "layer-",
    "weights-reversed",
    "wrong-all-first",
    "annotated",
)  # in a pair, what comes after them has another block's number


def _ids(language: str, line: str) -> tuple[str, ...]:
    return tuple(one for ids in Program(language, line).causes.values() for one in ids)


FAULTS = {language: {line: _ids(language, line) for line in lines.split()} for language, lines in LINES.items()}


class Bed:
    """A random model, ids, and the three programs; C computes in float32, JavaScript in float64 for what it stores as float16."""

    def __init__(self, folder: Path, shape: tuple[str, int, int]) -> None:
        size, tokens, seed = shape
        self.home = Home(folder, SIZES[size], tokens, seed)
        self.model, self.ids = self.home.model, self.home.ids.numpy()

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The ids that ``program`` ran on, and its logits in float64."""
        path = self.home.dump(Program(program, " ".join(faults), "logits"), "float64", dtype)
        logits = next(array for array in read_dump(path).values() if array.dtype.kind == "f")
        return (self.ids if logits.ndim == 3 else self.ids[0]), {"logits": logits}

    def dump(self, program: str, faults: Iterable[str], level: str, dtype: str, seed: int) -> Path:
        """Write what ``program`` shows at ``level`` as ``dtype``, under shuffled names that say nothing, with foreign arrays."""
        compute = "float32" if dtype == "float32" or (program, dtype) == ("numpy", "float16") else "float64"
        return shuffled(self.home.dump(Program(program, " ".join(faults), level), dtype, compute, foreign=seed), seed)
