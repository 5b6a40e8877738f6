"""A random model of trained size in a folder, for programs to run on, and what a program shows as a dump."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


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
    """A random model of trained size in a folder, in the official layout, and ids for the programs to run on."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder, self.shape = folder, shape
        draw = np.random.default_rng(shape.seed)
        width = shape.width

        def matrix(*size: int, spread: float) -> np.ndarray:
            return (spread * draw.standard_normal(size)).astype(np.float32)

        w = {"wte.weight": matrix(shape.vocab, width, spread=0.3), "wpe.weight": matrix(shape.context, width, spread=0.2)}
        norms = ["ln_f"]
        for n in range(shape.layers):
            norms += [f"h.{n}.ln_1", f"h.{n}.ln_2"]
            for name, rows, into in (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)):
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

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The ids that ``program`` ran on, and every value by its own name; it computes in ``dtype``."""
        raise NotImplementedError

    def one_a_block(self, program: str, seed: int) -> str:
        """The name of the tensor that a dump of one a block holds."""
        raise NotImplementedError

    def dump(self, program: str, faults: Iterable[str], level: str, dtype: str, seed: int) -> Path:
        """Write what ``program`` shows at ``level`` as ``dtype``, under shuffled names that say nothing, with foreign arrays."""
        ids, kept = self.run(program, faults, "float64" if dtype == "float64" else "float32")
        if level == "block":
            part = self.one_a_block(program, seed)
            kept = {
                name: a for name, a in kept.items() if name.partition(" ")[2].removesuffix(" again") == part or name == "logits"
            }
        if level == "logits":
            kept = {"logits": kept["logits"]}
        draw = np.random.default_rng(seed)
        with np.errstate(over="ignore"):  # a mask of -1e9 in float16
            arrays = [array.astype(dtype) for array in kept.values()]
        tokens = self.shape.tokens
        arrays += [np.tri(tokens), draw.standard_normal((tokens, 7)), np.arange(tokens), draw.standard_normal(5).astype(dtype)]
        names = [f"t{number:03d}" for number in range(len(arrays))]
        draw.shuffle(names)
        path = self.folder / f"dump{seed}.npz"
        order = draw.permutation(len(arrays))
        np.savez(path, ids=ids, **{names[number]: arrays[number] for number in order})
        return path
