"""The faulty modules in the form of a set of programs, of which only the logits are seen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from support.ports import logits

from . import CONFIG, LINES, Faulty, write

__all__ = ["FAULTS", "SHAPES", "Bed"]

CALLS = ("cache", "padding", "dropout", "noise", "counts", "batch-", "padded", "ffn-dropout")  # not seen in one forward pass
SHAPES = (5, 6)  # seeds of the ids
FAULTS = {
    name: {
        line: Faulty(name, line).causes[line.partition("@")[0]]
        for line in lines
        if len(line.split()) == 1 and not line.startswith(CALLS)
    }
    for name, lines in LINES.items()
    if name != "compiled"  # the same code as another, and takes long to compile
}
LEVELS = ("logits",)


def missing(program: str) -> None:
    """Torch is always there."""


class Bed:
    """A random model and ids; the ports compute in float32 or float64."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.model = write(folder, CONFIG)
        self.ids = torch.randint(CONFIG.vocab_size, (2, 12), generator=torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The ids, and the logits of the architecture ``program`` with ``faults``."""
        module = Faulty(program, " ".join(faults)).build(CONFIG, self.model).to(getattr(torch, dtype))
        return self.ids.numpy(), {"logits": logits(module, self.ids, CONFIG.vocab_size).numpy()}

    def dump(self, program: str, faults: Iterable[str], level: str, dtype: str, seed: int) -> Path:
        """Write the logits as ``dtype``."""
        assert level == "logits"
        ids, kept = self.run(program, faults, "float64" if dtype == "float64" else "float32")
        path = self.folder / f"dump{seed}.npz"
        np.savez(path, ids=ids, logits=kept["logits"].astype(dtype))
        return path
