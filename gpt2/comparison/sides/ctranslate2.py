"""``ct2/DIR``: a folder that CTranslate2's converter wrote, run by CTranslate2."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gpt2.comparison.sides.engine import EngineSide, engine
from gpt2.comparison.sides.side import Running
from gpt2.errors import InputError

PREFIX = "ct2/"


@dataclass(frozen=True)
class CTranslate2Side(EngineSide):
    package: ClassVar[str] = "ctranslate2"

    @classmethod
    def open(cls, name: str) -> CTranslate2Side:
        path = Path(name.removeprefix(PREFIX)).expanduser()
        engine("ctranslate2", "ctranslate2", name)
        if not (path / "model.bin").is_file():
            raise InputError(f"{name}: there is no {path / 'model.bin'}; give the folder that ct2-transformers-converter wrote")
        return cls(name, path)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.path / "model.bin", self.path / "config.json") if path.is_file())

    @property
    def vocab_size(self) -> int | None:
        for name in ("vocabulary.json", "vocabulary.txt"):
            if (file := self.path / name).is_file():
                try:
                    text = file.read_text(encoding="utf-8")
                    return len(json.loads(text)) if name.endswith(".json") else len(text.splitlines())
                except (OSError, ValueError, TypeError) as error:
                    raise InputError(f"{file}: cannot be read ({error}); convert the model again") from None
        return None

    @contextmanager
    def running(self) -> Iterator[Running]:
        package = engine("ctranslate2", "ctranslate2", self.name)
        try:  # "default" keeps the type of the stored weights
            generator = package.Generator(str(self.path), compute_type="default", intra_threads=torch.get_num_threads())
        except (RuntimeError, ValueError) as error:
            raise InputError(f"{self.name}: CTranslate2 cannot open it ({error}); convert the model again") from None
        yield RunningGenerator(generator, self.name)


@dataclass(frozen=True)
class RunningGenerator(Running):
    generator: Any
    name: str

    def logits(self, ids: Tensor) -> Tensor:
        try:
            return torch.from_numpy(np.array(self.generator.forward_batch(ids.tolist())))
        except RuntimeError as error:
            raise InputError(f"{self.name}: {error}; give a shorter context, as in --on TEXT:context=512") from None
