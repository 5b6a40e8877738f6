"""A fourteenth set: right programs in NumPy and C, and mistakes that ``faults.toml`` writes into them as replaced text.

``flattened`` takes all rows at once; ``chunked`` takes a prompt in chunks and then single tokens, with a cache. The mistakes
are chosen by kind (orders of calls, indices, what is read, digits, formulas), by an author who knew neither the engine nor its
results.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from support.patches import patched

from ..bed import MATRICES, Arrays, Bed, Shape

__all__ = ["FAULTS", "LISTS", "SHAPES", "FourteenthBed", "missing", "source"]

HERE = Path(__file__).parent
SOURCES = {"flattened": "flattened.py", "chunked": "chunked.c"}
TOOLS = {"flattened": None, "chunked": "cc"}  # what a program needs on the machine


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
    return patched((HERE / SOURCES[program]).read_text(), (_TABLE[program][name]["patch"] for name in sorted(faults)))


def missing(program: str) -> str | None:
    """What the machine lacks for ``program``, or None."""
    tool = TOOLS[program]
    return f"no {tool} on this machine" if tool and not shutil.which(tool) else None


def flat(weights: Mapping[str, np.ndarray], shape: Shape) -> bytes:
    """The file of weights that the C program reads: sizes in int32, then the tensors in the order of the model."""
    blocks = [f"h.{n}.{part}" for n in range(shape.layers) for part in ("ln_1", *[*MATRICES][:2], "ln_2", *[*MATRICES][2:])]
    names = ["wte.weight", "wpe.weight", *(f"{part}.{leaf}" for part in (*blocks, "ln_f") for leaf in ("weight", "bias"))]
    sizes = np.array([shape.layers, shape.heads, shape.context, shape.width, shape.vocab], "<i4")
    return sizes.tobytes() + b"".join(weights[name].astype("<f4").tobytes() for name in names)


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

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        (folder / "rows.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in self.ids))
        (folder / "model.bin").write_bytes(flat(self.weights, shape))

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, Arrays]:
        text, shape = source(program, faults), self.shape
        if program == "flattened":
            names: dict[str, object] = {"__name__": program}
            exec(compile(text, SOURCES[program], "exec"), names)
            with np.errstate(over="ignore"):
                return self.ids, names["run"](self.model, self.ids, shape.layers, shape.heads, dtype)  # type: ignore[operator]
        out = self.folder / f"out of {program}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        command = [self.built(text, dtype), self.folder / "model.bin", self.folder / "rows.txt", out]
        subprocess.run(command, check=True, timeout=60)
        return self.ids, {path.stem: np.load(path) for path in sorted(out.iterdir())}

    def built(self, text: str, dtype: str) -> Path:
        """Return the C program ``text``, compiled for numbers of ``dtype``; each text is compiled once."""
        binary = self.folder / f"chunked {dtype} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        if not binary.exists():
            path = binary.with_suffix(".c")
            path.write_text(text)
            real = "double" if dtype == "float64" else "float"
            command = ["cc", "-O1", "-std=gnu11", f"-DREAL={real}", "-o", str(binary), str(path), "-lm"]
            subprocess.run(command, check=True, timeout=120)
        return binary
