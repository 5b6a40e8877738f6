"""Download one large file over Xet, the Hub's chunked storage, through Hugging Face's library `hf_xet`.

The library checks no sha256, keeps nothing of a broken transfer, and retries a dead storage for minutes. So the result is
hashed here, and a transfer that stalls falls back to :mod:`gpt2.checkpoint.download`.
"""

import logging
import os
import secrets
import time
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.checkpoint.cache import Declared, place
from gpt2.checkpoint.hub_api import get, in_thread, request_headers
from gpt2.checkpoint.hub_errors import one_line
from gpt2.checkpoint.verified import digest_of

if TYPE_CHECKING:
    from hf_xet import XetFileDownloadGroup

PATIENCE = 10.0  # seconds without data

log = logging.getLogger("gpt2")


def fetch_by_xet(repo: str, file: Path, part: Path, declared: Declared) -> bool:
    """Download to ``part`` if it does not exist yet; return whether the bytes have the declared sha256."""
    from huggingface_hub.file_download import is_xet_available

    started = part.is_symlink() or part.exists()
    if started or not declared.xet or len(declared.digest) != 64 or not is_xet_available():
        return False
    aside = part.with_name(f"{declared.digest}.{secrets.token_hex(8)}.incomplete")
    try:
        aside.open("xb").close()
        _transfer(repo, place(file)[1], aside, declared)
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


def _transfer(repo: str, commit: str, aside: Path, declared: Declared) -> None:
    """Run the download in a thread; abort it if no data arrives for `PATIENCE` seconds."""
    from huggingface_hub.utils import tqdm
    from huggingface_hub.utils._xet import abort_xet_session

    groups: list[XetFileDownloadGroup] = []
    transfer = in_thread(lambda: _download(repo, commit, aside, declared, groups))
    arrived, since = 0, time.monotonic()
    with tqdm(total=declared.size, unit="B", unit_scale=True, desc="over Xet", disable=None) as bar:
        try:
            while not wait([transfer], 0.1).done:
                progress = groups[0].progress() if groups else None
                now = progress.total_transfer_bytes_completed if progress else 0
                if now > arrived:
                    bar.update(now - arrived)
                    arrived, since = now, time.monotonic()
                elif time.monotonic() > since + PATIENCE:
                    raise TimeoutError(f"nothing arrives in {PATIENCE:g} s")
        except BaseException:
            abort_xet_session()
            raise
    transfer.result()


def _download(repo: str, commit: str, aside: Path, declared: Declared, groups: "list[XetFileDownloadGroup]") -> None:
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
    with get(token, PATIENCE) as answer:
        storage = parse_xet_connection_info_from_headers(answer.headers)
    if storage is None:
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
