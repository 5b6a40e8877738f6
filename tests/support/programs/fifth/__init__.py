"""A fifth set, written when the first four had been used to develop the engine: GPT-2 in Java and, with a cache, in NumPy.

Its faults are those that issues and pull requests of public ports tell of. With one tensor a block, it is another one in each
dump. A program without faults is right in another way from dump to dump.
"""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..bed import Bed, Shape
from . import sixty

JAVA = {
    "half as int": ("gelu-variant",),
    "root of pi alone": ("gelu-variant",),
    "gelu twice": ("gelu-variant",),
    "mean by 1 / C": ("rmsnorm",),
    "eps 1e-12": ("layernorm-eps",),
    "norm in place": ("residual-from-normed",),
    "second norm's slot": ("wrong-tensor", "norms-swapped"),
    "root as int": ("scale-wrong",),
    "unscaled": ("scale-missing",),
    "scale multiplied": ("scale-wrong",),
    "hidden is MIN_VALUE": ("mask-multiplied", "mask-missing"),
    "masked behind softmax": ("mask-multiplied", "mask-missing", "softmax-axis"),
    "t2 < t": ("mask-strict",),
    "t2 <= t + 1": ("mask-off-by-one",),
    "one head": ("head-layout",),
    "keys of head 0": ("head-layout",),
    "keys without offset": ("wrong-tensor", "qkv-order"),
    "values at C": ("value-projection-wrong", "qkv-order", "wrong-tensor"),
    "thirds within heads": ("head-layout", "qkv-order"),
    "written by head": ("head-layout",),
    "keys of the first sentence": ("batch-dependent", "wrong-tensor"),
    "row for position": ("position-offset", "position-missing", "batch-dependent"),
    "not projected": ("output-projection-missing",),
    "bias of projection unused": ("missing-bias",),
    "last projection unread": ("not-loaded",),
    "first residual again": ("residual-missing",),
    "loop ends early": ("layer-missing",),
    "bias stride C": ("wrong-tensor",),
    "feed stride C C": ("wrong-tensor",),
    "feeds exchanged": ("wrong-tensor",),
    "square not turned": ("transposed",),
    "qkv as it lies": ("transposed", "wrong-tensor"),
    "bfloat16 cut off": ("reduced-precision",),
    "four bits": ("reduced-precision",),
    "temperature 0.8": ("logits-scaled",),
}
FAULTS: dict[str, dict[str, tuple[str, ...]]] = {"java": JAVA, "sixty": sixty.FAULTS}
SHAPES = (Shape(2, 36, 3, 73, 25, 11, 101), Shape(3, 40, 5, 67, 24, 10, 102), Shape(11, 16, 2, 59, 20, 9, 103))
ONE_A_BLOCK = {
    "java": ("result", "middle", "proj", "fed", "att", "qkv"),
    "sixty": ("result", "middle", "fed", "present", "mixed", "active"),
}
KINDS = {"ln1": "ln_1", "qkv": "attn.c_attn", "proj": "attn.c_proj", "ln2": "ln_2", "fc": "mlp.c_fc", "fcproj": "mlp.c_proj"}


def missing(program: str) -> str | None:
    """What the machine lacks for ``program``, or None."""
    return None if program != "java" or (shutil.which("javac") and shutil.which("java")) else "no java and javac on this machine"


def read_arrays(path: Path, dtype: str) -> dict[str, np.ndarray]:
    """The arrays that a program wrote, in big-endian order: each one's name, shape and numbers in float64."""
    stream, kept = io.BytesIO(path.read_bytes()), {}
    while length := stream.read(2):
        name = stream.read(int.from_bytes(length)).decode()
        shape = struct.unpack(f">{(n := struct.unpack('>i', stream.read(4))[0])}i", stream.read(4 * n))
        kept[name] = np.frombuffer(stream.read(8 * int(np.prod(shape))), ">f8").astype(dtype).reshape(shape)
    return kept


class FifthBed(Bed):
    """A random model and ids, as :class:`Bed` has them, for both programs; they compute in float32 or float64."""

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, dict[str, np.ndarray]]:
        if program == "sixty":
            return self.ids, sixty.run(self.weights, self.shape.heads, self.ids, set(faults), dtype)
        given, out = self.folder / "in.bin", self.folder / "out.bin"
        if not given.exists():
            source = Path(__file__).with_name("Gpt2.java")
            subprocess.run(["javac", "-d", str(self.folder), str(source)], check=True, timeout=120)
            given.write_bytes(self.stacked())
        command = ["java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", str(self.folder), "Gpt2", str(given), str(out)]
        subprocess.run([*command, ";".join(faults), "single" if dtype == "float32" else "double"], check=True, timeout=60)
        return self.ids, read_arrays(out, dtype)

    def stacked(self) -> bytes:
        """The file that the Java program reads: sizes, ids, and the parameters of all blocks stacked by kind."""
        w, shape = self.weights, self.shape
        kinds = {"wte": w["wte.weight"], "wpe": w["wpe.weight"], "lnfw": w["ln_f.weight"], "lnfb": w["ln_f.bias"]}
        for short, name in KINDS.items():
            for letter, leaf in (("w", "weight"), ("b", "bias")):
                kinds[short + letter] = np.stack([w[f"h.{n}.{name}.{leaf}"] for n in range(shape.layers)])
        sizes = [*self.ids.shape, shape.width, shape.heads, shape.layers, shape.vocab, len(kinds)]
        head = np.array([*sizes, *self.ids.ravel()], ">i4").tobytes()
        parts = (struct.pack(">H", len(name)) + name.encode() + struct.pack(">i", a.size) for name, a in kinds.items())
        return head + b"".join(part + a.astype(">f4").tobytes() for part, a in zip(parts, kinds.values(), strict=True))

    def dump(self, program: str, faults: Iterable[str], level: str, dtype: str, seed: int) -> Path:
        if program == "sixty" and not list(faults):
            faults = sixty.HARMLESS[seed % 4 : seed % 4 + 1]
        return super().dump(program, faults, level, dtype, seed)

    def one_a_block(self, program: str, seed: int) -> str:
        return ONE_A_BLOCK[program][seed % 6]
