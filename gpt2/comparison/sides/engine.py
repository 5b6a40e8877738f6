"""Shared by the sides that another program runs: the import of an optional package, the files, the tokenizer."""

from __future__ import annotations

import hashlib
import importlib
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gpt2.comparison.sides.side import Shown, Side
from gpt2.data import Tokenizer, from_directory, holds_tokenizer
from gpt2.errors import InputError, user_path


@dataclass(eq=False)
class EngineSide(Side):
    """A file or folder that another program runs. It shows logits.

    It is asked one row at a time, as people run it: int8 engines choose a scale for the whole batch, so neighbours move a row.
    """

    name: str
    path: Path
    shows = frozenset({Shown.LOGITS})
    prefix: ClassVar[str]  # of the name
    package: ClassVar[str]  # on PyPI
    module: ClassVar[str]  # that is imported
    extra: ClassVar[str]  # of this project, which installs it
    otherwise: ClassVar[str] = ""  # what can be done without it
    wanted: ClassVar[str]  # what the user gives, in words
    batched: ClassVar[bool] = True  # whether it runs several rows together

    @classmethod
    def open(cls, name: str) -> Self:
        """Open a side by name. Raises InputError: the program is not installed, or there is no such model."""
        side = cls(name, user_path(name.removeprefix(cls.prefix)))
        side.engine()
        side.path = side.located()
        return side

    def engine(self) -> Any:
        """Import the program. Raises InputError, with the command that installs it, if it is not installed."""
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name != self.module:
                raise
            how = f"install it with pip install 'gpt2-toolkit[{self.extra}]'{self.otherwise}"
            raise InputError(f"{self.name}: needs the package {self.module}; {how}") from None

    def located(self) -> Path:
        """Return the model's file or folder. Raises InputError: it is not there."""
        if not self.path.is_file():
            raise InputError(f"{self.name}: {self.path} is not a file; give {self.wanted}")
        return self.path

    @property
    def files(self) -> dict[str, Path]:
        return {path.name: path for path in self.parts}

    @property
    def parts(self) -> tuple[Path, ...]:
        """The files of the model."""
        return (self.path,)

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.parts)

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @abstractmethod
    def run(self, ids: Tensor) -> Tensor:
        """Return what the program says of the rows of ``ids`` (B, T), run together."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.run(row[None]) for row in ids])

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer beside the model."""
        return from_directory(self.folder) if holds_tokenizer(self.folder) else None

    @property
    def implementation(self) -> str:
        with suppress(PackageNotFoundError):
            return f"{self.package} {version(self.package)}"
        return self.package


class EngineTokenizer(Tokenizer):
    """A tokenizer that lives in an engine: its entries as bytes, and its own encoding."""

    def __init__(self, tokens: list[bytes], encode: Callable[[str], list[int]], kind: str) -> None:
        super().__init__(dict(enumerate(tokens)))
        self._encode, self._kind = encode, kind

    @property
    def fingerprint(self) -> str:
        """Sha256 of the entries and the engine: two different tokenizers may only be compared on a text."""
        body = b"".join(len(token).to_bytes(4, "big") + token for token in self._bytes if token is not None)
        return hashlib.sha256(self._kind.encode() + b"\0" + body).hexdigest()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._encode(text)

    def texts(self, n_positions: int) -> dict[str, str | bytes]:
        raise InputError(f"{self._kind}: its tokenizer cannot be written as files; export the model that it was made from")
