"""A Hub on loopback: the protocol that `huggingface_hub` speaks, over real sockets, with faults on demand.

    with HubStandIn() as hub:
        commit = hub.add_repo("org/name", {"config.json": b"{}", "model.safetensors": path}, lfs=("model.safetensors",))
        hub.corrupt("org/name", "model.safetensors", times=1)
        hub.hold("org/name", "model.safetensors", after=1_000_000)  # then the client is killed
        subprocess.run([...], env=hub.environ(tmp_path))  # the client reads HF_ENDPOINT once, when it is imported
        assert hub.requests

It answers as the real Hub does in 2026. A small file is a 307 to `/api/resolve-cache/...`. A large one ("lfs") is a 302 to a
signed address on another host, which refuses an `Authorization` header. Large files have a Xet hash. A listing comes in pages,
joined by a `Link` header. Every answer says how many requests are left (`RateLimit`). A gated repository shows its file list
and refuses its files. Files may be paths, which are streamed.
`hub.rewrite` alters any answer before it is sent.
"""

import base64
import gzip
import hashlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from support.hub_uploads import Uploads

CHUNK = 1 << 20


@dataclass(frozen=True)
class Answer:
    """An answer before it is sent. ``body`` is None if a file's bytes follow; status 0 sends the body alone and closes the
    connection."""

    status: int
    headers: dict[str, str]
    body: bytes | None


@dataclass(frozen=True)
class Request:
    """One request as it came in. ``cdn`` is true if it came to the large files' host."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    cdn: bool

    @property
    def file(self) -> str:
        """The last part of the path, without the signature."""
        return urlsplit(self.path).path.rpartition("/")[2]


@dataclass(frozen=True)
class Stored:
    """Bytes, or a file on disk."""

    content: bytes | Path

    @property
    def size(self) -> int:
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        if isinstance(self.content, bytes):
            yield self.content[start:stop]
            return
        with self.content.open("rb") as stream:
            stream.seek(start)
            while start < stop and (chunk := stream.read(min(CHUNK, stop - start))):
                yield chunk
                start += len(chunk)


@dataclass(frozen=True)
class Unread:
    """A file that is listed with its size and must never be requested: it has no content."""

    size: int

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        raise AssertionError("this file was not to be downloaded")


@dataclass(frozen=True)
class File:
    """A file of a commit: its content, and the Hub's metadata of it."""

    content: Stored | Unread
    size: int
    git_sha1: str  # of the content, or of the pointer text for a large file
    sha256: str  # of a large file
    lfs: bool

    @classmethod
    def of(cls, content: bytes | Path | Unread, lfs: bool) -> "File":
        source = Stored(content) if isinstance(content, (bytes, Path)) else content
        digest = hashlib.sha256() if lfs else hashlib.sha1(b"blob %d\0" % source.size)
        for chunk in [b"%d" % source.size] if isinstance(source, Unread) else source.read(0, source.size):
            digest.update(chunk)
        sha256 = git = digest.hexdigest()
        if lfs:
            git = hashlib.sha1(b"blob %d\0" % len(pointer := _pointer(sha256, source.size)) + pointer).hexdigest()
        return cls(source, source.size, git, sha256 if lfs else "", lfs)

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_sha1

    def tree_row(self, path: str) -> dict:
        row = {"type": "file", "oid": self.git_sha1, "size": self.size, "path": path}
        if self.lfs:
            pointer_size = len(_pointer(self.sha256, self.size))
            row["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": pointer_size}
            row["xetHash"] = self.xet_hash
        return row

    @property
    def xet_hash(self) -> str:
        """A stand-in for the Merkle hash of the chunks: a name to request from the Xet storage."""
        return hashlib.sha256(b"xet " + self.sha256.encode()).hexdigest()


def _pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


@dataclass
class Repo:
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branch or tag -> commit
    gated: int = 0  # the status that refuses its files
    private: bool = False  # hidden from a client without a token of its owner's

    def commit_of(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


class HubStandIn:
    """The server and its repositories. A context manager; ``close`` leaves a closed port."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.repos: dict[str, Repo] = {}
        self.aliases: dict[str, str] = {}
        self.outage: int | None = None  # answer every request with this status, such as 503
        self.sent: Counter[tuple[str, str]] = Counter()  # (repo, path) -> bytes of bodies sent
        self.ranges = True  # whether a Range is honoured; if not, the answer is the whole file
        self.range_refusal: int | None = None  # refuse every GET with a Range with this status, such as 403
        self.rows_per_page = 1000  # entries on a page of a listing
        self.lists_sha256 = True  # whether the listing has large files' sha256; some mirrors leave it out
        self.rewrite: Callable[[Request, Answer], Answer] | None = None
        self.xet: Any = None  # an `XetStandIn`, if large files are served over Xet
        self.uploads = Uploads(self)
        self.gzip = False  # compress for clients that accept it, as the real Hub does with text: no length, no ranges
        self._orders: dict[tuple[str, str, str], tuple[float, Any]] = {}  # (fault, repo, path) -> number of answers, argument
        self._closing = threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._servers = [_Server(("127.0.0.1", 0), handler) for _ in range(2)]
        hosts = zip(("127.0.0.1", "localhost"), self._servers, strict=True)
        self.endpoint, self.cdn = (f"http://{host}:{server.server_port}" for host, server in hosts)
        self._threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True) for server in self._servers
        ]
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.daemon_threads = True
            thread.start()

    def __enter__(self) -> "HubStandIn":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
        self._servers, self._threads = [], []

    def add_repo(
        self,
        name: str,
        files: Mapping[str, bytes | Path | Unread],
        *,
        lfs: tuple[str, ...] = (),
        branch: str = "main",
        commit: str | None = None,
    ) -> str:
        """Commit ``files`` (the whole tree) on ``branch``, creating the repository if need be. Returns the commit.

        A data set's ``name`` begins with "datasets/".
        """
        repo = self.repos.setdefault(name, Repo())
        tree = {path: File.of(content, path in lfs) for path, content in files.items()}
        seed = json.dumps([name, branch, len(repo.commits), sorted((p, f.etag) for p, f in tree.items())])
        commit = commit or hashlib.sha1(seed.encode()).hexdigest()
        repo.commits[commit] = tree
        repo.refs[branch] = commit
        return commit

    def tag(self, name: str, tag: str, commit: str) -> None:
        self.repos[name].refs[tag] = commit

    def alias(self, old: str, new: str) -> None:
        """Answer ``old`` (a bare name or org/name) with a 307 to ``new``, as the Hub does for a renamed repository."""
        self.aliases[old] = new

    def gate(self, name: str, status: int = 401) -> None:
        self.repos[name].gated = status

    def limit(self, seconds: int | str | None, times: float = float("inf")) -> None:
        """Answer the next ``times`` requests with 429 and a wait of ``seconds``, or without a wait."""
        self._orders["limit", "", ""] = (times, (seconds,))

    def corrupt(self, name: str, path: str, times: float = float("inf")) -> None:
        """Flip a byte in the middle of the next ``times`` bodies of a file: same length, same headers, other content."""
        self._orders["corrupt", name, path] = (times, True)

    def fail(self, name: str, path: str, status: int, times: float = float("inf")) -> None:
        """Answer the next ``times`` requests for a file's bytes with ``status``."""
        self._orders["fail", name, path] = (times, status)

    def drop(self, name: str, path: str, after: int, times: float = float("inf")) -> None:
        """Cut the connection after ``after`` bytes of the next ``times`` bodies of a file, if they are longer than that."""
        self._orders["cut", name, path] = (times, (after, False))

    def hold(self, name: str, path: str, after: int, times: float = 1) -> None:
        """After ``after`` bytes of the next ``times`` bodies of a file, send nothing more until the client closes the
        connection."""
        self._orders["cut", name, path] = (times, (after, True))

    def take(self, fault: str, name: str = "", path: str = "") -> Any:
        """The fault ordered for this answer, or None."""
        with self._lock:
            left, what = self._orders.get((fault, name, path), (0, None))
            self._orders[fault, name, path] = (left - 1, what)
            return what if left > 0 else None

    def environ(self, home: Path, **extra: str) -> dict[str, str]:
        """The environment of a process that knows this Hub alone, with its cache under ``home``."""
        kept = {k: v for k, v in os.environ.items() if not re.match(r"HF_|HUGGING|TRANSFORMERS_|.*_PROXY$", k, re.I)}
        ours = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_XET_CACHE": str(home / "xet")}
        ours |= {"HF_XET_LOG_DEST": str(home / "xet.log")}
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return kept | ours | quiet | extra

    def wait_until_closed(self, seconds: float) -> bool:
        return self._closing.wait(seconds)

    def count(self, name: str, path: str, sent: int) -> None:
        with self._lock:
            self.sent[name, path] += sent


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A closed connection is not an error here; other errors go to the real stderr, which no test captures."""
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc(file=sys.__stderr__)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: otherwise a client waits 40 ms for the second
    hub: HubStandIn
    request_seen: Request

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        hub = self.hub
        on_cdn = self.server.server_port == urlsplit(hub.cdn).port
        self.request_seen = Request(self.command, self.path, None, self.headers["Authorization"], on_cdn)
        hub.requests.append(self.request_seen)
        hub.uploads.answer(self)

    do_PUT = do_POST

    def do_GET(self) -> None:
        hub, headers = self.hub, self.headers
        on_cdn = self.server.server_port == urlsplit(hub.cdn).port
        self.request_seen = Request(self.command, self.path, headers["Range"], headers["Authorization"], on_cdn)
        hub.requests.append(self.request_seen)
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        limited = hub.take("limit")
        if hub.outage is not None:
            self._error(hub.outage, None, "the Hub is down")
        elif limited:
            wait = {} if limited == (None,) else {"RateLimit": f'"api";r=0;t={limited[0]}'}
            self._error(429, None, "Too Many Requests", wait)
        elif on_cdn and parts[0] == "lfs":
            self._bridge(parts[1:])
        elif on_cdn:
            status, extra, body = hub.xet.answer(self.path, headers) if hub.xet else (404, {}, b"")
            self._send(status, extra, body)
        elif parts[:2] == ["api", "resolve-cache"]:
            *name, commit, path = self._split(parts[2:])
            file = hub.repos["/".join(name)].commits[commit][path]
            self._body("/".join(name), path, file, {"X-Repo-Commit": commit, "ETag": f'"{file.etag}"'})
        elif parts[:2] == ["api", "models"]:
            self._with_repo(parts[2:], ("revision", "tree", "xet-read-token"), self._api)
        elif parts[:2] == ["api", "datasets"]:
            self._with_repo(parts[2:], ("revision", "tree"), self._api, "datasets/")
        elif "resolve" in parts:
            kind = "datasets/" if parts[0] == "datasets" else ""
            self._with_repo(parts[bool(kind) :], ("resolve",), self._resolve, kind)
        else:
            self._error(404, None, "no such page")

    @staticmethod
    def _split(parts: list[str]) -> tuple[str, ...]:
        """``models, org, name, commit, folder, file`` -> ``org, name, commit, folder/file``; "datasets" stays in front."""
        parts = parts[parts[0] == "models" :]
        cut = 3 if parts[0] == "datasets" else 2
        return (*parts[: cut + 1], "/".join(parts[cut + 1 :]))

    def _bridge(self, parts: list[str]) -> None:
        """The large files' host: it serves signed addresses, and refuses a token, which is for the Hub only."""
        *name, commit, path = self._split(parts)
        if self.headers["Authorization"]:
            return self._error(400, None, "Only one auth mechanism allowed")
        if "Signature=" not in self.path:
            return self._error(403, None, "not signed")
        if self.hub.range_refusal and self.headers["Range"]:
            return self._error(self.hub.range_refusal, None, "invalid range")
        return self._body("/".join(name), path, self.hub.repos["/".join(name)].commits[commit][path], {})

    def _with_repo(self, parts: list[str], verbs: tuple[str, ...], then: Callable, kind: str = "") -> None:
        """Split ``[org,] name [, verb, revision, ...]``, follow aliases, and look up the repository and the revision."""
        cut = next((i for i in (1, 2) if len(parts) > i and parts[i] in verbs), len(parts))
        name, rest = kind + "/".join(parts[:cut]), parts[cut:]
        if new := self.hub.aliases.get(name):
            return self._send(307, {"Location": self.path.replace(f"/{name}", f"/{new}", 1)}, b"")
        repo = self.hub.repos.get(name)
        owners = self.hub.uploads.tokens.get((self.headers["Authorization"] or "").removeprefix("Bearer "), ())
        if repo is None or (repo.private and name.partition("/")[0] not in owners):
            return self._error(401, "RepoNotFound", "Repository not found")  # the Hub's answer to a client that is not logged in
        verb, revision, *path = rest if len(rest) > 1 else (None, "main")
        commit = repo.commit_of(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return then(name, repo, verb, commit, "/".join(path))

    def _api(self, name: str, repo: Repo, verb: str | None, commit: str, path: str) -> None:
        tree = repo.commits[commit]
        if verb == "xet-read-token":
            expires = str(int(time.time()) + 3600)
            names = ("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration")
            return self._send(200, dict(zip(names, (self.hub.cdn, "xet-token", expires), strict=True)), b"{}")
        if verb == "tree":
            try:
                page = self._tree(tree)
            except ValueError:
                return self._error(400, None, "no such page of the listing")
            return self._json(*page)
        siblings = [{"rfilename": path} for path in sorted(tree)]
        gated = "auto" if repo.gated else False
        return self._json(
            {"id": name.removeprefix("datasets/"), "sha": commit, "private": repo.private, "gated": gated, "siblings": siblings}
        )

    def _tree(self, tree: dict[str, File]) -> tuple[list[dict], dict[str, str]]:
        """A page of a listing, and the header that leads to the next one."""
        folders = sorted({str(parent) for file in tree for parent in Path(file).parents} - {"."})
        rows = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in folders]
        rows += [file.tree_row(path) for path, file in sorted(tree.items())]
        if not self.hub.lists_sha256:
            rows = [{key: row[key] for key in ("type", "oid", "size", "path")} for row in rows]
        address = urlsplit(self.path)
        query = dict(parse_qsl(address.query))
        start = int(base64.b64decode(query.get("cursor", "")) or 0)
        stop = start + self.hub.rows_per_page
        if stop >= len(rows):
            return rows[start:], {}
        query["cursor"] = base64.b64encode(b"%d" % stop).decode()
        return rows[start:stop], {"Link": f'<{self.hub.endpoint}{address.path}?{urlencode(query)}>; rel="next"'}

    def _resolve(self, name: str, repo: Repo, verb: str, commit: str, path: str) -> None:
        headers = {"X-Repo-Commit": commit}
        if repo.gated:
            return self._error(repo.gated, "GatedRepo", f"Access to model {name} is restricted.", headers)
        file = repo.commits[commit].get(path)
        if file is None:
            return self._error(404, "EntryNotFound", "Entry not found", headers)
        linked = headers | {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
        if not file.lfs:
            kind = "" if name.startswith("datasets/") else "models/"
            return self._send(307, linked | {"Location": f"/api/resolve-cache/{kind}{name}/{commit}/{quote(path)}"}, b"")
        location = f"{self.hub.cdn}/lfs/{name}/{commit}/{quote(path)}?X-Amz-Expires=3600&Signature=stand-in"
        if name.startswith("datasets/"):
            return self._send(302, linked | {"Location": location}, b"")
        token = f'<{self.hub.endpoint}/api/models/{name}/xet-read-token/{commit}>; rel="xet-auth"'
        return self._send(302, linked | {"Location": location, "X-Xet-Hash": file.xet_hash, "Link": token}, b"")

    def _body(self, name: str, path: str, file: File, headers: dict[str, str]) -> None:
        """The file or the requested range, a chunk at a time, with a byte flipped or the connection cut if ordered."""
        hub = self.hub
        start, stop, status = 0, file.size, 200
        if self.command == "GET" and (failure := hub.take("fail", name, path)):
            return self._error(failure, None, "so it was ordered")
        if hub.gzip and self.command == "GET" and "gzip" in (self.headers["Accept-Encoding"] or ""):
            self._send(200, headers | {"Content-Encoding": "gzip"}, gzip.compress(b"".join(file.content.read(0, stop))))
            return None
        if hub.ranges and (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")):
            start, stop, status = int(asked[1]), min(int(asked[2] or file.size) + 1, file.size), 206
            if start >= file.size:
                return self._error(416, None, "out of range", {"Content-Range": f"bytes */{file.size}"})
            headers = headers | {"Content-Range": f"bytes {start}-{stop - 1}/{file.size}"}
        if hub.ranges:
            headers = headers | {"Accept-Ranges": "bytes"}
        if self._send(status, headers, None, stop - start).body is not None or self.command == "HEAD":
            return None
        flip = file.size // 2 if hub.take("corrupt", name, path) else -1
        cut = hub.take("cut", name, path)
        until = stop if cut is None else min(stop, start + cut[0])
        try:
            for chunk in file.content.read(start, until):
                if start <= flip < start + len(chunk):
                    place = flip - start
                    chunk = b"".join((chunk[:place], bytes([chunk[place] ^ 1]), chunk[place + 1 :]))
                self.wfile.write(chunk)
                start += len(chunk)
                hub.count(name, path, len(chunk))
            if until < stop:
                self.close_connection = True
                if cut and cut[1]:
                    self._until_the_client_is_gone()
        except ConnectionError:  # the client was killed, as some tests do
            self.close_connection = True
        return None

    def _until_the_client_is_gone(self) -> None:
        while not self.hub.wait_until_closed(0) and not self.client_is_gone():
            pass

    def client_is_gone(self) -> bool:
        self.connection.settimeout(0.05)
        try:
            return not self.connection.recv(1 << 16)
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    def _json(self, value: object, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self._send(status, {"Content-Type": "application/json"} | (headers or {}), json.dumps(value).encode())

    def _error(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        named = {"X-Error-Code": code} if code else {}
        self._send(status, (headers or {}) | named | {"X-Error-Message": message}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes | None, length: int | None = None) -> Answer:
        headers = {"RateLimit": '"api";r=499;t=300', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'} | headers
        headers["Content-Length"] = str(len(body) if body is not None else length)
        answer = Answer(status, headers, body)
        if self.hub.rewrite is not None:
            answer = self.hub.rewrite(self.request_seen, answer)
            if answer.body is not body and answer.body is not None:
                answer.headers["Content-Length"] = str(len(answer.body))
        if answer.status == 0:
            self.close_connection = True
            self.wfile.write(answer.body or b"")
            return answer
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        self.end_headers()
        if answer.body and self.command != "HEAD":
            self.wfile.write(answer.body)
        return answer
