"""Is a file whole? The Hub's cache on this machine, the hashes that the Hub declares, and those of OpenAI's official files.

The layout is `huggingface_hub`'s. A cache may be shared and a server hostile, so a path is made only of a repository's name, a
40-hex commit, a declared hash, and a file name that we ask for. A file is hashed once, and a correct hash remembered.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from gpt2.checkpoint.names import OFFICIAL
from gpt2.data.files import read_all, written_aside
from gpt2.errors import CheckpointError

log = logging.getLogger("gpt2")

COMMIT = re.compile(r"[0-9a-f]{40}")
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's, or a sha256
XET_HASH = re.compile(r"[0-9a-f]{64}")

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack")
_TABLE = tomllib.loads(Path(__file__).with_name("official_files.toml").read_text(encoding="utf-8"))  # which names its sources
OFFICIAL_FILES: Mapping[str, Mapping[str, str]] = {model: _TABLE["shared"] | own for model, own in _TABLE["files"].items()}
GIT_BLOBS: Mapping[str, str] = _TABLE["git_blobs"]  # sha256 of a small file -> its git blob hash, which the Hub lists instead


@dataclass(frozen=True)
class Declared:
    """What the Hub declares of a file."""

    digest: str  # sha256 of a large file or git's blob hash, in hex; "" if the Hub gives none
    size: int  # bytes
    xet: str = ""  # the file's hash in the Xet storage, if it is stored there

    @property
    def lacks_sha256(self) -> bool:
        """Whether only a git hash is declared of a file too large for git: that is a pointer's hash. Some mirrors do this."""
        return len(self.digest) == 40 and self.size > 10 << 20


def storage(repo: str, kind: str = "model") -> Path:
    """Return the folder of a repository, for instance ``.../hub/models--org--name``."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type=kind))


def snapshot(repo: str, commit: str, kind: str = "model") -> Path:
    assert COMMIT.fullmatch(commit), commit
    return storage(repo, kind) / "snapshots" / commit


def cached_snapshot(repo: str, revision: str) -> Path | None:
    """Return the folder of a commit, or of the last known commit of a branch or tag; None if it is not cached."""
    commit = revision
    if not COMMIT.fullmatch(revision):
        try:
            commit = (storage(repo) / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    return folder if COMMIT.fullmatch(commit) and (folder := snapshot(repo, commit)).is_dir() else None


def make_folder(top: Path, folder: Path) -> None:
    """Make a folder below ``top``. Raises CheckpointError if a part of the path is a symlink: it could lead out of the cache."""
    for step in (folder, *folder.parents):
        if step == top:
            break
        if step.is_symlink():
            what = "is a link, which could lead out of the cache: remove it, or set HF_HOME to another place"
            raise CheckpointError(f"{step} {what}")
    folder.mkdir(parents=True, exist_ok=True)


def remember_ref(repo: str, revision: str, commit: str) -> None:
    """Record the commit of a branch or tag, as `huggingface_hub` does, so that it can be resolved offline."""
    ref = storage(repo) / "refs" / revision
    if not COMMIT.fullmatch(revision) and cached_snapshot(repo, revision) != snapshot(repo, commit):
        _note(storage(repo), ref, commit.encode())


def remember_listing(folder: Path, declared: Mapping[str, Declared]) -> None:
    """Record the files at the top of a commit, once."""
    if not recorded_listing(folder):
        rows = {name: asdict(row) for name, row in sorted(declared.items()) if "/" not in name}
        _note(folder.parents[1], _listing(folder), json.dumps({"files": rows}, indent=1).encode())


def recorded_listing(folder: Path) -> dict[str, Declared]:
    """Return what :func:`remember_listing` recorded; empty if another program filled the cache."""
    try:
        files = json.loads(_listing(folder).read_bytes())["files"]
        rows = {name: Declared(**row) for name, row in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    intact = all(isinstance(row.size, int) and HASH.fullmatch(str(row.digest) or "0" * 40) for row in rows.values())
    return rows if intact else {}


def declared_by_links(folder: Path) -> dict[str, Declared]:
    """Take the hashes from the blobs' names, for a snapshot that another program filled; "" where a file has none.

    A link to a blob that is gone, and a shard that an index names, are declared too: without them the snapshot is not whole.
    """
    rows = {}
    for file in folder.iterdir():
        if file.is_symlink() or file.is_file():
            blob = Path(os.readlink(file)).name if file.is_symlink() else ""
            rows[file.name] = Declared(blob if HASH.fullmatch(blob) else "", file.stat().st_size if file.is_file() else 0)
        # What it holds is checked when it is loaded.
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            shards = json.loads(read_all(file)).get("weight_map") if file.name.endswith(".index.json") else {}
            rows = {str(name): Declared("", 0) for name in shards.values()} | rows
    return rows


def discard(folder: Path, name: str) -> None:
    """Remove a snapshot's entry and its blob in the same repository; never a file outside, even if the blob links to it."""
    file, blobs = folder / name, folder.parents[1] / "blobs"
    if file.is_symlink():
        blob = Path(os.path.normpath(file.parent / os.readlink(file)))
        if blob.parent == blobs and HASH.fullmatch(blob.name) and not blobs.is_symlink():
            blob.unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _listing(folder: Path) -> Path:
    return folder.parents[1] / "gpt2-toolkit" / f"{folder.name}.json"


def _note(top: Path, path: Path, content: bytes) -> None:
    """Write a record. In a read-only cache this does nothing: the next load makes one more request, or hashes again."""
    with contextlib.suppress(OSError, CheckpointError):
        make_folder(top, path.parent)
        with written_aside(path) as stream:
            stream.write(content)


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
    """Hash an open file: sha256, or git's (sha1 over ``blob <size>\\0`` + data) for a 40-digit ``expected``.

    Some mirrors declare for a large file only the git hash of its pointer, three lines with the sha256; then that is returned.
    """
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
    lines = "\n".join([*_stamps(expected), _stamp(file, stat), ""])
    _note(record.parents[2], record, lines.encode(errors="surrogateescape"))


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
        return _record(expected).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


@dataclass(frozen=True)
class Official:
    """A comparison with the official files of ``model``; None if the model is unknown."""

    model: str | None
    weights: tuple[str, ...]  # official weight files
    same: tuple[str, ...]  # all official files
    different: tuple[str, ...]  # files with an official name and other content

    def __str__(self) -> str:
        differing = f"{', '.join(self.different)} differ{'s' * (len(self.different) == 1)} from {self.model}'s"
        if self.weights and not set(self.different) & set(WEIGHTS):
            return f"the official file of {self.model}" + (f"; {differing}" if self.different else "")
        if self.model is None:
            return "not an official file"
        return "not the official file" + (f": {differing}" if self.different else "")


def official_name(name: str) -> str | None:
    """Return ``"gpt2"`` for ``"gpt2"`` or ``"openai-community/gpt2"``, with or without ``@revision``; None for other names."""
    plain = name.partition("@")[0]
    return next((model for model, repository in OFFICIAL.items() if plain in (model, repository)), None)


def official_files(hashes: Mapping[str, str], name: str = "") -> Official:
    """Compare a checkpoint's files (name -> sha256) with the official ones of ``name``, else of the model that they match."""
    by_content = [*_holding(hashes, WEIGHTS), *_holding(hashes, ("config.json",))]
    model = official_name(name) or next(iter(by_content), None)
    known = OFFICIAL_FILES[model] if model else {}
    same = tuple(name for name, digest in hashes.items() if known.get(name) == digest)
    different = tuple(name for name, digest in hashes.items() if known.get(name, digest) != digest)
    weights = tuple(name for name, digest in hashes.items() if digest in [known.get(each) for each in WEIGHTS])
    return Official(model, weights, same, different)


def _holding(hashes: Mapping[str, str], files: tuple[str, ...]) -> list[str]:
    """Return the models that have one of their ``files`` among the hashes, under any name."""
    there = set(hashes.values())
    return [model for model, known in OFFICIAL_FILES.items() if there & {known[file] for file in files if file in known}]


def other_than_official(repository: str, declared: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files of an official repository whose declared hashes differ. A large file with only a git hash is skipped."""
    known = OFFICIAL_FILES.get(official_name(repository) or "", {})
    official = {name: digest for name, digest in known.items() if len(declared.get(name, "")) == 64}
    official |= {name: GIT_BLOBS[digest] for name, digest in known.items() if digest in GIT_BLOBS and name not in official}
    return tuple(name for name, digest in declared.items() if digest and official.get(name, digest) != digest)
