"""One request to a completions server: its key, retries and rate limits, and what a user can do about an error."""

from __future__ import annotations

import contextlib
import json
import os
import time
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from gpt2.checkpoint.hub import moving
from gpt2.errors import InputError, printable

KEY = "OPENAI_API_KEY"
TRIES = 5
LONGEST_WAIT = 60.0  # seconds that a server may ask to wait
TIMEOUT = 120.0  # seconds for a whole answer
MAX_ANSWER = 1 << 26  # bytes


class _NoRedirect(HTTPRedirectHandler):
    """Follow no redirect, which would take the key to another host."""

    def redirect_request(self, *args: Any) -> None:
        return None


def post(url: str, body: dict[str, Any], name: str, *, private: bool, proxy: bool, refusable: bool) -> dict[str, Any]:
    """Send ``body`` and return the answer's object; try again after 429 and 5xx.

    The key is sent only if the way there is ``private``. An error answer to a ``refusable`` request is {}; any other is an
    InputError that begins with ``name``.
    """
    headers = {"Content-Type": "application/json"}
    if private and (key := os.environ.get(KEY)):
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, json.dumps(body).encode(), headers)
    opener = build_opener(_NoRedirect, *([] if proxy else [ProxyHandler({})]))
    why, wait = "", 0.5

    def whole() -> bytes:
        with opener.open(request, timeout=TIMEOUT) as response:
            return bytes(response.read(MAX_ANSWER + 1))

    for attempt in range(TRIES):
        try:
            answer = moving(whole, lambda: None, TIMEOUT)
            if len(answer) > MAX_ANSWER:
                raise InputError(f"{name}: answered more than {MAX_ANSWER:,} bytes; give the address that ends in /v1")
            found = json.loads(answer)
            if not isinstance(found, dict):
                raise ValueError("no object")
            return found
        except HTTPError as error:
            why, beginning = f"answered {error.code} {error.reason}", ""
            with error, contextlib.suppress(OSError, HTTPException):
                start = moving(partial(error.read, 300), lambda: None, TIMEOUT)
                beginning = printable(start.decode("utf-8", "replace"), one_line=True)
            if error.code in (400, 422, 500, 501) and refusable:
                return {}
            if error.code in (401, 403):
                how = f"put its key into {KEY}" if private else f"{KEY} is sent only over https, or to this machine: use https://"
                raise InputError(f"{name}: {why}; {how}") from None
            if error.code != 429 and error.code < 500:
                raise InputError(f"{name}: {why}: {beginning}; check the address and the model's name after #") from None
            asked = error.headers.get("Retry-After", "")
            is_number = asked.isascii() and asked.replace(".", "", 1).isdigit()
            wait = min(LONGEST_WAIT, float(asked) if is_number else 2 * wait)
        except (URLError, OSError, HTTPException) as error:
            why = f"cannot be reached ({getattr(error, 'reason', error)})"
        except InputError:
            raise
        except (ValueError, RecursionError):
            raise InputError(f"{name}: its answer is not JSON; give the address that ends in /v1") from None
        if attempt < TRIES - 1:
            time.sleep(wait)
    raise InputError(f"{name}: {why}, {TRIES} times; start the server, or try again later")
