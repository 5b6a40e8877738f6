"""Read NumPy's ``.npy`` and ``.npz`` without unpickling; an error is one line that says what the header should be."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from gpt2.data.files import opened
from gpt2.errors import InputError, printable, require_memory

FEWER = "write fewer tokens"
DICTIONARY = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 16), }"
RIGHT = f"a right one begins with \\x93NUMPY, the bytes 1 0 118 0, {DICTIONARY}, spaces, and a newline as byte 127"


def read_npy(path: Path, most: float = math.inf) -> np.ndarray:
    """Return the array in a file. Raises InputError: more than ``most`` bytes, damaged, or no array of numbers."""
    try:
        with opened(path) as file:
            return _read(file, str(path), path.stat().st_size, most)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); give a .npy file") from None


def read_npz(path: Path, most: float = math.inf) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of an archive by name; ``most`` bytes in all. Raises InputError as :func:`read_npy`."""
    try:
        with opened(path) as whole, zipfile.ZipFile(whole) as archive:
            require_memory(sum(one.file_size for one in archive.infolist()), f"{path}: its unpacked arrays", FEWER, most)
            for one in archive.infolist():
                name = one.filename.removesuffix(".npy")
                with archive.open(one) as file:
                    yield name, _read(file, f"{path}: {printable(name, one_line=True)[:200]}", one.file_size, most)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:  # an encrypted file: RuntimeError
        raise InputError(f"{path}: cannot be read ({_said(error)}); write it again") from None


def _read(file: IO[bytes], where: str, size: int, most: float) -> np.ndarray:
    require_memory(size, f"{where}: its numbers", FEWER, most)
    try:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1):
            raise ValueError(f"the file has more than the {array.nbytes:,} bytes of {array.shape} of {array.dtype}")
    except Exception as error:  # NumPy evaluates the header as Python, and fails in a dozen ways
        raise InputError(f"{where}: NumPy cannot read it ({_said(error)}); {RIGHT}") from None
    return array


def _said(error: Exception) -> str:
    return printable(str(error).partition("\n")[0], one_line=True)[:160] or type(error).__name__
