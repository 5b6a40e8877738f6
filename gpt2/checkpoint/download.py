"""Download one file of a Hub repository into the cache; resume a broken download; check the hash before the file gets its name.

`huggingface_hub` (2.4) restarts a broken download. Here the partial blob has one name for all tries, and the next try asks for
the rest by ``Range``. No header of a response is used as a name. A large file comes over Xet, the Hub's chunked storage, through
`hf_xet`, which checks no sha256, keeps nothing of a broken transfer, and retries a dead storage for minutes: so its result is
hashed here, and where it stalls the file comes over HTTP.
"""

import contextlib
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gpt2.checkpoint.cache import HASH, Declared, digest_of, make_folder, mismatch, place, remember
from gpt2.checkpoint.hub_api import get, is_final, moving, no_hub, one_line, request_headers, wait_for_rate_limit
from gpt2.data.files import written_aside
from gpt2.errors import InputError

if TYPE_CHECKING:
    from hf_xet import XetFileDownloadGroup

PAUSES = (0.5, 1.0, 1.5)  # seconds between retries without progress
STALL_SECONDS = 25.0  # give up after so many seconds with less than `MIN_PROGRESS` received, over all tries
MIN_PROGRESS = 1 << 12  # bytes
XET_PATIENCE = 10.0  # seconds without data over Xet
ABANDONED = 24 * 3600  # seconds since the last write: then a partial download counts as abandoned

log = logging.getLogger("gpt2")


def fetch(repo: str, file: Path, declared: Declared, *, tries: int = 2) -> None:
    """Download ``file``, an entry of a snapshot, in `huggingface_hub`'s layout.

    A second process waits for the first. Without working locks (some network file systems) both write the same bytes, and the
    hash decides. Raises CheckpointError: ``tries`` files with a wrong hash. HTTPError: no answer, or a refusal. OSError.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import are_symlinks_supported
    from huggingface_hub.utils import WeakFileLock

    if not HASH.fullmatch(declared.digest):
        raise InputError(f"{constants.ENDPOINT} declares no hash for {file.name} of {repo}: check HF_ENDPOINT")
    storage = place(file)[0]
    blob = storage / "blobs" / declared.digest
    part = _part(blob)
    lock = Path(constants.HF_HUB_CACHE, ".locks", storage.name, f"{blob.name}.lock")
    for path in (file, blob, lock):
        make_folder(Path(constants.HF_HUB_CACHE) if path is lock else storage, path.parent)
    links = are_symlinks_supported(constants.HF_HUB_CACHE)
    with WeakFileLock(lock):
        if not blob.is_file() and not file.is_file():
            kept = blob if links else file
            try:
                if not _complete_by_xet(repo, file, part, declared):
                    _complete(repo, file, part, declared, tries)
                os.replace(part, kept)
                if not declared.lacks_sha256:
                    remember(kept, declared.digest, kept.stat())
            except FileNotFoundError:
                if not kept.exists():
                    raise  # else the lock did not work, and the other process finished first
        part.unlink(missing_ok=True)  # another program finished first
        if not file.is_file():
            file.unlink(missing_ok=True)  # a dangling symlink
            if links:
                with contextlib.suppress(FileExistsError):  # as above
                    file.symlink_to(os.path.relpath(blob, file.parent))
            else:
                with written_aside(file) as copy, blob.open("rb") as whole:
                    shutil.copyfileobj(whole, copy)


def sweep(snapshot: Path, wanted: Iterable[Declared]) -> None:
    """Remove abandoned partial downloads, also `huggingface_hub`'s, unless the ``wanted`` files can resume from them."""
    blobs = snapshot.parents[1] / "blobs"
    keep = {_part(blobs / declared.digest) for declared in wanted}
    if not blobs.is_symlink():
        for left in blobs.glob("*.incomplete"):
            with contextlib.suppress(OSError):
                age = time.time() - left.lstat().st_mtime
                if left not in keep and age > ABANDONED and HASH.fullmatch(left.name.partition(".")[0]):
                    left.unlink()


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.gpt2-toolkit.incomplete")


def _complete(repo: str, file: Path, part: Path, declared: Declared, tries: int) -> None:
    """Fill ``part`` until its hash is the declared one. A complete file with another hash is deleted and downloaded again."""
    from huggingface_hub import hf_hub_url

    storage, commit, name = place(file)
    url = hf_hub_url(repo, name, revision=commit, repo_type=storage.name.partition("s--")[0])
    actual = ""
    for number in range(tries):
        if number:
            log.info("%s: %s instead of %s, fetching it again", file, actual, declared.digest)
        with _open_part(part) as out:
            _download(url, out, declared.size)
            actual = digest_of(out, declared.digest, file)
            os.fsync(out.fileno())
        if actual == declared.digest or declared.lacks_sha256:
            return
        part.unlink()
    raise mismatch(repo, file.name, actual, declared.digest, "a proxy or mirror alters it; try another network or HF_ENDPOINT")


def _open_part(part: Path) -> BinaryIO:
    """Open the partial file to read and write. A link or pipe under its name may be an attack, and is removed."""

    def opener(path: str, flags: int) -> int:
        safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # where the system has them
        return os.open(path, flags | os.O_CREAT | safe, 0o666)

    with contextlib.suppress(FileNotFoundError):
        if not _is_own(part.lstat()):
            part.unlink()
    out = open(part, "r+b", opener=opener)  # noqa: SIM115 (the caller closes it)
    if not _is_own(os.fstat(out.fileno())):
        out.close()
        raise OSError(f"{part} is not a regular file")
    return out


def _is_own(entry: os.stat_result) -> bool:
    return stat.S_ISREG(entry.st_mode) and entry.st_nlink <= 1


def _download(url: str, out: BinaryIO, size: int) -> None:
    """Append the missing bytes of a file of ``size`` bytes to ``out``, over several connections; without ranges if the server
    refuses them. Raises `huggingface_hub`'s HTTPError: a refusal, or no more progress.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import tqdm

    end = furthest = mark = out.seek(0, os.SEEK_END)
    fruitless, waited, ranges, since = 0, 0.0, True, time.monotonic()
    with tqdm(total=size, initial=end, unit="B", unit_scale=True, desc=url.rpartition("/")[2], disable=None) as bar:
        while (end := out.seek(0, os.SEEK_END)) < size:
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={end}-"} if end and ranges else {})
            broken: HTTPError | None = None
            try:
                with get(url, constants.HF_HUB_DOWNLOAD_TIMEOUT, headers=headers) as answer:
                    if answer.status_code not in (200, 206):
                        raise HTTPError(f"answer {answer.status_code} without a file")
                    if answer.status_code == 200:  # the whole file, even if a range was requested
                        end = out.seek(0)
                        out.truncate()
                    for chunk in answer.iter_raw():
                        end += out.write(chunk[: size - end])
                        out.flush()
                        bar.update(max(end - furthest, 0))
                        furthest = max(end, furthest)
                        if furthest >= mark + MIN_PROGRESS:
                            mark, since, fruitless = furthest, time.monotonic(), 0
                        if end == size or time.monotonic() > since + STALL_SECONDS:
                            break
            except HTTPError as error:
                broken = error
                if isinstance(error, HfHubHTTPError):
                    if error.response.status_code == 429:
                        pause = wait_for_rate_limit(error, waited)
                        waited, since = waited + pause, since + pause
                        continue
                    if is_final(error) and "Range" not in headers:
                        raise
                    ranges = ranges and not is_final(error)  # it may refuse the range: retry with the whole file
            except (InputError, OSError):
                raise
            except Exception as error:  # any error of huggingface_hub for a malformed response
                raise no_hub(one_line(error)) from error
            if end < size and (ranges or "Range" not in headers):
                broken = broken or HTTPError(f"the connection ended at byte {end:,} of {size:,}")
                if fruitless == len(PAUSES) or time.monotonic() > since + STALL_SECONDS:
                    raise broken
                log.info("%s: %s, going on from byte %d", url, one_line(broken), end)
                time.sleep(PAUSES[fruitless])
                fruitless += 1


def _complete_by_xet(repo: str, file: Path, part: Path, declared: Declared) -> bool:
    """Download to ``part`` if it does not exist yet; return whether the bytes have the declared sha256."""
    from huggingface_hub.file_download import is_xet_available

    if part.is_symlink() or part.exists() or not declared.xet or len(declared.digest) != 64 or not is_xet_available():
        return False
    aside = part.with_name(f"{declared.digest}.{secrets.token_hex(8)}.incomplete")
    try:
        aside.open("xb").close()
        _transfer_xet(repo, place(file)[1], aside, declared)
        with aside.open("r+b") as stream:
            actual = digest_of(stream, declared.digest, file)
            os.fsync(stream.fileno())
        if actual == declared.digest:
            os.replace(aside, part)
            return True
        reason = "the bytes are not the declared ones"
    except Exception as error:  # hf_xet raises many types; the caller downloads over HTTP instead
        reason = one_line(error)
    finally:
        aside.unlink(missing_ok=True)
    log.info("%s: not over Xet (%s), but over HTTP", file, reason)
    return False


def _transfer_xet(repo: str, commit: str, aside: Path, declared: Declared) -> None:
    """Run the download in a thread; abort it if no data arrives for `XET_PATIENCE` seconds."""
    from huggingface_hub.utils import tqdm
    from huggingface_hub.utils._xet import abort_xet_session

    groups: list[XetFileDownloadGroup] = []
    with tqdm(total=declared.size, unit="B", unit_scale=True, desc="over Xet", disable=None) as bar:

        def arrived() -> float:
            progress = groups[0].progress() if groups else None
            bar.update(max(0, progress.total_transfer_bytes_completed - bar.n) if progress else 0)
            return float(bar.n)

        try:
            moving(lambda: _request_xet(repo, commit, aside, declared, groups), arrived, XET_PATIENCE)
        except BaseException:
            abort_xet_session()
            raise


def _request_xet(repo: str, commit: str, aside: Path, declared: Declared, groups: "list[XetFileDownloadGroup]") -> None:
    """Download with `hf_xet`; append the transfer's group to ``groups``, which reports progress."""
    from hf_xet import XetFileInfo
    from huggingface_hub.utils._xet import (
        XetTokenType,
        get_xet_session,
        parse_xet_connection_info_from_headers,
        xet_connection_info_refresh_url,
        xet_headers_without_auth,
    )

    headers = request_headers()
    token = xet_connection_info_refresh_url(token_type=XetTokenType.READ, repo_id=repo, repo_type="model", revision=commit)
    with get(token, XET_PATIENCE) as answer:
        if (storage := parse_xet_connection_info_from_headers(answer.headers)) is None:
            raise ValueError("no storage is named")
    with get_xet_session().new_file_download_group(
        endpoint=storage.endpoint,
        token=storage.access_token,
        token_expiry_unix_secs=storage.expiration_unix_epoch,
        token_refresh_url=token,
        token_refresh_headers=headers,
        custom_headers=xet_headers_without_auth(headers),
    ) as group:
        groups.append(group)
        group.start_download_file(XetFileInfo(declared.xet, declared.size), str(aside.absolute()))
