"""The Hub's cache on this machine: the folders of a repository, and what the Hub declared of its files.

The layout is `huggingface_hub`'s. A cache may be shared, and a server may be hostile: so a path is made only of a repository's
name, 40 hex digits, a declared hash, and a file's name that we ask for.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from gpt2.errors import CheckpointError

COMMIT = re.compile(r"[0-9a-f]{40}")
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's, or a sha256
XET_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Declared:
    """What the Hub says a file is."""

    digest: str  # sha256 of a large file or git's blob hash, in hex; "" where the Hub gives none
    size: int  # bytes
    xet: str = ""  # the name to ask the Xet storage for, if it lies there

    @property
    def lacks_sha256(self) -> bool:
        """Whether it is too large for git, where git's hash is that of a pointer; some mirrors list only that."""
        return len(self.digest) == 40 and self.size > 10 << 20


def storage(repo: str, kind: str = "model") -> Path:
    """The folder of a repository, for instance ``.../hub/models--org--name``."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type=kind))


def snapshot(repo: str, commit: str, kind: str = "model") -> Path:
    """The folder of a commit's files."""
    assert COMMIT.fullmatch(commit), commit
    return storage(repo, kind) / "snapshots" / commit


def place(file: Path) -> tuple[Path, str, str]:
    """The parts of ``.../models--org--name/snapshots/<commit>/<path>`` (or ``datasets--``): first folder, commit, path."""
    folder = next(folder for folder in file.parents if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name))
    return folder.parents[1], folder.name, file.relative_to(folder).as_posix()


def cached_snapshot(repo: str, revision: str) -> Path | None:
    """The folder of a commit, or of the last known commit of a branch or tag."""
    commit = revision
    if not COMMIT.fullmatch(revision):
        try:
            commit = (storage(repo) / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    return folder if COMMIT.fullmatch(commit) and (folder := snapshot(repo, commit)).is_dir() else None


def make_folder(top: Path, folder: Path) -> None:
    """Make a folder below ``top``. Raises CheckpointError where one on the way is a link: it could lead out of the cache."""
    for step in (folder, *folder.parents):
        if step == top:
            break
        if step.is_symlink():
            what = "is a link, which could lead out of the cache: remove it, or set HF_HOME to another place"
            raise CheckpointError(f"{step} {what}")
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A new file beside ``path`` that becomes ``path`` when all is written and synced. A link is replaced, not followed."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.incomplete")
    try:
        with new.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def remember_ref(repo: str, revision: str, commit: str) -> None:
    """Record what a branch or tag points to, as the client does, so that it can be resolved offline."""
    ref = storage(repo) / "refs" / revision
    if not COMMIT.fullmatch(revision) and cached_snapshot(repo, revision) != snapshot(repo, commit):
        _note(storage(repo), ref, commit.encode())


def remember_listing(folder: Path, declared: Mapping[str, Declared]) -> None:
    """Record what the Hub declared of a snapshot's files."""
    rows = {name: asdict(row) for name, row in sorted(declared.items())}
    _note(folder.parents[1], _listing(folder), json.dumps({"files": rows}, indent=1).encode())


def recorded_listing(folder: Path) -> dict[str, Declared]:
    """What was recorded of a snapshot's files; empty in a cache that another program filled."""
    try:
        files = json.loads(_listing(folder).read_bytes())["files"]
        rows = {name: Declared(**row) for name, row in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    intact = all(isinstance(row.size, int) and HASH.fullmatch(str(row.digest) or "0" * 40) for row in rows.values())
    return rows if intact else {}


def declared_by_links(folder: Path) -> dict[str, Declared]:
    """The hashes that are the names of the blobs, for a snapshot that another program filled; "" where there is none."""
    rows = {}
    for file in folder.iterdir():
        blob = Path(os.readlink(file)).name if file.is_symlink() else ""
        if file.is_file():
            rows[file.name] = Declared(blob if HASH.fullmatch(blob) else "", file.stat().st_size)
    return rows


def discard(file: Path) -> None:
    """Remove a snapshot's entry, and the blob of the same repository that it points to; never what the blob may link to."""
    blobs = place(file)[0] / "blobs"
    if file.is_symlink():
        blob = Path(os.path.normpath(file.parent / os.readlink(file)))
        if blob.parent == blobs and HASH.fullmatch(blob.name) and not blobs.is_symlink():
            blob.unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _listing(folder: Path) -> Path:
    return folder.parents[1] / "gpt2-toolkit" / f"{folder.name}.json"


def _note(top: Path, path: Path, content: bytes) -> None:
    """Write a record. In a read-only cache nothing is written, and the next load makes one more request."""
    with contextlib.suppress(OSError, CheckpointError):
        make_folder(top, path.parent)
        with written_aside(path) as stream:
            stream.write(content)
