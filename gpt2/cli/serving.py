"""Serve a page to this machine only: a socket on loopback, and an address that contains a secret."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpt2.errors import InputError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse

HOST = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
Answer = Callable[[Mapping[str, str]], tuple[str, int]]  # query of the address -> page, HTTP status


def listen(port: int) -> socket.socket:
    """Open a socket on loopback. Raises InputError: the port is taken, or a package is missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        remedy = "pip install 'gpt2-toolkit[explore]'; or write it with --html FILE"
        raise InputError(f"serving the page needs the extra explore: {remedy}") from None
    listening = socket.socket()
    try:
        if os.name == "posix":  # on Windows it would let another process take the port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen()  # early connections wait instead of being refused
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or "a port is 0 .. 65535"
        raise InputError(f"--port {port}: {reason.lower()}; choose another, or 0 for a free one") from None
    return listening


def one_page(title: str, answer: Answer, token: str) -> Starlette:
    """Return an application that serves one page, ``/TOKEN/``.

    ``answer`` runs for one request at a time, since it uses all cores.

    Security: every user of this machine can connect to the port, so the address contains a secret that only this terminal shows.
    A request that another site caused is refused, and a wrong Host header (DNS rebinding).
    """
    import asyncio

    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    one_at_a_time = asyncio.Lock()

    async def respond(request: Request) -> HTMLResponse:
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            return HTMLResponse("no such page", 404, HEADERS)
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):  # "none": a typed address
            page = f'<!doctype html><title>{title}</title><p>Another site led here. <a href="./">Open the page</a>'
            return HTMLResponse(page, 403, HEADERS)
        async with one_at_a_time:
            page, status = await run_in_threadpool(answer, request.query_params)
        return HTMLResponse(page.encode(errors="backslashreplace"), status, HEADERS)

    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    served = Starlette(routes=[Route("/{token}/", respond, methods=["GET"])], middleware=[hosts])
    served.router.redirect_slashes = False
    return served


def serve(title: str, answer: Answer, listening: socket.socket) -> None:
    """Serve the page of ``answer`` until Ctrl-C, and print its address."""
    import uvicorn

    token = secrets.token_urlsafe(16)
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    config = uvicorn.Config(one_page(title, answer, token), lifespan="off", ws="none", http="h11", **quiet)
    address = f"http://{HOST}:{listening.getsockname()[1]}/{token}/"
    print(f"open {address} in a browser; Ctrl-C ends it", file=sys.stderr, flush=True)
    with suppress(KeyboardInterrupt):  # the announced end, which uvicorn does not always raise again
        uvicorn.Server(config).run(sockets=[listening])
