"""One file of a Hub repository -> the client's cache, resumed where it broke off and hashed before it gets its name there.

`huggingface_hub` (2.4) writes each try to a file with a name of its own and deletes it when the try fails; killed, it leaves
the file and never looks at it again. So the weights are fetched here, through the client's session (its proxies,
certificates and token) and under its lock: the unfinished blob has one name for all tries, and whoever comes next asks for
the rest by ``Range``. The client's other transport, Xet, is not used: it cannot go on from a part either.

The client also accepts any bytes of the right length. The Hub declares a hash for every file: sha256 for a large one, git's
blob hash (sha1 over ``blob <size>\\0`` + data) for a small one. What was seen to have it is remembered in
``HF_HOME/gpt2-toolkit/verified/<hash>`` by size, mtime and real path, so a warm load reads no weights. Damage that keeps all
three is not seen again; delete that folder to have everything rehashed.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpt2.errors import CheckpointError, InputError

COMMIT = re.compile(r"[0-9a-f]{40}")
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's, or a sha256
PAUSES = (0.5, 1.0, 1.5)  # seconds before a broken download is taken up again, as long as nothing more arrives
ABANDONED = 24 * 3600  # seconds: a partial download that was not written to for so long is nobody's
CHUNK = 1 << 20

log = logging.getLogger("gpt2")


@dataclass(frozen=True)
class Declared:
    """What the Hub says a file is."""

    digest: str  # sha256 or git's blob hash, in hex
    size: int


def fetch(repo: str, file: Path, declared: Declared, *, tries: int = 2) -> None:
    """Download ``file``, an entry of a snapshot of a model or data set, as the client would lay it out.

    Two processes do not download the same: the second waits for the first. Where locks do not work (some network file
    systems), both write the same bytes at the same places, and the hash is the judge.

    Args:
        tries: how many whole files with a wrong hash it takes to give up.

    Raises:
        CheckpointError: the Hub sends other bytes than it declares. The client's HTTPError: no answer, or a refusal. OSError.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import are_symlinks_supported
    from huggingface_hub.utils import WeakFileLock

    if not HASH.fullmatch(declared.digest):
        raise InputError(f"{constants.ENDPOINT} declares no hash for {file.name} of {repo}: check HF_ENDPOINT")
    storage = _place(file)[0]
    blob = storage / "blobs" / declared.digest
    part = blob.with_name(f"{blob.name}.gpt2-toolkit.incomplete")
    lock = Path(constants.HF_HUB_CACHE, ".locks", storage.name, f"{blob.name}.lock")
    for path in (file, blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    links = are_symlinks_supported(constants.HF_HUB_CACHE)
    with WeakFileLock(lock):
        if not blob.exists() and not file.exists():
            _sweep(blob.parent, part)
            kept = blob if links else file
            try:
                _complete(repo, file, part, declared, tries)
                os.replace(part, kept)
                _remember(declared.digest, _stamp(kept, kept.stat()))
            except FileNotFoundError:
                if not kept.exists():
                    raise  # else the lock held nobody off, and the other process was faster
        part.unlink(missing_ok=True)  # another program was faster
        if not file.exists():
            file.unlink(missing_ok=True)  # a link to nothing
            if links:
                with contextlib.suppress(FileExistsError):  # as above
                    file.symlink_to(os.path.relpath(blob, file.parent))
            else:
                shutil.copyfile(blob, file)


def discard(file: Path) -> None:
    """Remove a snapshot's entry and the blob it points to, not what a user may have put behind the blob."""
    if file.is_symlink():
        (file.parent / os.readlink(file)).unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def digest(file: Path, expected: str) -> str:
    """The file's hash, of the kind of ``expected``; remembered when it agrees, and then not computed again."""
    with file.open("rb") as stream:
        stamp = _stamp(file, os.fstat(stream.fileno()))
        if stamp in _stamps(expected):
            return expected
        actual = _hash(stream, expected)
    if actual == expected:
        _remember(expected, stamp)
    return actual


def mismatch(repo: str, name: str, actual: str, expected: str, advice: str) -> CheckpointError:
    """What to say of a file with another hash than the Hub declares."""
    return CheckpointError(f"{repo}: {name} hashes to {actual}, the Hub declares {expected}: {advice}")


def one_line(error: BaseException) -> str:
    """An exception's message on one line, or its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def _place(file: Path) -> tuple[Path, str, str]:
    """Of ``.../models--org--name/snapshots/<commit>/<path>`` (or ``datasets--``): the first folder, the commit, the path."""
    snapshot = next(folder for folder in file.parents if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name))
    return snapshot.parents[1], snapshot.name, file.relative_to(snapshot).as_posix()


def _sweep(blobs: Path, keep: Path) -> None:
    """Remove what broken downloads left behind, the client's too, which goes on with none of it."""
    for left in blobs.glob("*.incomplete"):
        with contextlib.suppress(OSError):
            if left != keep and time.time() - left.stat().st_mtime > ABANDONED:
                left.unlink()


def _complete(repo: str, file: Path, part: Path, declared: Declared, tries: int) -> None:
    """Fill ``part`` up until it is what the Hub declared. A whole one that is not is deleted, and fetched anew once."""
    from huggingface_hub import hf_hub_url

    storage, commit, name = _place(file)
    url = hf_hub_url(repo, name, revision=commit, repo_type=storage.name.partition("s--")[0])
    actual = ""
    for number in range(tries):
        if number:
            log.info("%s: %s instead of %s, fetching it again", file, actual, declared.digest)
        _download(url, part, declared.size)
        with part.open("rb") as stream:
            actual = _hash(stream, declared.digest)
            os.fsync(stream.fileno())
        if actual == declared.digest:
            return
        part.unlink()
    raise mismatch(repo, file.name, actual, declared.digest, "a proxy or mirror alters it; try another network or HF_ENDPOINT")


def _download(url: str, part: Path, size: int) -> None:
    """Append to ``part`` what is missing of a file of ``size`` bytes, over as many connections as that takes.

    What has arrived is on disk at any moment, whatever ends this process. Raises the client's HTTPError when the server
    refuses, or when connections in a row bring nothing new.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, tqdm

    part.touch()
    furthest, fruitless = part.stat().st_size, 0
    with (
        part.open("r+b") as out,
        tqdm(total=size, initial=furthest, unit="B", unit_scale=True, desc=url.rpartition("/")[2], disable=None) as bar,
    ):
        while (end := out.seek(0, os.SEEK_END)) < size:
            headers = build_hf_headers() | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={end}-"} if end else {})
            broken: HTTPError | None = None
            try:
                with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as answer:
                    hf_raise_for_status(answer)
                    if answer.status_code != 206:  # all of it, whatever was asked for
                        end = out.seek(0)
                        out.truncate()
                    for chunk in answer.iter_raw():
                        end += out.write(chunk[: size - end])
                        out.flush()
                        if end > furthest:
                            bar.update(end - furthest)
                            furthest, fruitless = end, 0
                        if end == size:
                            break
            except HTTPError as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code not in (408, 429, 500, 502, 503, 504):
                    raise
                broken = error
            if end < size:
                broken = broken or HTTPError(f"the connection ended at byte {end:,} of {size:,}")
                if fruitless == len(PAUSES):
                    raise broken
                log.info("%s: %s, going on from byte %d", url, one_line(broken), end)
                time.sleep(PAUSES[fruitless])
                fruitless += 1


def _hash(stream: BinaryIO, expected: str) -> str:
    """The hash of an open file, sha256 or git's by the length of ``expected``."""
    size = os.fstat(stream.fileno()).st_size
    found = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if len(expected) == 40 else hashlib.sha256()
    while chunk := stream.read(CHUNK):
        found.update(chunk)
    return found.hexdigest()


def _stamp(file: Path, stat: os.stat_result) -> str:
    return f"{stat.st_size} {stat.st_mtime_ns} {file.resolve()}"


def _record(expected: str) -> Path:
    """Where the stamps of all files that were seen to have this hash are kept, a line each."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME, "gpt2-toolkit", "verified", expected)


def _stamps(expected: str) -> list[str]:
    try:
        return _record(expected).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []


def _remember(expected: str, stamp: str) -> None:
    record = _record(expected)
    with contextlib.suppress(OSError):  # a read-only HF_HOME costs a rehash each time, nothing more
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=record.parent, delete=False) as new:
            new.write("\n".join([*_stamps(expected), stamp]) + "\n")
        os.replace(new.name, record)
