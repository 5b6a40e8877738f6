"""What the sets from the eighth on share: three programs, of which one is compiled and one runs in node, and their files."""

from __future__ import annotations

import random
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import save_file

from .bed import Bed, Shape

Arrays = dict[str, np.ndarray]
KINDS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


def flat(arrays: Mapping[str, np.ndarray], layers: int, sizes: Iterable[int], by_kind: bool = True) -> bytes:
    """Return a file of weights for C: sizes in int32, the embeddings, blocks by kind of tensor or layer by layer, ln_f."""
    kinds = [f"{kind}.{leaf}" for kind in KINDS for leaf in ("weight", "bias")]
    order = [(n, kind) for kind in kinds for n in range(layers)]
    names = [f"h.{n}.{kind}" for n, kind in (order if by_kind else sorted(order, key=lambda each: each[0]))]
    floats = [arrays[name].astype("<f4") for name in ("wte.weight", "wpe.weight", *names, "ln_f.weight", "ln_f.bias")]
    return np.array([*sizes], "<i4").tobytes() + b"".join(one.tobytes() for one in floats)


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
    WEIGHTS: ClassVar[Mapping[str, Any] | None] = None  # sizes and order of ``weights.bin``, which a compiled program may read

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        for name in ("wte.weight", "wpe.weight"):
            self.weights[name] *= np.float32(self.TABLES)
        save_file(self.weights, self.model / "model.safetensors", metadata={"format": "pt"})
        for name, rows in (("row.txt", self.ids[:1]), ("rows.txt", self.ids)):
            (folder / name).write_text("\n".join(" ".join(map(str, row)) for row in rows) + "\n")
        if self.WEIGHTS:
            known = {"width": shape.width, "vocab": shape.vocab, "rows": len(self.ids)}
            sizes = [known[size] for size in self.WEIGHTS["sizes"]]
            content = flat(self.weights, shape.layers, sizes, self.WEIGHTS["order"] == "kinds")
            (folder / "weights.bin").write_bytes(content)

    @classmethod
    def missing(cls, program: str) -> str | None:
        """What the machine lacks for ``program``, or None."""
        needed = {cls.COMPILED[0]: cls.COMPILED[2][0], cls.NODE[0]: "node"}.get(program)
        return f"no {needed} on this machine" if needed and not shutil.which(needed) else None

    def weights_file(self, program: str) -> Path:
        """Return the file of weights that a compiled program, or one in node, is given."""
        return self.folder / "weights.bin" if self.WEIGHTS and program == self.COMPILED[0] else self.model / "model.safetensors"

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


class Written:
    """A set of programs: what ``set.toml`` says beside ``file``, the set's module, whose function ``run`` is the NumPy program.

    ``LISTS``: a program's faults with the ids of right answers, a place ("" if not given) and the wrong line; ``FAULTS``: with
    their ids; ``DUMPS``: how a program shows its values, as :class:`support.programs.checked.Dump` takes it.
    """

    def __init__(self, file: str, run: Callable[..., Arrays]) -> None:
        folder = Path(file).parent
        found = tomllib.loads((folder / "set.toml").read_text())
        programs = {name: one for name, one in found.items() if isinstance(one, dict) and "faults" in one}
        self.LISTS, self.PAIRS = {}, {}
        for name, program in programs.items():
            rows = {fault: [row, "", fault] if isinstance(row, str) else row for fault, row in program["faults"].items()}
            self.LISTS[name] = {fault: (tuple(ids.split()), place, line) for fault, (ids, place, line) in rows.items()}
            drawn = () if "pairs" in program else pairs(self.LISTS[name], f"{found['pairs_drawn_with']} {name}")
            self.PAIRS[name] = [tuple(pair) for pair in program.get("pairs", drawn)]
        self.FAULTS = {name: {fault: ids for fault, (ids, _, _) in faults.items()} for name, faults in self.LISTS.items()}
        self.SHAPES = tuple(Shape(*shape) for shape in found["shapes"])
        self.DUMPS = {name: program["dump"] for name, program in programs.items()}
        numpy, compiled, node = programs

        class Bed(FileBed):
            """The models and programs of this set."""

            TABLES = 0.5
            NUMPY = numpy, run
            COMPILED = compiled, folder / programs[compiled]["source"], tuple(programs[compiled]["compiler"])
            COMPILED_ROWS = programs[compiled].get("rows", False)
            NODE = node, folder / programs[node]["source"]
            ONE_A_BLOCK: ClassVar = {name: program["one_a_block"] for name, program in programs.items()}
            NOT_DUMPED: ClassVar = found["not_dumped"]
            WEIGHTS: ClassVar = found.get("weights")

        self.BED = Bed
