"""Convert every failure of the Hub into one line: what happened, where, and what to do."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpt2.checkpoint.names import OFFICIAL, did_you_mean
from gpt2.errors import CheckpointError, InputError, printable

if TYPE_CHECKING:
    from huggingface_hub.errors import HTTPError

BUSY = (408, 429, 500, 502, 503, 504)  # status codes of temporary failures
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "http_proxy", "all_proxy")


@contextlib.contextmanager
def explained(repo: str, revision: str) -> Iterator[None]:
    """Convert every Hub failure inside into a one-line InputError or CheckpointError."""
    check_environment()
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except InputError:
        raise
    except (HTTPError, HFValidationError, OSError) as error:
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
    from huggingface_hub import constants

    return InputError(f"{constants.ENDPOINT} does not answer as a Hub does ({why}): check HF_ENDPOINT, or use --offline")


def is_final(error: "HTTPError") -> bool:
    """Return whether the refusal is final: no such repository or revision, or no access."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError) and error.response.status_code not in BUSY


def unreachable(repo: str, error: "HTTPError", way_out: str) -> InputError:
    """Return the error for a Hub that does not answer while the cache cannot serve."""
    from huggingface_hub import constants

    proxies = [name for name in PROXIES if os.environ.get(name)]
    check = f"the network, the proxy in {proxies[0]}, or HF_ENDPOINT" if proxies else "the network or HF_ENDPOINT"
    return InputError(f"cannot reach the Hub at {constants.ENDPOINT} for {repo} ({one_line(error)}): check {check}, {way_out}")


def one_line(error: BaseException) -> str:
    """Return an exception's message as one printable line, or its class name if it has none."""
    return printable(" ".join(str(error).split()), one_line=True)[:300] or type(error).__name__


def _explain(repo: str, revision: str, error: Exception) -> InputError:
    from huggingface_hub import constants, errors

    match error:
        case errors.HFValidationError():
            return InputError(f"{repo} cannot be a repository on the Hub: {one_line(error)}")
        case errors.RevisionNotFoundError():
            return InputError(f"{repo} has no revision {revision!r}: name one of its branches, tags or commits")
        case errors.GatedRepoError():
            page = f"{constants.ENDPOINT}/{repo}"
            return InputError(f"{repo} is gated: accept its terms at {page}, then run `hf auth login` or set HF_TOKEN")
        case errors.RepositoryNotFoundError():
            hint = did_you_mean(repo, OFFICIAL.values())
            what = f"no repository {repo} at {constants.ENDPOINT}, and no such path here{hint}"
            return InputError(f"{what}: check the spelling; a private one needs `hf auth login` or HF_TOKEN")
        case errors.HfHubHTTPError():
            status, token = error.response.status_code, "authorization" in error.response.request.headers
            if status == 401 and token:
                return InputError(f"{constants.ENDPOINT} refuses the token (401): correct HF_TOKEN, or run `hf auth login`")
            check = "check HF_TOKEN and HF_ENDPOINT, or retry" if token else "check HF_ENDPOINT, or retry"
            return InputError(f"{constants.ENDPOINT} answers {status} for {repo}: {check}")
        case errors.HTTPError():
            cause = one_line(error.__cause__ or error)
            return InputError(f"the download of {repo} broke off ({cause}): run it again, it goes on from where it was")
    return CheckpointError(
        f"cannot store or read {repo} in the cache {constants.HF_HUB_CACHE} ({one_line(error)}): "
        "check its disk and permissions, or set HF_HOME to another place"
    )
