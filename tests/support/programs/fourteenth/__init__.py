"""A fourteenth set: right programs in NumPy, and mistakes that ``faults.toml`` writes into them as replaced text.

``flattened`` takes all rows at once; ``chunked`` takes a prompt in chunks and then single tokens, with a cache. The mistakes
are chosen by kind (orders of calls, indices, what is read, digits, formulas), by an author who knew neither the engine nor its
results.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np

from support.patches import patched

from ..bed import Arrays, Bed, Shape

__all__ = ["FAULTS", "LISTS", "SHAPES", "FourteenthBed", "source"]

HERE = Path(__file__).parent

_TABLE = tomllib.loads((HERE / "faults.toml").read_text())
# Program -> fault -> the causes that name it honestly (best first), its place, the line that it changes; and the causes alone.
LISTS = {
    program: {fault: (tuple(row["means"][0].split()), *row["means"][1:]) for fault, row in rows.items()}
    for program, rows in _TABLE.items()
}
FAULTS = {program: {fault: ids for fault, (ids, _, _) in faults.items()} for program, faults in LISTS.items()}
SHAPES = (Shape(3, 36, 4, 151, 33, 14, 211), Shape(2, 48, 3, 223, 40, 13, 212), Shape(3, 24, 2, 187, 36, 15, 213))


def source(program: str, faults: Iterable[str] = ()) -> str:
    """Return the text of ``program`` with ``faults`` written into it."""
    return patched((HERE / f"{program}.py").read_text(), (_TABLE[program][name]["patch"] for name in sorted(faults)))


class FourteenthBed(Bed):
    """The models and programs of this set."""

    TABLES = 0.5
    ONE_A_BLOCK: ClassVar = {
        "flattened": ("h", "A", "mid", "M", "Y", "G"),
        "chunked": ("out", "attn_out", "mid", "mlp_out", "blend", "fc_act"),
    }
    NOT_DUMPED = (
        (),
        ("Q", "K", "U", "h0", "qkv", "in"),
        ("S", "F", "dots", "fc"),
        ("P", "Y", "hf", "probs", "blend", "last"),
        ("N1", "N2", "mid", "M", "norm_a", "norm_m", "mlp_out"),
    )

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, Arrays]:
        names: dict[str, object] = {"__name__": program}
        exec(compile(source(program, faults), f"{program}.py", "exec"), names)
        with np.errstate(over="ignore"):
            return self.ids, names["run"](self.model, self.ids, self.shape.layers, self.shape.heads, dtype)  # type: ignore[operator]
