"""Serve a page to this machine only: a server on loopback, and an address that contains a secret."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl

from gpt2.errors import InputError

HOST = "127.0.0.1"
HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}
Answer = Callable[[Mapping[str, str]], tuple[str, int]]  # query of the address -> page, HTTP status


class PageServer(ThreadingHTTPServer):
    """Serves one page, ``/TOKEN/``, made for one request at a time, since that uses all cores.

    Security: every user of this machine can connect to the port, so the address contains a secret that only this terminal shows.
    A request that another site caused is refused, and a wrong Host header (DNS rebinding).
    """

    allow_reuse_address = os.name == "posix"  # on Windows it would let another process take the port
    daemon_threads = True

    def __init__(self, port: int) -> None:
        """Listen on loopback, so that early connections wait. Raises InputError: the port is taken, or is none."""
        self.token, self.one_at_a_time = secrets.token_urlsafe(16), Lock()
        try:
            super().__init__((HOST, port), _Request)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "a port is 0 .. 65535"
            raise InputError(f"--port {port}: {reason.lower()}; choose another, or 0 for a free one") from None

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks for this machine's name, which may take seconds

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a browser that left
            super().handle_error(request, client_address)

    def serve(self, answer: Answer) -> None:
        """Serve until Ctrl-C, and print the address."""
        self.answer = answer
        address = f"http://{HOST}:{self.server_address[1]}/{self.token}/"
        print(f"open {address} in a browser; Ctrl-C ends it", file=sys.stderr, flush=True)
        with suppress(KeyboardInterrupt):
            self.serve_forever()


class _Request(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self.headers.get("host", "").partition(":")[0] not in (HOST, "localhost"):
            self._send("no such host", 400)
        elif not secrets.compare_digest(path.encode(errors="replace"), f"/{self.server.token}/".encode()):
            self._send("no such page", 404)
        elif self.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):  # "none": a typed address
            self._send('<!doctype html><title>gpt2</title><p>Another site led here. <a href="./">Open the page</a>', 403)
        else:
            with self.server.one_at_a_time:
                page, status = self.server.answer(dict(parse_qsl(query, keep_blank_values=True)))
            self._send(page, status)

    def _send(self, page: str, status: int) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(page.encode(errors="backslashreplace"))

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing: requests hold the secret and the prompt."""
