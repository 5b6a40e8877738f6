"""What every weights container shares: a file, mapped or read; the interface; checks of what a file says.

Each module here reads one container, and checks everything in the file before using it. A mapped file is read when its weights
are used. If another process truncates it before, Linux and macOS end this process with SIGBUS (exit code 135), which Python
cannot catch. So :func:`require_whole_files` checks the sizes before and within long jobs; a truncation between two checks still
ends the process. A conversion to another dtype maps nothing.
"""

import math
import mmap
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpt2.config import quoted
from gpt2.data import files
from gpt2.data.files import link_to_nothing, opened, reading
from gpt2.errors import CheckpointError, InputError

T = TypeVar("T")

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
    *((start, "is a web page; fetch the file itself") for start in (b"<!", b"<h", b"<H", b"<?")),
    (b"\x1f\x8b", "is compressed by gzip; unpack it"),
)
PIECE = 1 << 21  # bytes converted at a time
_MAPPINGS: weakref.WeakKeyDictionary[mmap.mmap, Path] = weakref.WeakKeyDictionary()  # all mappings of this process


def require_whole_files() -> None:
    """Raise CheckpointError if a mapped file was truncated: reading the missing part would end the process."""
    for mapping, path in list(_MAPPINGS.items()):
        _require_whole(mapping, path)


def whole(tensors: Iterable[T]) -> Iterator[T]:
    """Yield tensors, with :func:`require_whole_files` before each."""
    for each in tensors:
        require_whole_files()
        yield each


def _require_whole(mapping: mmap.mmap, path: Path) -> None:
    if mapping.size() < len(mapping):
        left = f"{mapping.size():,} of {len(mapping):,} bytes are left"
        raise CheckpointError(f"{path}: was cut short while it is in use ({left}); bring the file back and start again")


class MappedFile:
    """An open file that gives tensors, also after another file replaced it. Raises CheckpointError: it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file: FileIO = opened(path, buffering=0)  # closed by the finalizer
            weakref.finalize(self, self.file.close)
            self.size = self.file.seek(0, 2)
        except OSError as error:
            gone = link_to_nothing(path)
            what = f" is {gone}" if gone else f": cannot be read ({error.strerror}); check that it is there, and yours to read"
            raise CheckpointError(f"{path}{what}") from None

    def bytes(self, start: int, count: int) -> bytes:
        """Read up to ``count`` bytes from ``start``; none if ``start`` is outside the file."""
        if not 0 <= start < self.size:
            return b""
        with reading(self.path, "check its disk", CheckpointError):
            self.file.seek(start)
            return self.file.read(min(count, self.size - start))

    def tensor(
        self, start: int, shape: tuple[int, ...], stored: torch.dtype, dtype: torch.dtype | None = None, *, mapped: bool = True
    ) -> Tensor:
        """Return a contiguous tensor of the ``stored`` values at byte ``start``; see :meth:`Container.read`."""
        dtype, count = dtype or stored, math.prod(shape)
        aligned = start % stored.itemsize == 0
        if mapped and count and aligned and dtype == stored and self._mapping is not None:
            _require_whole(self._mapping, self.path)
            # Not a slice of one storage: pickling one tensor would write the whole file.
            return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=start).view(shape)
        tensor = torch.empty(shape, dtype=dtype)
        flat = tensor.view(-1)
        self.file.seek(start)
        if dtype == stored:
            self._fill(flat)
        else:
            piece = self._scratch.view(stored)
            for first in range(0, count, len(piece)):
                part = piece[: count - first]
                self._fill(part)
                flat[first : first + len(piece)] = part
        return tensor

    @cached_property
    def _mapping(self) -> mmap.mmap | None:
        """Map the file copy-on-write; None if that is impossible."""
        try:
            mapping = mmap.mmap(self.file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError):
            return None
        _MAPPINGS[mapping] = self.path
        return mapping

    @cached_property
    def _scratch(self) -> Tensor:
        """One buffer for all conversions: new ones would fragment malloc's heap by a sixth of the weights' size."""
        return torch.empty(PIECE, dtype=torch.uint8)

    def _fill(self, flat: Tensor) -> None:
        room = flat.view(torch.uint8).numpy().data
        while room:
            with reading(self.path, "check its disk", CheckpointError):
                count = self.file.readinto(room)
            if not count:
                raise CheckpointError(f"{self.path}: was cut short while it was read; fetch it again")
            room = room[count:]


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
    head, tar = file.bytes(0, 32), file.bytes(257, 5) == b"ustar"  # as NeMo's files
    other = "is a tar archive; unpack it" if tar else ""
    if what := next((what for start, what in OTHER_FORMATS if head.startswith(start)), other):
        raise CheckpointError(f"{file.path}: {what}")


def countable(shape: Iterable[int]) -> bool:
    """Return whether torch can hold this shape. torch multiplies the other sizes even if one is zero."""
    return math.prod(n or 1 for n in shape) < 1 << 48


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON object from an untrusted file, or raise CheckpointError."""
    try:
        value = files.read_json(path)
    except InputError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object; fetch it again")
    return value


def shown(name: str) -> str:
    """Format an untrusted name for a message: quoted and shortened unless it looks like a tensor's or file's name."""
    return name if re.fullmatch(r"[\w./-]{1,80}", name, re.ASCII) else quoted(name)


def listed(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + more
