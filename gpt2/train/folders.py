"""Write a folder that appears whole or not at all: filled aside, listed with hashes in a manifest, synced, renamed."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpt2.checkpoint.saving import MANIFEST, sha256, write_json
from gpt2.errors import InputError


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a full disk or a read-only folder into an InputError of one line."""
    try:
        yield
    except (OSError, InputError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        reason = cause.strerror or cause
        remedy = "make room or choose another --out; earlier checkpoints are intact"
        raise InputError(f"{folder}: cannot write there ({reason}); {remedy}") from error


@contextlib.contextmanager
def appearing(target: Path, hashes: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Yield a new folder; at the end of the block it gets a manifest, is synced, and renamed to ``target``: whole or not at all.

    ``hashes`` are those that are known then, by name, also of files that another machine has just written; all others are read.
    """
    aside, old = (target.with_name(f".{target.name}.{suffix}") for suffix in ("partial", "old"))
    with writing(target.parent):
        for leftover in (aside, old):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            yield aside
            written = sorted(aside.rglob("*"))
            known = hashes or {}
            names = sorted({path.relative_to(aside).as_posix() for path in written if path.is_file()} | known.keys())
            write_json(aside / MANIFEST, {name: known[name] if name in known else sha256(aside / name) for name in names})
            for directory in (*(path for path in written if path.is_dir()), aside):
                _sync_directory(directory)
        except (OSError, InputError):
            shutil.rmtree(aside, ignore_errors=True)
            raise
        if target.exists():
            os.rename(target, old)
        os.rename(aside, target)
        shutil.rmtree(old, ignore_errors=True)
        _sync_directory(target.parent)


def _sync_directory(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders, and writes their entries itself
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
