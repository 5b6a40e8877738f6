"""Thousands of damaged answers of a Hub: `python -m support.hub_fuzz COUNT SEED FOLDER`.

Each case is `gpt2 info org/name` against the stand-in Hub, into a cache that is empty, full or half full. One to three kinds
of answers are changed: the JSON, the raw body, headers, the status, the connection. The command must exit with 0 or 2. With 2
it prints one line on stderr, apart from waits for a rate limit. With 0 the weights are right. No file outside the cache may be
written, changed or deleted: the cache is deep in a folder, and every level above it holds a user's file.

The last line of stdout is a JSON object: the number of cases and of changed answers, the count of each exit and each refusal
(without names and numbers), and the slowest case. Time limits are 1 s here, not 10, and a stall is rare: so that thousands of
cases fit.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from support.checks import content
from support.fuzz import JUNK, changed_json
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


class Damage:
    """Change the answers to one to three kinds of requests, chosen by a seed."""

    def __init__(self, hub: HubStandIn, rng: random.Random) -> None:
        self.hub, self.rng, self.altered = hub, rng, 0
        kinds = ["/revision/", "/tree/", "config.json", WEIGHTS, "resolve-cache", "/lfs/", "/"]
        self.plan = [(rng.choice(kinds), rng.choice(self.ways()), rng.random() < 0.5) for _ in range(rng.randint(1, 3))]

    def ways(self) -> list[Any]:
        return [*[self.json] * 6, *[self.header] * 5, *[self.body] * 2, *[self.status] * 2, self.raw, self.limit, self.stall]

    def __call__(self, request: Request, answer: Answer) -> Answer:
        for part, way, always in self.plan:
            if part in request.path and (always or self.rng.random() < 0.5):
                self.altered += 1
                answer = way(answer)
        return answer

    def json(self, answer: Answer) -> Answer:
        try:
            value = json.loads(answer.body or b"")
        except (ValueError, RecursionError):
            return self.header(answer)
        for _ in range(self.rng.randint(1, 3)):
            value = changed_json(value, self.rng, KEYS, ANSWERS_JUNK)
        return replace(answer, body=json.dumps(value).encode())

    def header(self, answer: Answer) -> Answer:
        name = self.rng.choice(list(HEADERS))
        value = self.rng.choice(HEADERS[name]).encode("utf-8", "replace").decode("latin-1")
        return replace(answer, headers=answer.headers | {name: value})

    def body(self, answer: Answer) -> Answer:
        body = answer.body or b""
        cut = self.rng.randrange(len(body) + 1)
        return replace(answer, body=self.rng.choice([*BODIES, body[:cut], body + b"x", body[:cut] + b"\0" + body[cut + 1 :]]))

    def status(self, answer: Answer) -> Answer:
        return replace(self.header(answer), status=self.rng.choice(STATUSES))

    def raw(self, answer: Answer) -> Answer:
        return Answer(0, {}, self.rng.choice(RAW))

    def limit(self, answer: Answer) -> Answer:
        wait = self.rng.choice(['"api";r=0;t=0', '"api";r=0;t=99999', '"api";r=0;t=61'])
        return Answer(429, {"RateLimit": wait}, b"")

    def stall(self, answer: Answer) -> Answer:
        if self.rng.random() < 0.03:
            self.hub.wait_until_closed(3)
        return answer


def run(home: Path, hub: HubStandIn) -> tuple[int, str]:
    """Run `gpt2 info org/name` in this process: the exit code and stderr."""
    from huggingface_hub import constants

    from gpt2.checkpoint import download
    from gpt2.cli.main import main

    places = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN_PATH": str(home / "token")}
    with (
        mock.patch.multiple(constants, ENDPOINT=hub.endpoint, **places),
        mock.patch.multiple(download, PAUSES=(0.01,) * 3),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        code = main(["info", "org/name"])
    return code, stderr.getvalue()


def check(top: Path, home: Path, hub: HubStandIn, weights: bytes, outcome: tuple[int, str]) -> str:
    """The result of a case, in words that many cases share. Raises AssertionError for a result that is not allowed."""
    code, stderr = outcome
    lines = [line for line in stderr.splitlines() if not line.startswith("rate limited by")]
    assert code in (0, 2), (code, stderr)
    assert "Traceback" not in stderr, stderr
    assert stderr.isprintable() or set(stderr) - set("\n") <= {char for char in stderr if char.isprintable()}, stderr
    if code == 2:
        assert len(lines) == 1, stderr
        return re.sub(r"[0-9a-f]{39,}|\d[\d,.]*|/\S+|\(.*\)", "*", lines[0])[:90]
    files = list((home / "hub").glob(f"*/snapshots/*/{WEIGHTS}"))
    assert any(file.read_bytes() == weights for file in files), stderr
    return "0"


def main(count: int, seed: int, top: Path) -> None:
    home = top.joinpath(*"abcdef", "home")
    plant(top, home)
    source = top.parent / "source"
    official(source)
    files = content(source)
    before = beside(top, home)
    refusals: Counter[str] = Counter()
    altered, slowest = 0, (0.0, -1)
    with HubStandIn() as hub:
        commit = hub.add_repo("org/name", files, lfs=(WEIGHTS,))
        os.environ.update(hub.environ(home, HF_HUB_ETAG_TIMEOUT="1", HF_HUB_DOWNLOAD_TIMEOUT="1"))
        assert run(home, hub)[0] == 0, "the control: nothing is altered"
        shutil.copytree(home, filled := top.parent / "filled", symlinks=True)
        for number in range(count):
            rng = random.Random(f"{seed} {number}")
            shutil.rmtree(home)
            state = rng.randrange(4)
            if state < 2:
                home.mkdir()
            else:
                shutil.copytree(filled, home, symlinks=True)
            if state == 3:
                folder = home / "hub/models--org--name"
                rng.choice([*folder.rglob("*.json"), *(folder / "blobs").iterdir()]).unlink()
            hub.rows_per_page = rng.choice([2, 1000])
            hub.rewrite = damage = Damage(hub, rng)
            begin = time.monotonic()
            try:
                outcome = run(home, hub)
                refusals[check(top, home, hub, files[WEIGHTS], outcome)] += 1
                assert beside(top, home) == before, "something beside the cache was touched"
                assert not Path("/tmp/gpt2-fuzz-victim").exists()
            except BaseException as error:
                raise AssertionError(f"case {number} of seed {seed}: {damage.plan}") from error
            slowest = max(slowest, (time.monotonic() - begin, number))
            altered += damage.altered
            hub.requests.clear()
        assert commit in hub.repos["org/name"].commits
    report = {"cases": count, "altered": altered, "slowest_s": round(slowest[0], 1), "refusals": dict(refusals.most_common())}
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3], "top"))
