"""A random model of trained size in a folder, for programs to run on, and what a program shows as a dump."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from safetensors.numpy import save_file

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


class Bed:
    """A random model of trained size in a folder, in the official layout, and ids for the programs to run on.

    A set of programs says what each of them runs; ``ONE_A_BLOCK``: which of a program's tensors may be the one of each block;
    ``NOT_DUMPED``: what an author leaves out, from one dump to the next.
    """

    TABLES: ClassVar[float] = 1.0  # what both embeddings are multiplied by
    ONE_A_BLOCK: ClassVar[Mapping[str, tuple[str, ...]]]
    NOT_DUMPED: ClassVar[tuple[tuple[str, ...], ...]]

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder, self.shape = folder, shape
        draw = np.random.default_rng(shape.seed)
        width = shape.width

        def matrix(*size: int, spread: float) -> np.ndarray:
            return (spread * draw.standard_normal(size)).astype(np.float32)

        w = {"wte.weight": matrix(shape.vocab, width, spread=0.3), "wpe.weight": matrix(shape.context, width, spread=0.2)}
        norms = ["ln_f"]
        for n in range(shape.layers):
            norms += [f"h.{n}.{name}" for name in NORMS]
            for name, (rows, into) in MATRICES.items():
                spread = 1.3 / np.sqrt(rows * width)
                w[f"h.{n}.{name}.weight"] = matrix(rows * width, into * width, spread=spread)
                w[f"h.{n}.{name}.bias"] = matrix(into * width, spread=0.2)
        for name in norms:
            w[f"{name}.weight"], w[f"{name}.bias"] = 1 + matrix(width, spread=0.25), matrix(width, spread=0.15)
        for name in ("wte.weight", "wpe.weight"):
            w[name] *= np.float32(self.TABLES)
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
        raise NotImplementedError

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
