"""What a load asks a Hub: which commit is a branch, and which files does it hold?

Requests go through the client's session (`huggingface_hub`), so that its proxies, certificates and token hold. The client's own
functions are not used: they take a commit and a hash from the answer as parts of a path, follow the next page of a listing to
any host with the token, and have no limit on time or size. Nothing is taken from an answer here that does not have the one form
it must have.

**Patience.** The client tries a dead server for 23 seconds. Here each answer has a limit in wall-clock time: 3 s where the cache
can serve instead, else the client's 10 s (``HF_HUB_ETAG_TIMEOUT`` overrides both). A Hub that asks to wait (429) is waited for,
up to a minute in all.
"""

import json
import logging
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Literal, TypeAlias
from urllib.parse import parse_qsl, quote, urlsplit

from gpt2.checkpoint.cache import COMMIT, HASH, XET_HASH, Declared
from gpt2.checkpoint.hub_errors import PROXIES, no_hub, one_line
from gpt2.errors import InputError

if TYPE_CHECKING:
    from httpx2 import Client, Response
    from huggingface_hub.errors import HfHubHTTPError

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"
Kind = Literal["model", "dataset"]

WARM_PATIENCE = 3.0  # seconds for an answer, where the cache can serve
MAX_WAIT = 60.0  # seconds that a Hub may ask to wait, in all
MAX_ANSWER = 32 << 20  # bytes of one answer; a page of a listing has a thousand rows of 200 bytes
MAX_LISTING = 3  # a listing may take so many times as long as an answer, over all its pages
MAX_FILES = 200_000  # of a repository
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")

log = logging.getLogger("gpt2")


def commit_of(repo: str, revision: str, kind: Kind = "model", *, warm: bool = False) -> str:
    """The commit that a branch, a tag or a short commit stands for now.

    Args:
        warm: whether the cache can serve instead; then the answer has less time.

    Raises:
        InputError: whoever answers is no Hub. The client's HTTPError: no answer, or a refusal.
    """
    answer, _ = _ask(f"{_address(repo, kind)}/revision/{quote(revision, safe='')}", {}, _patience(warm), warm)
    commit = answer.get("sha") if isinstance(answer, dict) else None
    if not (isinstance(commit, str) and COMMIT.fullmatch(commit)):
        raise no_hub("names no commit")
    return commit


def list_files(repo: str, commit: str, kind: Kind = "model", *, warm: bool = False) -> dict[str, Declared]:
    """All files of a commit by path, over all pages of the listing. Raises as :func:`commit_of` does."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    files: dict[str, Declared] = {}
    query, seen = {"recursive": "true", "expand": "false"}, set[str]()
    seconds = _patience(warm)
    end = time.monotonic() + MAX_LISTING * seconds
    while query:
        try:
            rows, link = _ask(
                f"{_address(repo, kind)}/tree/{commit}", query, min(seconds, max(end - time.monotonic(), 0.1)), warm
            )
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except HfHubHTTPError as error:
            if error.response.status_code == 404:
                raise InputError(f"{_endpoint()} knows {repo}, and lists none of its files (404): check HF_ENDPOINT") from error
            raise
        if not isinstance(rows, list):
            raise no_hub("its listing is no list")
        files |= dict(_row(row) for row in rows if not (isinstance(row, dict) and row.get("type") == "directory"))
        try:  # the place in the listing, and not the address: it could lead to another host
            query = dict(parse_qsl(urlsplit(link).query))
        except ValueError as error:
            raise no_hub("its listing has no next page") from error
        if link in seen or len(files) > MAX_FILES:
            raise no_hub("its listing comes to no end")
        if query and time.monotonic() > end:
            raise HTTPError(f"no whole listing in {MAX_LISTING * seconds:g} s")
        seen.add(link)
    return files


def _row(row: JSON) -> tuple[str, Declared]:
    """A file of a listing: its path, and what is declared of it."""
    if not isinstance(row, dict):
        raise no_hub("its listing has a row that is no file")
    path, oid, size, xet, lfs = (row.get(key) for key in ("path", "oid", "size", "xetHash", "lfs"))
    sha256 = lfs.get("oid") if isinstance(lfs, dict) else None
    digest = next((value for value in (sha256, oid) if isinstance(value, str) and HASH.fullmatch(value)), "")
    if not (isinstance(path, str) and isinstance(size, int) and 0 <= size < 1 << 60):
        raise no_hub("its listing has a row without a path and a size")
    return path, Declared(digest, size, xet if isinstance(xet, str) and XET_HASH.fullmatch(xet) else "")


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _address(repo: str, kind: Kind) -> str:
    return f"{_endpoint()}/api/{kind}s/{repo}"


def _patience(warm: bool) -> float:
    from huggingface_hub import constants

    return WARM_PATIENCE if warm and "HF_HUB_ETAG_TIMEOUT" not in os.environ else float(constants.HF_HUB_ETAG_TIMEOUT)


def _ask(url: str, query: dict[str, str], seconds: float, warm: bool) -> tuple[JSON, str]:
    """One JSON answer and the address of the next page, in limited time. Where the cache can serve, no wait is granted."""
    from huggingface_hub.errors import HfHubHTTPError

    waited = 0.0
    while True:
        try:
            return _answer(url, query, seconds)
        except HfHubHTTPError as error:
            if warm or error.response.status_code != 429:
                raise
            waited += wait_for_rate_limit(error, waited)


def wait_for_rate_limit(error: "HfHubHTTPError", waited: float) -> float:
    """Wait as long as a 429 asks for, and say so; the seconds. Raises InputError where that is more than a minute in all."""
    from huggingface_hub.utils import parse_ratelimit_headers

    limit, after = parse_ratelimit_headers(error.response.headers), error.response.headers.get("Retry-After", "")
    seconds = 10.0  # where nothing is said
    if limit is not None and limit.remaining == 0:
        seconds = float(min(limit.reset_in_seconds, 10**9))
    elif after.isascii() and after.isdecimal() and len(after) < 10:
        seconds = float(after)
    if waited + seconds > MAX_WAIT:
        raise InputError(
            f"rate limited by {_endpoint()}, which asks to wait {seconds:.0f} s more: run it again then, or log in "
            "(`hf auth login` or HF_TOKEN raises the limit)"
        ) from error
    log.warning("rate limited by %s: waiting %.0f s", _endpoint(), seconds)
    time.sleep(seconds)
    return max(seconds, 1.0)


def _answer(url: str, query: dict[str, str], seconds: float) -> tuple[JSON, str]:
    """In a thread: a socket's timeout starts anew for every byte and for every address that a name resolves to, and does not
    cover the name's lookup."""
    from huggingface_hub.errors import HTTPError

    results: queue.SimpleQueue[tuple[bytes, str] | Exception] = queue.SimpleQueue()
    end = time.monotonic() + seconds

    def request() -> None:
        try:
            headers = request_headers()
            with session().stream("GET", url, params=query or None, headers=headers, timeout=seconds) as answer:
                raise_for_status(answer)
                body = bytearray()
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > MAX_ANSWER or time.monotonic() > end:
                        break
                results.put((bytes(body), str(answer.links.get("next", {}).get("url", ""))))
        except Exception as error:  # whatever the client makes of such an answer
            results.put(error)

    threading.Thread(target=request, daemon=True).start()
    try:
        result = results.get(timeout=seconds + 0.5)
    except queue.Empty:
        raise HTTPError(f"no answer in {seconds:g} s") from None
    if isinstance(result, (HTTPError, OSError, InputError)):
        raise result
    if isinstance(result, Exception):
        raise no_hub(one_line(result)) from result
    if time.monotonic() > end:
        raise HTTPError(f"no whole answer in {seconds:g} s")
    try:
        return json.loads(result[0]), result[1]
    except (ValueError, RecursionError) as error:
        raise no_hub("its answer is not JSON") from error


def session() -> "Client":
    """The client's session. Raises InputError where a proxy or a certificate of the environment cannot be used."""
    from huggingface_hub.utils import get_session

    try:
        return get_session()
    except Exception as error:  # a URL, a file or a scheme that the HTTP library refuses
        names = ", ".join(name for name in (*PROXIES, *CERTIFICATES) if os.environ.get(name)) or "the proxy's settings"
        raise InputError(f"no connection can be set up ({one_line(error)}): correct or unset {names}") from error


def request_headers() -> dict[str, str]:
    """The client's headers, with its token. Raises InputError for a token that cannot be sent."""
    from huggingface_hub.utils import build_hf_headers

    try:
        headers = build_hf_headers()
    except (ValueError, PermissionError) as error:
        raise InputError(f"the Hub's token cannot be read ({one_line(error)}): set HF_TOKEN or run `hf auth login`") from error
    token = headers.get("authorization", "")
    if not (token.isascii() and token.isprintable()):
        raise InputError("the Hub's token holds characters that no token has: set HF_TOKEN again, or run `hf auth login`")
    return headers


def raise_for_status(answer: "Response") -> None:
    """The client's exception for a refusal. It is made from the status and a few headers: the body may have no end."""
    from huggingface_hub.utils import hf_raise_for_status

    if answer.status_code >= 400:
        known = ("X-Error-Code", "X-Error-Message", "RateLimit", "RateLimit-Policy", "Retry-After")
        headers = {name: answer.headers[name][:200] for name in known if name in answer.headers}  # a number has a limit too
        hf_raise_for_status(type(answer)(answer.status_code, headers=headers, request=answer.request))
