"""What every container of weights offers: the name, dtype and shape of each tensor when it is opened, its data when it is read.

Each module beside this one reads one container, and checks everything that its file says before it uses it.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers.mapped_file import MappedFile
from gpt2.config import quoted
from gpt2.errors import CheckpointError

# The largest GPT-2 has 580 tensors and 60 kB of header; a header of megabytes is an attack on the JSON parser.
HEADER_LIMIT = 4_000_000
# How files of other formats begin, what they are, and what to do.
OTHER_FORMATS = (
    (b"version https://git-lfs", "is a git-lfs pointer, not the file it points to; run `git lfs pull`"),
    (b"PK\x03\x04", "was written by torch.save; convert it to safetensors (transformers' save_pretrained does)"),
    (b"\x80", "is a pickle; convert it to safetensors (transformers' save_pretrained does)"),
    (b"GGUF", "is a GGUF file; name it .gguf"),
    (b"<", "is a web page; fetch the file itself"),
    (b"\x89HDF", "is an HDF5 file (Keras); give the PyTorch or safetensors one"),
    (b"\x1f\x8b", "is compressed by gzip; unpack it"),
)


class Damaged(ValueError):
    """A file is damaged or contradicts itself. The message follows the file's name: "is cut short"."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, as it will be read; ``start`` and ``end`` count bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class Container(ABC):
    """An open file (or set of files) of tensors, its directory checked; it stays open, so that all is read from one file.

    ``kind`` is the format's name, for `gpt2 info`; ``entries`` has every tensor by its name in the file. Raises CheckpointError:
    the file cannot be read, is damaged, contradicts itself, or holds what this project does not read.
    """

    kind: str
    entries: Mapping[str, Entry]

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, MappedFile(path)
        try:
            if not self._file.size:
                raise Damaged("is empty")
            self.entries = self._directory()
        except Damaged as error:
            raise CheckpointError(f"{path}: {error}; not a whole {self.kind} file, fetch it again") from None

    @abstractmethod
    def _directory(self) -> Mapping[str, Entry]:
        """Every tensor of the file; raises Damaged or CheckpointError."""

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        """One tensor on the CPU, contiguous, as stored or converted to ``dtype``. Raises CheckpointError: the data is damaged.

        As stored, it is a view of the mapped file, private to this process when written to, unless the data is not aligned or
        ``mapped`` is false: then it is read into memory of its own. A conversion goes piece by piece.
        """
        entry = self.entries[name]
        return self._file.tensor(entry.start, entry.shape, entry.dtype, dtype, mapped=mapped)


def refuse_other_format(file: MappedFile) -> None:
    """Raise CheckpointError where a file begins as one of another format does."""
    head = file.bytes(0, 32)
    for start, what in OTHER_FORMATS:
        if head.startswith(start):
            raise CheckpointError(f"{file.path}: {what}")


def countable(shape: Iterable[int]) -> bool:
    """Whether torch can hold a tensor of this shape. torch multiplies the other sizes even where one is zero."""
    return math.prod(n or 1 for n in shape) < 1 << 48


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object from outside, or a CheckpointError."""
    file = MappedFile(path)
    if file.size > HEADER_LIMIT:
        raise CheckpointError(f"{path}: is {file.size:,} bytes, and a checkpoint's JSON has a few thousand; fetch it again")
    try:
        value = json.loads(file.bytes(0, file.size).decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({str(error)[:80]}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object; fetch it again")
    return value


def shown(name: str) -> str:
    """A name from outside, for a message: bare if it looks like a tensor's or a file's, else quoted and cut."""
    return name if re.fullmatch(r"[\w./-]{1,80}", name, re.ASCII) else quoted(name)


def listed(names: list[str], limit: int = 4) -> str:
    """The first few of many names, and how many more."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + more
