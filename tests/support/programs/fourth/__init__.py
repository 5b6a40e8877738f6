"""A fourth set of programs, written when the first three had been used to develop the engine: GPT-2 in Rust, batch first.

With one tensor a block, it is another one in each dump: the block's result, the stream between the branches, a branch, the joined
heads, or the activations.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..bed import Bed, Shape

RUST = {
    "erf": ("gelu-variant",),
    "mish": ("gelu-variant",),
    "leaky": ("gelu-variant",),
    "cube outside": ("gelu-variant",),
    "not halved": ("gelu-variant",),
    "over tokens": ("layernorm-axis",),
    "root mean square": ("rmsnorm",),
    "bessel in the last norm": ("layernorm-unbiased-variance",),
    "eps 1e-6": ("layernorm-eps",),
    "eps a hundredth": ("layernorm-eps",),
    "eps behind the root": ("layernorm-eps",),
    "attention not normed": ("norm-missing",),
    "feed not normed": ("norm-missing",),
    "last norm twice": ("extra-norm",),
    "head on the stream": ("final-norm-missing",),
    "root of tokens": ("scale-wrong",),
    "root of width": ("scale-by-width",),
    "temperature": ("scale-wrong",),
    "by layer": ("scale-inverse-layer",),
    "upside down": ("mask-missing", "mask-strict", "softmax-axis"),
    "not itself": ("mask-strict",),
    "one ahead": ("mask-off-by-one",),
    "no mask": ("mask-missing",),
    "minus ten": ("mask-multiplied", "mask-missing"),
    "no softmax": ("softmax-missing",),
    "keys mixed": ("value-projection-wrong", "qkv-order", "wrong-tensor"),
    "value query key": ("qkv-order",),
    "thirds within heads": ("head-layout", "qkv-order"),
    "units before heads": ("head-layout",),
    "split as it lies": ("head-layout",),
    "merged by unit": ("head-layout",),
    "rotary": ("rotary-positions",),
    "attention not projected": ("output-projection-missing",),
    "projection without bias": ("missing-bias",),
    "qkv without bias": ("missing-bias",),
    "from two": ("position-offset",),
    "positions run on": ("position-offset", "batch-dependent"),
    "no positions": ("position-missing",),
    "embedding over root": ("embedding-scaled",),
    "branches by depth": ("residual-scaled",),
    "attention twice": ("residual-scaled",),
    "mean of stream and feed": ("residual-scaled",),
    "side by side": ("parallel-block",),
    "feed added to its norm": ("residual-from-normed",),
    "feed replaces": ("residual-missing",),
    "first block left out": ("layer-missing",),
    "last block twice": ("layer-repeated",),
    "logits over root": ("logits-scaled",),
    "log of chances": ("logits-softmaxed",),
    "padded vocabulary": ("padded-vocab",),
    "every block is the first": ("layer-repeated", "wrong-tensor"),
    "last two blocks exchanged": ("layer-order", "wrong-tensor"),
    "second norm of the block before": ("wrong-tensor",),
    "qkv bias of the last block": ("wrong-tensor",),
    "gain and shift exchanged": ("wrong-tensor",),
    "shift zero": ("missing-bias", "not-loaded"),
    "down bias zero": ("missing-bias", "not-loaded"),
    "gains one": ("not-loaded", "layernorm-without-affine"),
    "positions loaded backwards": ("wrong-tensor", "position-offset"),
    "tokens one row late": ("wrong-tensor",),
    "float16 matrices": ("reduced-precision",),
    "bfloat16 tables": ("reduced-precision",),
    "two decimals": ("reduced-precision",),
    "projection not turned": ("transposed",),
    "keys not turned": ("transposed",),
    "up as it lies": ("transposed",),
    "down as it lies in the last block": ("transposed",),
}
FAULTS: dict[str, dict[str, tuple[str, ...]]] = {"rust": RUST}
SHAPES = (Shape(2, 32, 4, 71, 26, 10, 91), Shape(3, 24, 2, 89, 22, 11, 92), Shape(4, 40, 5, 67, 24, 9, 93))
ONE_A_BLOCK = ("result", "middle", "branch", "fed", "joined", "active")
HERE = Path(__file__).parent


@functools.cache
def compiler() -> str | None:
    """The Rust compiler, if there is one that runs, and the C compiler with which it links."""
    folders = (None, str(Path.home() / ".cargo/bin"))
    rustc = next((found for folder in folders if (found := shutil.which("rustc", path=folder))), None)
    if rustc and shutil.which("cc") and subprocess.run([rustc, "--version"], capture_output=True, timeout=60).returncode == 0:
        return rustc
    return None


def missing(program: str) -> str | None:
    """What the machine lacks for ``program``, or None."""
    return None if compiler() else "no rustc that runs on this machine"


class RustBed(Bed):
    """A random model and ids, as :class:`Bed` has them, for the program in Rust; it computes in float32 or float64."""

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, dict[str, np.ndarray]]:
        binary, weights, ids = self.folder / dtype, self.folder / "weights.bin", self.folder / "ids.txt"
        if not binary.exists():
            rustc = compiler()
            assert rustc is not None
            single = ["--cfg", "single"] if dtype == "float32" else []
            command = [rustc, "--edition", "2021", "-O", "-D", "warnings", *single, "-o", str(binary), str(HERE / "gpt2.rs")]
            subprocess.run(command, check=True, timeout=120)
            rows = {name: np.atleast_2d(array) for name, array in self.weights.items()}
            head = "".join(f"{name} {array.shape[0]} {array.shape[1]}\n" for name, array in rows.items())
            weights.write_bytes(head.encode() + b"\n" + b"".join(array.astype("<f4").tobytes() for array in rows.values()))
            ids.write_text("".join(" ".join(map(str, row)) + "\n" for row in self.ids.tolist()))
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            heads = str(self.shape.heads)
            subprocess.run([str(binary), str(weights), str(ids), out, heads, ";".join(faults)], check=True, timeout=60)
            return self.ids, {file.stem: np.load(file) for file in sorted(Path(out).glob("*.npy"))}

    def one_a_block(self, program: str, seed: int) -> str:
        return ONE_A_BLOCK[seed % len(ONE_A_BLOCK)]
