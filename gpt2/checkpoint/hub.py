"""Ask the Hub: which commit a name means, which files it has, and a file's bytes; make every failure one line.

Session, proxies, token, settings and the errors behind HTTP codes are `huggingface_hub`'s. Its listing functions (2.4) follow a
next page to any host with the token, and limit neither time nor size. Here every part of a response is checked.
"""

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, urlsplit

from gpt2.checkpoint.cache import COMMIT, HASH, XET_HASH, Declared
from gpt2.checkpoint.names import OFFICIAL
from gpt2.errors import CheckpointError, InputError, did_you_mean, printable

if TYPE_CHECKING:
    from httpx2 import Response
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

T = TypeVar("T")
JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"

WARM_PATIENCE = 3.0  # seconds for a response if the cache can serve instead
MAX_WAIT = 60.0  # seconds in total that a Hub may ask to wait
MAX_ANSWER = 32 << 20  # bytes of one response; a listing's page has a thousand rows of 200 bytes
MAX_LISTING = 3  # time limit of a whole listing, in multiples of one response's
MAX_FILES = 200_000  # of a repository
BUSY = (408, 429, 500, 502, 503, 504)  # status codes of temporary failures
SAID = ("X-Error-Code", "X-Error-Message", "RateLimit", "RateLimit-Policy", "Retry-After")  # headers that explain a refusal
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "http_proxy", "all_proxy")

log = logging.getLogger("gpt2")


def commit_of(repo: str, revision: str, kind: Literal["model", "dataset"] = "model", *, warm: bool = False) -> str:
    """Return the commit of a branch, tag or short commit. Raises InputError: not a Hub. HTTPError: no answer, or a refusal."""
    url = f"{_endpoint()}/api/{kind}s/{repo}/revision/{quote(revision, safe='')}"
    answer, _ = _ask(url, {}, _patience(warm), warm)
    return require_commit(answer.get("sha") if isinstance(answer, dict) else None)


def require_commit(sha: object) -> str:
    """Return the commit that a Hub names. Raises InputError: it is none."""
    if not (isinstance(sha, str) and COMMIT.fullmatch(sha)):
        raise no_hub("names no commit")
    return sha


def list_files(repo: str, commit: str, *, warm: bool = False) -> dict[str, Declared]:
    """Return all files of a commit by path. Raises as :func:`commit_of` does."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    files: dict[str, Declared] = {}
    query, seen = {"recursive": "true", "expand": "false"}, set[str]()
    seconds = _patience(warm)
    end = time.monotonic() + MAX_LISTING * seconds
    while query:
        left = min(seconds, max(end - time.monotonic(), 0.1))
        try:
            rows, link = _ask(f"{_endpoint()}/api/models/{repo}/tree/{commit}", query, left, warm)
        except HfHubHTTPError as error:
            if type(error) is not HfHubHTTPError or error.response.status_code != 404:
                raise
            raise InputError(f"{_endpoint()} knows {repo}, and lists none of its files (404): check HF_ENDPOINT") from error
        if not isinstance(rows, list):
            raise no_hub("its listing is not a list")
        files |= dict(_row(row) for row in rows if not (isinstance(row, dict) and row.get("type") == "directory"))
        try:  # security: use only the query, since the URL may point to another host
            query = dict(parse_qsl(urlsplit(link).query))
        except ValueError as error:
            raise no_hub("its listing has no next page") from error
        if link in seen or len(files) > MAX_FILES:
            raise no_hub("its listing does not end")
        if query and time.monotonic() > end:
            raise HTTPError(f"no whole listing in {MAX_LISTING * seconds:g} s")
        seen.add(link)
    return files


def _row(row: JSON) -> tuple[str, Declared]:
    if not isinstance(row, dict):
        raise no_hub("its listing has a row that is not a file")
    path, oid, size, xet, lfs = (row.get(key) for key in ("path", "oid", "size", "xetHash", "lfs"))
    sha256 = lfs.get("oid") if isinstance(lfs, dict) else None
    digest = next((value for value in (sha256, oid) if isinstance(value, str) and HASH.fullmatch(value)), "")
    if not (isinstance(path, str) and isinstance(size, int) and 0 <= size < 1 << 60):
        raise no_hub("its listing has a row without a path and a size")
    return path, Declared(digest, size, xet if isinstance(xet, str) and XET_HASH.fullmatch(xet) else "")


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _patience(warm: bool) -> float:
    from huggingface_hub import constants

    return WARM_PATIENCE if warm and "HF_HUB_ETAG_TIMEOUT" not in os.environ else float(constants.HF_HUB_ETAG_TIMEOUT)


def _ask(url: str, query: dict[str, str], seconds: float, warm: bool) -> tuple[JSON, str]:
    """Return one JSON response and the next page's URL. With ``warm`` (the cache can serve), do not wait for a rate limit."""
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
    """Wait as long as a 429 asks, log it, return the seconds. Raises InputError: more than a minute in total."""
    from huggingface_hub.utils import parse_ratelimit_headers

    limit, after = parse_ratelimit_headers(error.response.headers), error.response.headers.get("Retry-After", "")
    seconds = 10.0  # if the response names no time
    if limit is not None and limit.remaining == 0:
        seconds = float(min(limit.reset_in_seconds, 10**9))
    elif after.isascii() and after.isdecimal() and len(after) < 10:
        seconds = float(after)
    if waited + seconds > MAX_WAIT:
        way_out = "run it again then, or log in (`hf auth login` or HF_TOKEN raises the limit)"
        raise InputError(f"rate limited by {_endpoint()}, which asks to wait {seconds:.0f} s more: {way_out}") from error
    log.warning("rate limited by %s: waiting %.0f s", _endpoint(), seconds)
    time.sleep(seconds)
    return max(seconds, 1.0)


def _answer(url: str, query: dict[str, str], seconds: float) -> tuple[JSON, str]:
    """Request in a thread: a socket's timeout restarts at each byte and address, and does not cover the DNS lookup."""
    from huggingface_hub.errors import HTTPError

    end = time.monotonic() + seconds

    def request() -> tuple[bytes, str]:
        with get(url, seconds, query) as answer:
            return body_of(answer, end), str(answer.links.get("next", {}).get("url", ""))

    try:
        body, link = moving(request, lambda: None, seconds + 0.5)
    except TimeoutError:
        raise HTTPError(f"no answer in {seconds:g} s") from None
    except (HTTPError, OSError, InputError):
        raise
    except Exception as error:  # any error of huggingface_hub for a malformed response
        raise no_hub(one_line(error)) from error
    if time.monotonic() > end:
        raise HTTPError(f"no whole answer in {seconds:g} s")
    try:
        return json.loads(body), link
    except (ValueError, RecursionError) as error:
        raise no_hub("its answer is not JSON") from error


def body_of(answer: "Response", end: float = math.inf) -> bytes:
    """Return a streamed response's body, or what of it came before ``end``. Raises InputError: it is too long."""
    body = bytearray()
    for chunk in answer.iter_bytes():
        body += chunk
        if len(body) > MAX_ANSWER:
            raise no_hub("its answer does not end")
        if time.monotonic() > end:
            break
    return bytes(body)


def moving(work: Callable[[], T], moved: Callable[[], object], seconds: float) -> T:
    """Return what ``work`` returns, run in a daemon thread. Raises TimeoutError: ``moved`` returned the same for ``seconds``."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    before, since = moved(), time.monotonic()
    while not wait([future], min(0.1, seconds)).done:
        if (now := moved()) != before:
            before, since = now, time.monotonic()
        elif time.monotonic() > since + seconds:
            raise TimeoutError(f"nothing moves in {seconds:g} s")
    return future.result()


@contextlib.contextmanager
def get(
    url: str, seconds: float, query: dict[str, str] | None = None, headers: dict[str, str] | None = None
) -> "Iterator[Response]":
    """Stream a response; ``seconds`` limit each step. A refusal raises `huggingface_hub`'s exception; its body is not read."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    try:
        session = get_session()
    except Exception as error:  # the HTTP library refuses a URL, a file or a scheme
        variables = (*PROXIES, "SSL_CERT_FILE", "SSL_CERT_DIR")
        names = ", ".join(name for name in variables if os.environ.get(name)) or "the proxy's settings"
        raise InputError(f"no connection can be set up ({one_line(error)}): correct or unset {names}") from error
    sent = request_headers() | (headers or {})
    with session.stream("GET", url, params=query or None, headers=sent, timeout=seconds) as answer:
        if answer.status_code >= 400:
            said = {name: answer.headers[name][:200] for name in SAID if name in answer.headers}  # also limits a number's digits
            hf_raise_for_status(type(answer)(answer.status_code, headers=said, request=answer.request))
        yield answer


def request_headers() -> dict[str, str]:
    """Return `huggingface_hub`'s headers with its token. Raises InputError: the token cannot be sent."""
    from huggingface_hub.utils import build_hf_headers

    try:
        headers = build_hf_headers()
    except (ValueError, PermissionError) as error:
        raise InputError(f"the Hub's token cannot be read ({one_line(error)}): set HF_TOKEN or run `hf auth login`") from error
    token = headers.get("authorization", "")
    if not (token.isascii() and token.isprintable()):
        raise InputError("the Hub's token holds characters that no token has: set HF_TOKEN again, or run `hf auth login`")
    return headers


@contextlib.contextmanager
def explained(repo: str, revision: str = "") -> Iterator[None]:
    """Convert every failure of the Hub into an error of one line."""
    check_environment()
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except InputError:
        raise
    except (HTTPError, OSError, HFValidationError) as error:
        raise _explain(repo, revision, error) from error


def check_environment() -> None:
    """Raise InputError for a variable that would make importing `huggingface_hub` or transformers fail."""
    try:
        urlsplit(os.environ.get("HF_ENDPOINT", "")).port  # noqa: B018
    except ValueError as error:
        raise InputError(f"HF_ENDPOINT={os.environ['HF_ENDPOINT']} is not a URL: set or unset it ({error})") from error
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        value = os.environ.get(name, "1").strip()
        if not (value.isascii() and value.isdecimal() and 0 < int(value[:9]) < 10**6 and len(value) < 9):
            raise InputError(f"{name}={os.environ[name]} is not a whole number of seconds: set or unset it")


def no_hub(why: str) -> InputError:
    """Return the error for a response that no Hub sends."""
    return InputError(f"{_endpoint()} does not answer as a Hub does ({why}): check HF_ENDPOINT, or use --offline")


def is_final(error: "HTTPError") -> bool:
    """Return whether the refusal is final: no such repository or revision, or no access."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError) and error.response.status_code not in BUSY


def unreachable(repo: str, error: "HTTPError", way_out: str) -> InputError:
    """Return the error for a Hub that does not answer while the cache cannot serve."""
    proxies = [name for name in PROXIES if os.environ.get(name)]
    check = f"the network, the proxy in {proxies[0]}, or HF_ENDPOINT" if proxies else "the network or HF_ENDPOINT"
    return InputError(f"cannot reach the Hub at {_endpoint()} for {repo} ({one_line(error)}): check {check}, {way_out}")


def one_line(error: BaseException) -> str:
    """Return an exception's message as one printable line, or its class name if it has none."""
    return printable(" ".join(str(error).split()), one_line=True)[:300] or type(error).__name__


def _explain(repo: str, revision: str, error: Exception) -> InputError:
    from huggingface_hub import constants, errors

    hub = _endpoint()
    match error:
        case errors.HFValidationError():
            return InputError(f"{repo} cannot be a repository on the Hub: {one_line(error)}")
        case errors.RevisionNotFoundError():
            return InputError(f"{repo} has no revision {revision!r}: name one of its branches, tags or commits")
        case errors.GatedRepoError():
            return InputError(f"{repo} is gated: accept its terms at {hub}/{repo}, then run `hf auth login` or set HF_TOKEN")
        case errors.RepositoryNotFoundError():
            what = f"no repository {repo} at {hub}, and no such path here{did_you_mean(repo.lower(), OFFICIAL.values())}"
            return InputError(f"{what}: check the spelling; a private one needs `hf auth login` or HF_TOKEN")
        case errors.HfHubHTTPError():
            status, token = error.response.status_code, "authorization" in error.response.request.headers
            if status == 401 and token:
                return InputError(f"{hub} refuses the token (401): correct HF_TOKEN, or run `hf auth login`")
            check = "check HF_TOKEN and HF_ENDPOINT, or retry" if token else "check HF_ENDPOINT, or retry"
            return InputError(f"{hub} answers {status} for {repo}: {check}")
        case errors.HTTPError():
            cause = one_line(error.__cause__ or error)
            return InputError(f"the download of {repo} broke off ({cause}): run it again, it goes on from where it was")
    return CheckpointError(
        f"cannot store or read {repo} in the cache {constants.HF_HUB_CACHE} ({one_line(error)}): "
        "check its disk and permissions, or set HF_HOME to another place"
    )
