"""A fourteenth set: right programs in NumPy, C and node, and mistakes that ``faults.toml`` writes into them as replaced text.

``flattened`` takes all rows at once; ``chunked`` takes a prompt in chunks and then single tokens, with a cache; ``session`` takes
half of a text in one call and then single tokens, with a cache of its own for each text. The mistakes are chosen by kind.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..bed import Shape
from ..files import Arrays, FileBed, flat, pairs

HERE = Path(__file__).parent
SOURCES = {"flattened": "flattened.py", "chunked": "chunked.c", "session": "session.mjs"}


@dataclass(frozen=True)
class Fault:
    """A mistake: the ids of ``gpt2/port/CAUSES.md`` that name it honestly (best first), and the text that it replaces."""

    name: str
    program: str
    language: str
    kind: str
    ids: tuple[str, ...]
    place: str
    what: str
    line: str  # what it changes; two faults of one line are not paired
    old: str
    new: str


def read_faults(path: Path = HERE / "faults.toml") -> list[Fault]:
    """Return the faults of the file, in its order."""
    entries = tomllib.loads(path.read_text())["faults"]
    return [Fault(**entry.pop("fault"), **{**entry, "ids": tuple(entry["ids"])}) for entry in entries]


ALL = read_faults()
BY_NAME = {(fault.program, fault.name): fault for fault in ALL}
LISTS = {
    program: {fault.name: (fault.ids, fault.place, fault.line) for fault in ALL if fault.program == program}
    for program in SOURCES
}
FAULTS = {program: {fault: ids for fault, (ids, _, _) in faults.items()} for program, faults in LISTS.items()}
SHAPES = (Shape(3, 36, 4, 151, 33, 14, 211), Shape(2, 48, 3, 223, 40, 13, 212), Shape(3, 24, 2, 187, 36, 15, 213))
ONE_A_BLOCK = {
    "flattened": ("h", "A", "mid", "M", "Y", "G"),
    "chunked": ("out", "attn_out", "mid", "mlp_out", "blend", "fc_act"),
    "session": ("end", "attention", "between", "narrow", "heads", "bent"),
}
NOT_DUMPED = (  # from one dump to the next, an author leaves out these, by the names of each program
    (),
    ("Q", "K", "U", "h0", "qkv", "in", "queries", "keys", "values", "start"),
    ("S", "F", "dots", "fc", "scores", "wide"),
    ("P", "Y", "hf", "probs", "blend", "last", "pattern", "heads", "normed"),
    ("N1", "N2", "mid", "M", "norm_a", "norm_m", "mlp_out", "first", "second", "between", "narrow"),
)
PAIRS = {program: pairs(faults, f"fourteenth {program}") for program, faults in LISTS.items()}


def source(program: str, faults: Iterable[str] = ()) -> str:
    """Return the text of ``program`` with ``faults`` written into it.

    Raises:
        ValueError: a fault's old text is not there exactly once.
    """
    text = (HERE / SOURCES[program]).read_text()
    for name in sorted(faults):
        fault = BY_NAME[program, name]
        if text.count(fault.old) != 1:
            raise ValueError(f"{program}: the text that {name!r} replaces is there {text.count(fault.old)} times, not once")
        text = text.replace(fault.old, fault.new)
    return text


class FourteenthBed(FileBed):
    """The models and programs of this set. The C program reads ``model.bin``: five sizes, then the tensors in their order."""

    TABLES = 0.5
    COMPILED = "chunked", HERE / "chunked.c", ("cc", "-O1", "-std=gnu11")
    COMPILED_ROWS = True
    NODE = "session", HERE / "session.mjs"
    ONE_A_BLOCK = ONE_A_BLOCK
    NOT_DUMPED = NOT_DUMPED

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        sizes = [shape.layers, shape.heads, shape.context, shape.width, shape.vocab]
        (folder / "model.bin").write_bytes(flat(self.weights, shape.layers, sizes, by_kind=False))

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
        ids, model = str(self.folder / "rows.txt"), str(self.model / "model.safetensors")
        if program == "chunked":
            command = [str(self.built(text, dtype)), str(self.folder / "model.bin"), ids, str(out)]
        else:
            path = self.folder / SOURCES[program]
            path.write_text(text)
            command = ["node", str(path), model, ids, str(out), str(shape.heads), dtype]
        subprocess.run(command, check=True, timeout=60)
        return self.ids, {path.stem: np.load(path) for path in sorted(out.iterdir())}

    def built(self, text: str, dtype: str) -> Path:
        """Return the C program ``text``, compiled for numbers of ``dtype``; each text is compiled once."""
        binary = self.folder / f"chunked {dtype} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        if not binary.exists():
            path = binary.with_suffix(".c")
            path.write_text(text)
            real = "double" if dtype == "float64" else "float"
            subprocess.run([*self.COMPILED[2], f"-DREAL={real}", "-o", str(binary), str(path), "-lm"], check=True, timeout=120)
        return binary


missing = FourteenthBed.missing
