"""What the sets from the eighth on share: three programs, of which one is compiled and one runs in node, and their files."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
from safetensors.numpy import save_file

from .bed import Bed, Shape

Arrays = dict[str, np.ndarray]


def pairs(faults: Mapping[str, tuple[object, str, str]], seed: str, number: int = 8) -> list[tuple[str, str]]:
    """``number`` pairs of a program's ``faults`` (ids, place, line) that stand in different lines of it, drawn with ``seed``."""
    draw, found = random.Random(seed), list[tuple[str, str]]()
    while len(found) < number:
        one, other = sorted(draw.sample(sorted(faults), 2))
        if faults[one][2] != faults[other][2] and (one, other) not in found:
            found.append((one, other))
    return found


class FileBed(Bed):
    """A random model whose tables are as small as trained ones, and ids, as files that the programs of a set read.

    A set gives the names of its programs with what runs them; ``ONE_A_BLOCK``: which tensors may be the one of each block, by
    program; ``NOT_DUMPED``: what an author leaves out, from one dump to the next.
    """

    TABLES: ClassVar[float]  # what both embeddings are multiplied by
    NUMPY: ClassVar[tuple[str, Callable[..., Arrays]]]
    COMPILED: ClassVar[tuple[str, Path, tuple[str, ...]]]  # the source, and the compiler's command without files
    COMPILED_ROWS: ClassVar[bool] = False  # the compiled program takes all rows, not one
    NODE: ClassVar[tuple[str, Path]]
    ONE_A_BLOCK: ClassVar[dict[str, tuple[str, ...]]]
    NOT_DUMPED: ClassVar[tuple[tuple[str, ...], ...]]

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        for name in ("wte.weight", "wpe.weight"):
            self.weights[name] *= np.float32(self.TABLES)
        save_file(self.weights, self.model / "model.safetensors", metadata={"format": "pt"})
        for name, rows in (("row.txt", self.ids[:1]), ("rows.txt", self.ids)):
            (folder / name).write_text("\n".join(" ".join(map(str, row)) for row in rows) + "\n")

    @classmethod
    def missing(cls, program: str) -> str | None:
        """What the machine lacks for ``program``, or None."""
        needed = {cls.COMPILED[0]: cls.COMPILED[2][0], cls.NODE[0]: "node"}.get(program)
        return f"no {needed} on this machine" if needed and not shutil.which(needed) else None

    def weights_file(self, program: str) -> Path:
        """Return the file of weights that a compiled program, or one in node, is given."""
        return self.model / "model.safetensors"

    def switches(self, faults: Iterable[str]) -> set[str]:
        """Return the programs' own names of ``faults``."""
        return set(faults)

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, Arrays]:
        shape, given = self.shape, self.switches(faults)
        if program == self.NUMPY[0]:
            with np.errstate(over="ignore"):
                return self.ids, self.NUMPY[1](self.model, self.ids, shape.layers, shape.heads, given, dtype)
        out = self.folder / f"out of {program}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        compiled = program == self.COMPILED[0]
        one_row = compiled and not self.COMPILED_ROWS
        ids = self.folder / ("row.txt" if one_row else "rows.txt")
        files = [str(self.weights_file(program)), str(ids), str(out), ";" + ";".join(sorted(given)) + ";"]
        if compiled:
            command = [str(self.compiled(dtype)), *files, str(shape.layers), str(shape.heads), str(shape.context)]
        else:
            command = ["node", str(self.NODE[1]), *files, str(shape.heads), dtype]
        subprocess.run(command, check=True, timeout=60)
        return self.ids[0] if one_row else self.ids, {path.stem: np.load(path) for path in sorted(out.iterdir())}

    def compiled(self, dtype: str) -> Path:
        name, source, compiler = self.COMPILED
        binary = self.folder / f"{name} {dtype}"
        if not binary.exists():
            real = "double" if dtype == "float64" else "float"
            subprocess.run([*compiler, f"-DREAL={real}", "-o", str(binary), str(source), "-lm"], check=True, timeout=120)
        return binary

    def dump(self, program: str, faults: Iterable[str], level: str, dtype: str, seed: int) -> Path:
        left_out = self.NOT_DUMPED[seed % 5] if level == "full" else ()
        run = self.run

        def shown(*given: object) -> tuple[np.ndarray, Arrays]:
            ids, kept = run(*given)
            return ids, {name: a for name, a in kept.items() if name.partition(" ")[2] not in left_out}

        self.run = shown
        try:
            return super().dump(program, faults, level, dtype, seed)
        finally:
            del self.run

    def one_a_block(self, program: str, seed: int) -> str:
        return self.ONE_A_BLOCK[program][seed % 6]
