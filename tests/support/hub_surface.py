"""Damaged answers of a Hub, a surface of `support/surfaces.py`.

Each case is `gpt2 info org/name` against the stand-in Hub, into a cache that is empty, full or half full. One to three kinds
of answers are changed: the JSON, the raw body, headers, the status, the connection. The command must exit with 0 or 2. With 2
it prints one line on stderr, apart from waits for a rate limit. With 0 the weights are right. No file outside the cache may be
written, changed or deleted: the cache is deep in a folder, and every level above it holds a user's file.

Time limits are 1 s here, not 10, and a stall is rare: so that thousands of cases fit.
"""

import atexit
import contextlib
import io
import json
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from gpt2.cli.main import main
from gpt2.errors import InputError
from support.checks import content
from support.fuzz import JUNK, Surface, changed_json
from support.hf_layouts import official
from support.hub_client import beside, plant
from support.hub_standin import Answer, HubStandIn, Request

WEIGHTS = "model.safetensors"
PATHS = ["../../../victim", "../../victim", "/tmp/gpt2-fuzz-victim", "..", ".", "a/../../../../victim", "C:\\victim", "\0"]
WORDS = ["", "main", "null", "\x1b]0;title\x07\x1b[2J", "a\nb", "a\r\nX-Evil: 1", "\ud800", "9" * 5000, "x" * 70_000, "<html>"]
HEXES = ["0" * 40, "f" * 64, "A" * 40, "0" * 39, "0" * 41, "g" * 40]
ANSWERS_JUNK: list[Any] = [*JUNK, {"oid": None}, {"a": {"b": []}}, *PATHS, *WORDS, *HEXES]
LOCATIONS = ["", "/", "//", "http://", "http://[::1", "file:///etc/passwd", "ftp://127.0.0.1/x", "http://127.0.0.1:1/x"]
LOCATIONS += ["../" * 9, "javascript:x", "/org/name/resolve/main/config.json", "http://a b/", "http://\x7f/"]
LOCATIONS += ["http://127.0.0.1:99999/"]
LINKS = ['<>; rel="next"', '</x?cursor=MQ%3D%3D>; rel="next"', "<", "next", '<http://[/?a=b>; rel="next"', ",;,;"]
LINKS += ['<http://127.0.0.1:1/?cursor=Mg%3D%3D>; rel="next"', '<?>; rel=next; rel="next"']
LINKS += ['</?recursive=false&cursor=>; rel="next"']
HEADERS: dict[str, list[str]] = {
    "ETag": [f'"{word}"' for word in (*PATHS, *HEXES)] + ["W/", ""],
    "X-Linked-Etag": [f'"{word}"' for word in (*PATHS, *HEXES)],
    "X-Repo-Commit": [*PATHS, *HEXES, ""],
    "X-Linked-Size": ["-1", "x", "9" * 5000],
    "X-Xet-Hash": [*PATHS, *HEXES],
    "X-Error-Code": ["RepoNotFound", "GatedRepo", "EntryNotFound", "RevisionNotFound", "\x1b[2J"],
    "X-Error-Message": ["\x1b]0;title\x07", "x" * 9000, "Invalid credentials in Authorization header"],
    "X-HF-Warning": ["a; \x1b[2J", ";", "x" * 9000],
    "Location": LOCATIONS,
    "Link": LINKS,
    "Content-Length": ["0", "5", "-1", "x", "99999999", "9" * 30, ""],
    "Content-Type": ["text/html; charset=nonsense", "\x7f", "application/json; charset=utf-16"],
    "Content-Encoding": ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x"],
    "Content-Range": ["bytes 0-0/1", "bytes 9-1/x", "x"],
    "Transfer-Encoding": ["chunked", "gzip, chunked", "x"],
    "Content-Disposition": ['attachment; filename="../../../victim"'],
    "Set-Cookie": ["a=b; Domain=\x7f", "=", "a" * 9000],
    "RateLimit": ['"api";r=0;t=0', '"api";r=0;t=99999', '"api";r=0;t=' + "9" * 5000, "x"],
    "Retry-After": ["0", "99999", "-1", "x"],
    "Connection": ["close", "upgrade"],
    "Upgrade": ["h2c"],
}
STATUSES = [200, 201, 204, 206, 300, 301, 302, 304, 307, 308, 400, 401, 403, 404, 408, 410, 416, 500, 502, 503, 511, 599, 999]
RAW = [b"", b"\0", b"HTTP/1.1", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/9.9 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200_000]
RAW += [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 100 Continue\r\n\r\n" * 50, b"SSH-2.0\r\n", b"\xff" * 5000]
RAW += [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 200 OK\r\n\xff\xfe: \xff\r\n\r\n"]
RAW += [b"HTTP/1.1 \xff\r\n\r\n"]
BODIES = [b"", b"null", b"{", b"[" * 100_000, b"9" * 5000, b"<html></html>", b"\xff\xfe", b"\x1f\x8b\x08garbage", b"{}", b"[]"]
KEYS = ["path", "size", "oid", "lfs", "sha", "type", "../x"]


def changed(pick: random.Random, answer: Answer, way: str) -> Answer:
    """An answer with another body, header or status, none that is HTTP, or an order to wait."""
    body = answer.body or b""
    at = pick.randrange(len(body) + 1)
    if way == "json":
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(body)
            for _ in range(pick.randint(1, 3)):
                value = changed_json(value, pick, KEYS, ANSWERS_JUNK)
            return replace(answer, body=json.dumps(value).encode())
    if way == "body":
        return replace(answer, body=pick.choice([*BODIES, body[:at], body + b"x", body[:at] + b"\0" + body[at + 1 :]]))
    if way == "raw":
        return Answer(0, {}, pick.choice(RAW))
    if way == "limited":
        return Answer(429, {"RateLimit": pick.choice(['"api";r=0;t=0', '"api";r=0;t=99999', '"api";r=0;t=61'])}, b"")
    name = pick.choice(list(HEADERS))
    value = pick.choice(HEADERS[name]).encode("utf-8", "replace").decode("latin-1")
    status = pick.choice(STATUSES) if way == "status" else answer.status
    return replace(answer, headers=answer.headers | {name: value}, status=status)


ASKED = ["/revision/", "/tree/", "config.json", WEIGHTS, "resolve-cache", "/lfs/", "/"]
WAYS = ["json"] * 6 + ["header"] * 5 + ["body", "status"] * 2 + ["raw", "limited"]


def answers(folder: Path) -> Surface:
    top, filled, source = (folder / name for name in ("top", "filled", "source"))
    home = top.joinpath(*"abcdef", "home")
    plant(top, home)
    official(source)
    files, before, pause = content(source), beside(top, home), mock.patch("gpt2.checkpoint.download.PAUSES", (0.01,) * 3)
    hub = HubStandIn().__enter__()
    atexit.register(hub.__exit__, None, None, None)
    hub.add_repo("org/name", files, lfs=(WEIGHTS,))
    os.environ.update(hub.environ(home, HF_HUB_ETAG_TIMEOUT="1", HF_HUB_DOWNLOAD_TIMEOUT="1"))  # before the client's import

    def damage(pick: random.Random) -> None:
        if not filled.exists():
            shutil.copytree(home, filled, symlinks=True)
        shutil.rmtree(home)
        state = pick.randrange(4)
        if state > 1:
            shutil.copytree(filled, home, symlinks=True)
        if state == 3:
            cached = home / "hub/models--org--name"
            pick.choice([*cached.rglob("*.json"), *(cached / "blobs").iterdir()]).unlink()
        plan = [(pick.choice(ASKED), pick.choice(WAYS), pick.random() < 0.5) for _ in range(pick.randint(1, 3))]
        hub.rows_per_page, stalls = pick.choice([2, 1000]), pick.random() < 0.005

        def rewrite(request: Request, answer: Answer) -> Answer:
            if stalls:
                hub.wait_until_closed(3)
            for part, way, always in plan:
                if part in request.path and (always or pick.random() < 0.5):
                    answer = changed(pick, answer, way)
            return answer

        hub.rewrite = rewrite

    def read() -> None:
        home.mkdir(exist_ok=True)
        hub.requests.clear()
        begin = time.monotonic()
        with pause, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as stderr:
            code = main(["info", "org/name"])
        said = stderr.getvalue()
        lines = [line for line in said.splitlines() if not line.startswith("rate limited by")]
        assert time.monotonic() < begin + 45, said
        assert code in (0, 2), said
        assert "Traceback" not in said
        assert said.replace("\n", "").isprintable(), said
        assert beside(top, home) == before, "something beside the cache was touched"
        assert not Path("/tmp/gpt2-fuzz-victim").exists()
        if code == 2:
            assert len(lines) == 1, said
            raise InputError(lines[0])
        cached = (home / "hub").glob(f"*/snapshots/*/{WEIGHTS}")
        assert any(file.read_bytes() == files[WEIGHTS] for file in cached), said

    return Surface(damage, read, 2000)
