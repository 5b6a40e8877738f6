"""``ct2/DIR``: a folder that CTranslate2's converter wrote, run by CTranslate2."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2.comparison.sides.engine import EngineSide
from gpt2.errors import InputError


@dataclass(eq=False)
class CTranslate2Side(EngineSide):
    prefix, package, module, extra = "ct2/", "ctranslate2", "ctranslate2", "ctranslate2"

    def located(self) -> Path:
        file = self.path / "model.bin"
        if not file.is_file():
            raise InputError(f"{self.name}: there is no {file}; give the folder that ct2-transformers-converter wrote")
        return self.path

    @property
    def parts(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.path / "model.bin", self.path / "config.json") if path.is_file())

    @property
    def vocab_size(self) -> int | None:
        for name in ("vocabulary.json", "vocabulary.txt"):
            if (file := self.path / name).is_file():
                return len(self.ask(partial(_entries, file)))
        return None

    def load(self, stack: ExitStack) -> Any:
        threads = torch.get_num_threads()  # "default" keeps the type of the stored weights
        load = self.engine().Generator
        return self.ask(lambda: load(str(self.path), compute_type="default", intra_threads=threads))

    def run(self, ids: Tensor) -> Tensor:
        advice = "give a shorter context, as in --on TEXT:context=512"
        return torch.from_numpy(np.array(self.ask(lambda: self.program.forward_batch(ids.tolist()), advice)))


def _entries(file: Path) -> Any:
    text = file.read_text(encoding="utf-8")
    return json.loads(text) if file.suffix == ".json" else text.splitlines()
