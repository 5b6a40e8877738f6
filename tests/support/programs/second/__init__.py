"""A second set of programs that are almost GPT-2, written after the engine that diagnoses them and not used to develop it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..bed import Bed, Shape
from . import cached, columns

NESTED = {
    "silu": ("gelu-variant",),
    "root missing": ("gelu-variant",),
    "rms": ("rmsnorm",),
    "no eps": ("layernorm-eps",),
    "eps 1e-3": ("layernorm-eps",),
    "not normalised": ("layernorm-not-normalising",),
    "embedding doubled": ("embedding-scaled",),
    "no positions": ("position-missing",),
    "position 3": ("position-offset",),
    "sines": ("position-sinusoidal",),
    "no bias of qkv": ("missing-bias",),
    "order k q v": ("qkv-order",),
    "order v k q": ("qkv-order",),
    "rows of units": ("head-layout",),
    "unscaled": ("scale-missing",),
    "size not rooted": ("scale-twice",),
    "strict": ("mask-strict",),
    "one ahead": ("mask-off-by-one",),
    "mask after": ("mask-multiplied", "mask-missing", "softmax-axis"),
    "all seen": ("mask-missing",),
    "projection left out": ("output-projection-missing",),
    "stream doubled": ("residual-scaled",),
    "no skip": ("residual-missing",),
    "side by side": ("parallel-block",),
    "ln_1 again": ("wrong-tensor", "norms-swapped"),
    "no last bias": ("missing-bias",),
    "skip from norm": ("residual-from-normed",),
    "no final norm": ("final-norm-missing",),
    "cold": ("logits-scaled",),
}
FAULTS: dict[str, dict[str, tuple[str, ...]]] = {"columns": columns.FAULTS, "cached": cached.FAULTS, "nested": NESTED}
ONE_A_BLOCK = {"columns": "block", "cached": "middle", "nested": "block"}


SHAPES = (
    Shape(2, 36, 3, 97, 20, 12, 71),
    Shape(3, 32, 4, 83, 24, 13, 72),
    Shape(2, 48, 6, 109, 17, 10, 73),
)


def missing(program: str) -> str | None:
    """What the machine lacks for ``program``, or None."""
    return None if program != "nested" or shutil.which("node") else "no node on this machine"


class SecondBed(Bed):
    """The models and programs of this set."""

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The ids that ``program`` ran on, and every value by its own name; ``nested`` always computes in float64."""
        if program != "nested":
            module = {"columns": columns, "cached": cached}[program]
            return self.ids[0], module.run(self.weights, self.shape.heads, self.ids[0], set(faults), dtype)
        node = shutil.which("node")
        assert node is not None
        given, out = self.folder / "given.json", self.folder / "out.json"
        weights = {name: array.tolist() for name, array in self.weights.items()}
        asked = {"weights": weights, "heads": self.shape.heads, "batch": self.ids.tolist(), "faults": list(faults)}
        given.write_text(json.dumps(asked))
        script = Path(__file__).with_name("nested.js")
        subprocess.run([node, str(script), str(given), str(out)], check=True, timeout=60)
        return self.ids, {name: np.array(rows) for name, rows in json.loads(out.read_text()).items()}

    def one_a_block(self, program: str, seed: int) -> str:
        return ONE_A_BLOCK[program]
