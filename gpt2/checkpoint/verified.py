"""Hash a file once and remember a correct hash, so that later loads read no weights.

The Hub declares sha256 for a large file, and git's blob hash (sha1 over ``blob <size>\\0`` + data) for a small one. Some
mirrors declare for a large file only the blob hash of its git pointer, three lines with the sha256; that is accepted too.
"""

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import BinaryIO

from gpt2.data.files import written_aside
from gpt2.errors import CheckpointError

log = logging.getLogger("gpt2")


def digest(file: Path, expected: str) -> str:
    """Return the file's hash, of the same kind as ``expected``. A remembered hash is not computed again."""
    with file.open("rb") as stream:
        stat = os.fstat(stream.fileno())
        if _stamp(file, stat) in _stamps(expected):
            return expected
        actual = digest_of(stream, expected, file)
    if actual == expected:
        remember(file, expected, stat)
    return actual


def digest_of(stream: BinaryIO, expected: str, file: Path) -> str:
    """Hash an open file: sha256, or git's for a 40-digit ``expected``; return ``expected`` if it is the git pointer's hash."""
    if len(expected) == 64:
        return _hashed(stream, hashlib.sha256())
    size = os.fstat(stream.fileno()).st_size
    git = _hashed(stream, hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False))
    if git == expected:
        return git
    sha256 = _hashed(stream, hashlib.sha256())
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    if hashlib.sha1(b"blob %d\0" % len(pointer) + pointer, usedforsecurity=False).hexdigest() != expected:
        return git
    log.warning("%s: the Hub's listing has no sha256 for it; it was checked by the hash of its git pointer", file)
    return expected


def remember(file: Path, expected: str, stat: os.stat_result) -> None:
    """Record that the file, in the state ``stat``, has the expected hash."""
    record = _record(expected)
    with contextlib.suppress(OSError, ValueError):  # a read-only HF_HOME only costs a rehash each time
        record.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(record) as new:
            new.write("\n".join([*_stamps(expected), _stamp(file, stat), ""]).encode())


def mismatch(repo: str, name: str, actual: str, expected: str, advice: str) -> CheckpointError:
    return CheckpointError(f"{repo}: {name} hashes to {actual}, the Hub declares {expected}: {advice}")


def _hashed(stream: BinaryIO, hasher: "hashlib._Hash") -> str:
    stream.seek(0)
    while chunk := stream.read(1 << 20):
        hasher.update(chunk)
    return hasher.hexdigest()


def _stamp(file: Path, stat: os.stat_result) -> str:
    return f"{stat.st_size} {stat.st_mtime_ns} {file.resolve()}"


def _record(expected: str) -> Path:
    """Return the file that lists all files with this hash, one per line."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME, "gpt2-toolkit", "verified", expected)


def _stamps(expected: str) -> list[str]:
    try:
        return _record(expected).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
