"""Fetch a large file over Xet, the Hub's chunked storage, with `hf_xet`; where it fails or stalls, the caller takes HTTP.

`hf_xet` is up to five times faster on fast lines. It checks no sha256, keeps nothing of a broken transfer, and retries a dead
storage for minutes. So its result is hashed here, and a stalled transfer is given up.
"""

import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.checkpoint.cache import Declared, digest_of
from gpt2.checkpoint.hub import get, moving, one_line, request_headers

if TYPE_CHECKING:
    from hf_xet import XetFileDownloadGroup

XET_PATIENCE = 10.0  # seconds without data

log = logging.getLogger("gpt2")


def over_xet(repo: str, file: Path, commit: str, part: Path, declared: Declared) -> bool:
    """Download ``file`` to ``part``, which is not there yet; return whether the bytes have the declared sha256."""
    aside = part.with_name(f"{declared.digest}.{secrets.token_hex(8)}.incomplete")
    try:
        aside.open("xb").close()
        _transfer(repo, commit, aside, declared)
        with aside.open("r+b") as stream:
            whole = digest_of(stream, declared.digest, file) == declared.digest
            os.fsync(stream.fileno())
        if whole:
            os.replace(aside, part)
            return True
        reason = "the bytes are not the declared ones"
    except Exception as error:  # hf_xet raises many types
        reason = one_line(error)
    finally:
        aside.unlink(missing_ok=True)
    log.info("%s: not over Xet (%s), but over HTTP", file, reason)
    return False


def _transfer(repo: str, commit: str, aside: Path, declared: Declared) -> None:
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
            moving(lambda: _request(repo, commit, aside, declared, groups), arrived, XET_PATIENCE)
        except BaseException:
            abort_xet_session()
            raise


def _request(repo: str, commit: str, aside: Path, declared: Declared, groups: "list[XetFileDownloadGroup]") -> None:
    """Download with `hf_xet`; append the transfer's group to ``groups``, which reports progress."""
    from hf_xet import XetFileInfo
    from huggingface_hub.utils import _xet

    headers = request_headers()
    token = _xet.xet_connection_info_refresh_url(
        token_type=_xet.XetTokenType.READ, repo_id=repo, repo_type="model", revision=commit
    )
    with get(token, XET_PATIENCE) as answer:
        if (storage := _xet.parse_xet_connection_info_from_headers(answer.headers)) is None:
            raise ValueError("no storage is named")
    with _xet.get_xet_session().new_file_download_group(
        endpoint=storage.endpoint,
        token=storage.access_token,
        token_expiry_unix_secs=storage.expiration_unix_epoch,
        token_refresh_url=token,
        token_refresh_headers=headers,
        custom_headers=_xet.xet_headers_without_auth(headers),
    ) as group:
        groups.append(group)
        group.start_download_file(XetFileInfo(declared.xet, declared.size), str(aside.absolute()))
