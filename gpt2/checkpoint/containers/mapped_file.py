"""Memory-map a file of raw tensors, or read it if it cannot be mapped; convert a few megabytes at a time.

A mapped file is read when its weights are used. If another process truncates it before, Linux and macOS end this process with
SIGBUS (exit code 135), which Python cannot catch. So :func:`require_whole_files` checks the sizes before and within long jobs; a
truncation between two checks still ends the process. A conversion to another dtype maps nothing.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterable, Iterator
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from gpt2.data.files import link_to_nothing, opened
from gpt2.errors import CheckpointError

T = TypeVar("T")
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
        raise CheckpointError(
            f"{path}: was cut short while it is in use ({mapping.size():,} of {len(mapping):,} bytes are left); "
            "bring the file back and start again"
        )


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
            what = f"is {gone}" if gone else f"cannot be read ({error.strerror}); check that it is there, and yours to read"
            raise CheckpointError(f"{path}: {what}") from None

    def bytes(self, start: int, count: int) -> bytes:
        """Read up to ``count`` bytes from ``start``; none if ``start`` is outside the file."""
        if not 0 <= start < self.size:
            return b""
        try:
            self.file.seek(start)
            return self.file.read(min(count, self.size - start))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror}); check its disk") from None

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
            try:
                count = self.file.readinto(room)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error.strerror}); check its disk") from None
            if not count:
                raise CheckpointError(f"{self.path}: was cut short while it was read; fetch it again")
            room = room[count:]
