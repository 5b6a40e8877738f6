"""Map a file of raw tensors, or read it where that cannot be, and convert a few megabytes at a time.

A mapped file is read when its weights are used. If somebody shortens it in place before that, Linux and macOS end the process
with SIGBUS (exit code 135) at the first missing page, and Python cannot catch that. So :func:`require_whole_files` looks at the
sizes before a long job and between its parts; a file that is cut within one part still ends the process. Loading in another
dtype, or as int8, maps nothing, and Windows does not let a mapped file be shortened.
"""

from __future__ import annotations

import math
import mmap
import weakref
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from gpt2.errors import CheckpointError

PIECE = 1 << 21  # bytes converted at a time
_MAPPINGS: weakref.WeakKeyDictionary[mmap.mmap, Path] = weakref.WeakKeyDictionary()  # all in use in this process


def require_whole_files() -> None:
    """Raise CheckpointError where a mapped file has become shorter: using the missing part would end the process."""
    for mapping, path in list(_MAPPINGS.items()):
        _require_whole(mapping, path)


def _require_whole(mapping: mmap.mmap, path: Path) -> None:
    if mapping.size() < len(mapping):
        raise CheckpointError(
            f"{path}: was cut short while it is in use ({mapping.size():,} of {len(mapping):,} bytes are left); "
            "bring the file back and start again"
        )


class MappedFile:
    """An open file whose bytes become tensors, even if another is renamed over it. Raises CheckpointError: it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by the finalizer
            weakref.finalize(self, self.file.close)
            self.size = self.file.seek(0, 2)
        except OSError as error:
            what = f"cannot be read ({error.strerror}); check that it is there, and yours to read"
            raise CheckpointError(f"{path}: {what}") from None

    def bytes(self, start: int, count: int) -> bytes:
        """``count`` bytes from ``start``, or as many as there are; none where ``start`` lies outside the file."""
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
        """The contiguous tensor whose ``stored`` values begin at byte ``start``; see :meth:`Container.read`."""
        dtype, count = dtype or stored, math.prod(shape)
        aligned = start % stored.itemsize == 0
        if mapped and count and aligned and dtype == stored and self._mapping is not None:
            _require_whole(self._mapping, self.path)
            # From the buffer, not a slice of one storage: a tensor pickled on its own must not take the whole file along.
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
        """The file, copied on write. None where it cannot be mapped."""
        try:
            mapping = mmap.mmap(self.file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError):
            return None
        _MAPPINGS[mapping] = self.path
        return mapping

    @cached_property
    def _scratch(self) -> Tensor:
        """One buffer for all conversions: new ones leave holes in malloc's heap, a sixth of the weights' size in all."""
        return torch.empty(PIECE, dtype=torch.uint8)

    def _fill(self, flat: Tensor) -> None:
        """Read from where the file stands until ``flat`` is full."""
        room = flat.view(torch.uint8).numpy().data
        while room:
            try:
                count = self.file.readinto(room)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error.strerror}); check its disk") from None
            if not count:
                raise CheckpointError(f"{self.path}: was cut short while it was read; fetch it again")
            room = room[count:]
