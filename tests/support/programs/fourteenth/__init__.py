"""A fourteenth set of programs and mistakes, chosen by kind, by an author who knew neither the engine nor its results."""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from safetensors.numpy import save_file

from support.patches import patched

__all__ = ["FAULTS", "LISTS", "SHAPES", "FourteenthBed", "Shape", "source"]

Arrays = dict[str, np.ndarray]
NORMS, MATRICES = ("ln_1", "ln_2"), {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    tokens: int
    seed: int


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


class FourteenthBed:
    """A random model of trained size in a folder, in the official layout, ids for the programs to run on, and what they show.

    ``ONE_A_BLOCK``: which of a program's tensors may be the one of each block; ``NOT_DUMPED``: what an author leaves out.
    """

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
        self.folder, self.shape = folder, shape
        draw = np.random.default_rng(shape.seed)
        width = shape.width

        def matrix(*size: int, spread: float) -> np.ndarray:
            return (spread * draw.standard_normal(size)).astype(np.float32)

        w = {"wte.weight": matrix(shape.vocab, width, spread=0.15), "wpe.weight": matrix(shape.context, width, spread=0.1)}
        norms = ["ln_f"]
        for n in range(shape.layers):
            norms += [f"h.{n}.{name}" for name in NORMS]
            for name, (rows, into) in MATRICES.items():
                spread = 1.3 / np.sqrt(rows * width)
                w[f"h.{n}.{name}.weight"] = matrix(rows * width, into * width, spread=spread)
                w[f"h.{n}.{name}.bias"] = matrix(into * width, spread=0.2)
        for name in norms:
            w[f"{name}.weight"], w[f"{name}.bias"] = 1 + matrix(width, spread=0.25), matrix(width, spread=0.15)
        self.weights = w
        self.ids = draw.integers(0, shape.vocab, (2, shape.tokens))
        self.model = folder / "model"
        self.model.mkdir(parents=True)
        save_file(w, self.model / "model.safetensors", metadata={"format": "pt"})
        config = {"model_type": "gpt2", "n_layer": shape.layers, "n_embd": width, "n_head": shape.heads}
        config |= {"vocab_size": shape.vocab, "n_positions": shape.context, "n_ctx": shape.context}
        config |= {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
        (self.model / "config.json").write_text(json.dumps(config))

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, Arrays]:
        """The ids that ``program`` ran on, and every value by its own name; it computes in ``dtype``."""
        names: dict[str, object] = {"__name__": program}
        exec(compile(source(program, faults), f"{program}.py", "exec"), names)
        with np.errstate(over="ignore"):
            return self.ids, names["run"](self.model, self.ids, self.shape.layers, self.shape.heads, dtype)  # type: ignore[operator]

    def dump(self, program: str, faults: Iterable[str], level: str, dtype: str, seed: int) -> Path:
        """Write what ``program`` shows at ``level`` as ``dtype``, under shuffled names that say nothing, with foreign arrays."""
        ids, kept = self.run(program, faults, "float64" if dtype == "float64" else "float32")
        part = self.ONE_A_BLOCK[program][seed % 6]
        shown = {
            "full": lambda name: name.partition(" ")[2] not in self.NOT_DUMPED[seed % 5],
            "block": lambda name: name.partition(" ")[2] == part or name == "logits",
            "logits": lambda name: name == "logits",
        }[level]
        draw = np.random.default_rng(seed)
        with np.errstate(over="ignore"):  # a mask of -1e9 in float16
            arrays = [array.astype(dtype) for name, array in kept.items() if shown(name)]
        tokens = self.shape.tokens
        arrays += [np.tri(tokens), draw.standard_normal((tokens, 7)), np.arange(tokens), draw.standard_normal(5).astype(dtype)]
        names = [f"t{number:03d}" for number in range(len(arrays))]
        draw.shuffle(names)
        path = self.folder / f"dump{seed}.npz"
        order = draw.permutation(len(arrays))
        np.savez(path, ids=ids, **{names[number]: arrays[number] for number in order})
        return path
