"""Fetch a large file over Xet, the Hub's chunked storage, by `huggingface_hub`; if it fails or stalls, the caller takes HTTP.

Its `hf_xet` is up to five times faster on fast lines. It checks no sha256, keeps nothing of a broken transfer, and retries a dead
storage for minutes. So its result is hashed here, and a stalled transfer is given up.
"""

import logging
import os
import secrets
from functools import partial
from pathlib import Path

from gpt2.checkpoint.cache import Declared, digest_of
from gpt2.checkpoint.hub import moving, one_line, request_headers

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
    """Run the client's download in a thread; abort it if no data arrives for `XET_PATIENCE` seconds."""
    from huggingface_hub.file_download import xet_get
    from huggingface_hub.utils import XetFileData, _xet, tqdm

    class Bar(tqdm):
        """Shows the bytes that are written, and counts those that arrive."""

        arrived = 0

        def update_transfer(self, count: int) -> None:
            self.arrived += count

        def set_transfer_postfix_str(self, text: str, *, refresh: bool) -> None:
            """The client's note of the speed, which is not shown."""

    route = _xet.xet_connection_info_refresh_url(
        token_type=_xet.XetTokenType.READ, repo_id=repo, repo_type="model", revision=commit
    )
    data, size = XetFileData(declared.xet, route), declared.size
    get = partial(xet_get, incomplete_path=aside, xet_file_data=data, headers=request_headers(), expected_size=size)
    with Bar(total=size, unit="B", unit_scale=True, desc="over Xet", disable=None) as bar:  # type: ignore[no-untyped-call]
        try:
            moving(lambda: get(_tqdm_bar=bar), lambda: bar.arrived, XET_PATIENCE)
        except BaseException:
            _xet.abort_xet_session()
            raise
