"""Memory-map token files: `train.bin` and `val.bin` with little-endian uint16 ids, as in nanoGPT."""

import hashlib
import mmap
from pathlib import Path

import numpy as np

from gpt2.data.files import opened, reading
from gpt2.errors import InputError, user_path

TRAIN, VAL = "train.bin", "val.bin"
SAMPLES, BLOCK = 4096, 2048  # of a longer file, only so many blocks of so many ids are checked


def read(directory: str | Path, n_vocab: int, *, check: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Map a folder's `train.bin` and `val.bin`; return both as read-only uint16 arrays.

    Ids are checked against ``n_vocab``; in a file of more than 8 million ids, 4,096 blocks spread over it. Without ``check`` no
    page is read: another process of this machine has checked them. Of a long file no page is read ahead, because windows are at
    random places. Raises InputError: a file that is missing, is empty, has an odd size, or has an id outside the vocabulary.
    """
    files = []
    for path in (user_path(directory) / TRAIN, user_path(directory) / VAL):
        with reading(path, f"give a folder with {TRAIN} and {VAL}, --set data.tokens=DIR"):
            size = path.stat().st_size
        if size == 0 or size % 2:
            raise InputError(f"{path}: {size} bytes are not a positive number of uint16 ids; write the file again")
        ids = mapped(path, "<u2")
        largest = int(max(block.max() for block in _blocks(ids))) if check else 0
        if largest >= n_vocab:
            why = "these tokens were made with another tokenizer, or are not uint16"
            raise InputError(f"{path}: id {largest} lies outside the tokenizer's vocabulary of {n_vocab:,}; {why}")
        files.append(ids)
    return files[0], files[1]


def mapped(path: Path, dtype: str) -> np.ndarray:
    """Map a file that is not empty, for reading."""
    with opened(path) as file:
        ids = np.memmap(file, dtype=dtype, mode="r")
    if len(ids) > SAMPLES * BLOCK and isinstance(ids.base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        ids.base.madvise(mmap.MADV_RANDOM)
    return ids


def fingerprint(*files: np.ndarray) -> str:
    """Return the sha256 (hex) of the files' lengths and ids; of a long file, of the blocks that :func:`read` checks."""
    digest = hashlib.sha256()
    for ids in files:
        digest.update(f"{len(ids)}|".encode())
        for block in _blocks(ids):
            digest.update(block.tobytes())
    return digest.hexdigest()


def _blocks(ids: np.ndarray) -> list[np.ndarray]:
    if len(ids) <= SAMPLES * BLOCK:
        return [ids]
    return [ids[start : start + BLOCK] for start in np.linspace(0, len(ids) - BLOCK, SAMPLES, dtype=np.int64)]
