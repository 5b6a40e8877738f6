"""Token files: `train.bin` and `val.bin`, ids as little-endian uint16 and nothing else, as nanoGPT's `prepare.py` writes them.

They are mapped, not read, so that a corpus far larger than memory costs only the pages that a step looks at.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from gpt2.errors import InputError

TRAIN, VAL = "train.bin", "val.bin"
LARGEST = 2**16
SAMPLES, BLOCK = 4096, 2048  # of a file that is too long to be read whole: so many blocks of so many ids


def read(directory: str | os.PathLike[str], n_vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """The mapped ids of a folder's `train.bin` and `val.bin`, uint16, read-only.

    Ids are held against ``n_vocab``; in a file of more than 8 million, those of 4,096 blocks spread over all of it.

    Raises:
        InputError: a file is missing or empty, has half an id, or one beyond the vocabulary.
    """
    train, val = (_map(Path(directory) / name) for name in (TRAIN, VAL))
    for name, ids in ((TRAIN, train), (VAL, val)):
        largest = int(max(block.max() for block in _blocks(ids)))
        if largest >= n_vocab:
            raise InputError(
                f"{Path(directory) / name}: id {largest} lies outside the tokenizer's vocabulary of {n_vocab:,}; "
                "these tokens were made with another tokenizer, or are not uint16"
            )
    return train, val


def write(path: str | os.PathLike[str], ids: np.ndarray) -> None:
    """``ids`` as one such file.

    Raises:
        InputError: an id that uint16 does not hold.
    """
    if len(ids) and not (ids.min() >= 0 and ids.max() < LARGEST):
        raise InputError(f"{path}: an id outside 0..{LARGEST - 1} does not fit a token file; use a smaller vocabulary")
    np.asarray(ids, dtype="<u2").tofile(path)


def fingerprint(*files: np.ndarray) -> str:
    """Sha256 (hex) of the files' lengths and ids; where one is long, of the blocks that :func:`read` looks at."""
    digest = hashlib.sha256()
    for ids in files:
        digest.update(f"{len(ids)}|".encode())
        for block in _blocks(ids):
            digest.update(block.tobytes())
    return digest.hexdigest()


def _map(path: Path) -> np.ndarray:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); give a folder with {TRAIN} and {VAL}, --set data.tokens=DIR"
        ) from None
    if size == 0 or size % 2:
        raise InputError(f"{path}: {size} bytes are no whole number of uint16 ids, or none; write the file again")
    return np.memmap(path, dtype="<u2", mode="r")


def _blocks(ids: np.ndarray) -> list[np.ndarray]:
    if len(ids) <= SAMPLES * BLOCK:
        return [ids]
    return [ids[start : start + BLOCK] for start in np.linspace(0, len(ids) - BLOCK, SAMPLES, dtype=np.int64)]
