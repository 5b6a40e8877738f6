"""Logits in a temporary file: what one model predicted, kept while the next ones run, so that one is in memory at a time."""

from __future__ import annotations

import mmap
import tempfile
import weakref
from typing import IO

import torch
from torch import Tensor

from gpt2.checkpoint.saving import write_pieces
from gpt2.errors import InputError


class Scratch:
    """Rows of logits (R, V) in an unnamed file: appended by :meth:`add`, read again in that order by :meth:`take`."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the finalizer
        weakref.finalize(self, self._file.close)
        self._dtype, self._vocab = torch.float32, 0
        self.bytes = self._place = 0

    def add(self, rows: Tensor) -> None:
        """Append rows of one dtype and vocabulary. Raises InputError: no room."""
        self._dtype, self._vocab = rows.dtype, rows.size(1)
        try:
            self.bytes += write_pieces(self._file, rows)
            self._file.flush()  # else the buffered end is not in the file when it is read
        except OSError as error:
            where = tempfile.gettempdir()
            why = f"{error.strerror or error}: the first model's predictions are kept there"
            raise InputError(f"{where}: cannot be written ({why}); make room, set TMPDIR, or use fewer --tokens") from error

    def rewind(self) -> None:
        """Read from the first row on."""
        self._place = 0

    def take(self, count: int) -> Tensor:
        """Return the next ``count`` rows, as they lie in the file."""
        size, before = count * self._vocab * self._dtype.itemsize, self._place % mmap.ALLOCATIONGRANULARITY
        area = mmap.mmap(self._file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=self._place - before)
        self._place += size
        return torch.frombuffer(area, dtype=self._dtype, offset=before).view(count, self._vocab)
