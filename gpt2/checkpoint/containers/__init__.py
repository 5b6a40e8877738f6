"""The interface of every weights container: open it for each tensor's name, dtype and shape; then read its data.

Each module here reads one container, and checks everything in the file before using it.
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

# The largest GPT-2 has 580 tensors and a header of 60 kB; megabytes are an attack on the JSON parser.
HEADER_LIMIT = 4_000_000
OLD_GGML = "is a file of ggml's from before GGUF, which is not read; give the checkpoint that it was made from"
# First bytes of other formats, and what to say about them.
OTHER_FORMATS = (
    (b"version https://git-lfs", "is a git-lfs pointer, not the file it points to; run `git lfs pull`"),
    (b"PK\x03\x04", "was written by torch.save; convert it to safetensors (transformers' save_pretrained does)"),
    (b"\x80", "is a pickle; convert it to safetensors (transformers' save_pretrained does)"),
    (b"GGUF", "is a GGUF file; name it .gguf"),
    *((magic, OLD_GGML) for magic in (b"lmgg", b"fmgg", b"tjgg")),
    (b"<", "is a web page; fetch the file itself"),
    (b"\x1f\x8b", "is compressed by gzip; unpack it"),
)


class Damaged(ValueError):
    """A damaged or contradictory file. The message continues the file's name: "is cut short"."""


class Refused(Damaged):
    """A file that is whole, and not read; the message also says what to do."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, as it will be read; ``start`` and ``end`` are byte offsets in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class Container(ABC):
    """An open file (or set of files) of tensors, its directory checked. Raises CheckpointError: damaged, or not read."""

    kind: str
    entries: Mapping[str, Entry]
    notes: tuple[str, ...] = ()  # what a reader should know of the file
    plain: bool = True  # nothing is around or beside the tensors

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, MappedFile(path)
        try:
            if not self._file.size:
                raise Damaged("is empty")
            self.entries = self._directory()
        except Damaged as error:
            advice = "" if isinstance(error, Refused) else f"; not a whole {self.kind} file, fetch it again"
            raise CheckpointError(f"{path}: {error}{advice}") from None

    @abstractmethod
    def _directory(self) -> Mapping[str, Entry]:
        """Return every tensor of the file. Raises Damaged or Refused."""

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        """Return one contiguous CPU tensor. Raises CheckpointError: damaged data.

        As stored, it is a copy-on-write view of the mapped file if aligned and ``mapped``. With ``dtype`` it is converted.
        """
        entry = self.entries[name]
        return self._file.tensor(entry.start, entry.shape, entry.dtype, dtype, mapped=mapped)


def refuse_other_format(file: MappedFile) -> None:
    """Raise CheckpointError if a file begins like another format."""
    head = file.bytes(0, 32)
    for start, what in OTHER_FORMATS:
        if head.startswith(start):
            raise CheckpointError(f"{file.path}: {what}")


def countable(shape: Iterable[int]) -> bool:
    """Return whether torch can hold this shape. torch multiplies the other sizes even if one is zero."""
    return math.prod(n or 1 for n in shape) < 1 << 48


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON object from an untrusted file, or raise CheckpointError."""
    file = MappedFile(path)
    if file.size > HEADER_LIMIT:
        raise CheckpointError(f"{path}: is {file.size:,} bytes, and a checkpoint's JSON has a few thousand; fetch it again")
    try:
        value = json.loads(file.bytes(0, file.size).decode())
    except (ValueError, RecursionError) as error:
        refuse_other_format(file)
        raise CheckpointError(f"{path}: is not JSON ({str(error)[:80]}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object; fetch it again")
    return value


def shown(name: str) -> str:
    """Format an untrusted name for a message: quoted and shortened unless it looks like a tensor's or file's name."""
    return name if re.fullmatch(r"[\w./-]{1,80}", name, re.ASCII) else quoted(name)


def listed(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + more
