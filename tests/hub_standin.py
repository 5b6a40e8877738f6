"""A Hub on loopback: the protocol that `huggingface_hub` speaks, over real sockets, with faults on demand.

    with HubStandIn() as hub:
        commit = hub.add_repo("org/name", {"config.json": b"{}", "model.safetensors": path}, lfs=("model.safetensors",))
        hub.corrupt("org/name", "model.safetensors", times=1)
        subprocess.run([...], env=hub.environ(tmp_path))  # the client reads HF_ENDPOINT once, when it is imported
        assert hub.requests

As on the real Hub, small files are served in place and large ones ("lfs") from another origin, to which a token must not
travel; a gated repository shows its file list to everybody and its files to nobody. Files may be paths: they are hashed
in one pass and streamed, so 6 GB cost no memory.
"""

import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

CHUNK = 1 << 20


@dataclass(frozen=True)
class Request:
    """One request as it came in. ``cdn`` tells that it came to the large files' origin."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    cdn: bool


@dataclass(frozen=True)
class File:
    """A file of a commit: its bytes (or where they lie), and what the Hub declares about them."""

    content: bytes | Path
    size: int
    git_sha1: str  # of the content, or of the pointer text for a large file
    sha256: str
    lfs: bool

    @classmethod
    def of(cls, content: bytes | Path, lfs: bool) -> "File":
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
        with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as stream:
            while chunk := stream.read(CHUNK):
                sha256.update(chunk)
                git.update(chunk)
        if lfs:
            git = hashlib.sha1(b"blob %d\0" % len(pointer := _pointer(sha256.hexdigest(), size)) + pointer)
        return cls(content, size, git.hexdigest(), sha256.hexdigest(), lfs)

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_sha1

    def tree_row(self, path: str) -> dict:
        row = {"type": "file", "oid": self.git_sha1, "size": self.size, "path": path}
        if self.lfs:
            pointer_size = len(_pointer(self.sha256, self.size))
            row["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": pointer_size}
        return row


def _pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


@dataclass
class Repo:
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branch or tag -> commit
    gated: bool = False

    def commit_of(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


class HubStandIn:
    """The server, and the repositories on it. A context manager; ``close`` leaves a dead port behind."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.repos: dict[str, Repo] = {}
        self.aliases: dict[str, str] = {}
        self.outage: int | None = None  # answer everything with this status, say 503
        self._corrupt: dict[tuple[str, str], float] = {}  # (repo, path) -> how many more bodies to damage
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        self.endpoint, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
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
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
        self._servers, self._threads = [], []

    def add_repo(self, name: str, files: Mapping[str, bytes | Path], *, lfs: tuple[str, ...] = (), branch: str = "main") -> str:
        """Commit ``files`` (the whole tree) on ``branch``, creating the repository if need be. Returns the commit."""
        repo = self.repos.setdefault(name, Repo())
        tree = {path: File.of(content, path in lfs) for path, content in files.items()}
        seed = json.dumps([name, branch, len(repo.commits), sorted((p, f.etag) for p, f in tree.items())])
        commit = hashlib.sha1(seed.encode()).hexdigest()
        repo.commits[commit] = tree
        repo.refs[branch] = commit
        return commit

    def tag(self, name: str, tag: str, commit: str) -> None:
        self.repos[name].refs[tag] = commit

    def alias(self, old: str, new: str) -> None:
        """Answer ``old`` (a bare name or org/name) with a 307 to ``new``, as the Hub does for a renamed repository."""
        self.aliases[old] = new

    def gate(self, name: str) -> None:
        self.repos[name].gated = True

    def corrupt(self, name: str, path: str, times: float = float("inf")) -> None:
        """Flip a byte in the middle of the next ``times`` bodies of a file: same length, same headers, other content."""
        self._corrupt[name, path] = times

    def environ(self, home: Path, **extra: str) -> dict[str, str]:
        """The environment of a process that knows this Hub alone, with its cache under ``home``."""
        kept = {k: v for k, v in os.environ.items() if not re.match(r"HF_|HUGGING|TRANSFORMERS_|.*_PROXY$", k, re.I)}
        ours = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home)}
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return kept | ours | quiet | extra

    def take_corruption(self, name: str, path: str) -> bool:
        with self._lock:
            left = self._corrupt.get((name, path), 0)
            self._corrupt[name, path] = max(left - 1, 0)
            return left > 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStandIn

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, headers = self.hub, self.headers
        on_cdn = f"http://127.0.0.1:{self.server.server_port}" == hub.cdn
        hub.requests.append(Request(self.command, self.path, headers["Range"], headers["Authorization"], on_cdn))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if hub.outage is not None:
            self._error(hub.outage, None, "the Hub is down")
        elif on_cdn:
            _, org, name, commit, *path = parts
            self._body(f"{org}/{name}", "/".join(path), hub.repos[f"{org}/{name}"].commits[commit]["/".join(path)], {})
        elif parts[:2] == ["api", "models"]:
            self._with_repo(parts[2:], ("revision", "tree"), self._api)
        elif "resolve" in parts:
            self._with_repo(parts, ("resolve",), self._resolve)
        else:
            self._error(404, None, "no such page")

    def _with_repo(self, parts: list[str], verbs: tuple[str, ...], then: Callable) -> None:
        """Split ``[org,] name [, verb, revision, ...]``, follow aliases, look the repository and the revision up."""
        cut = next((i for i in (1, 2) if len(parts) > i and parts[i] in verbs), len(parts))
        name, rest = "/".join(parts[:cut]), parts[cut:]
        if new := self.hub.aliases.get(name):
            return self._send(307, {"Location": self.path.replace(f"/{name}", f"/{new}", 1)}, b"")
        repo = self.hub.repos.get(name)
        if repo is None:
            return self._error(401, "RepoNotFound", "Repository not found")  # so the Hub answers whoever is not logged in
        verb, revision, *path = rest or (None, "main")
        commit = repo.commit_of(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return then(name, repo, verb, commit, "/".join(path))

    def _api(self, name: str, repo: Repo, verb: str | None, commit: str, path: str) -> None:
        tree = repo.commits[commit]
        if verb == "tree":
            folders = sorted({str(parent) for file in tree for parent in Path(file).parents} - {"."})
            rows = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in folders]
            return self._json(rows + [file.tree_row(path) for path, file in sorted(tree.items())])
        siblings = [{"rfilename": path} for path in sorted(tree)]
        gated = "auto" if repo.gated else False
        return self._json({"id": name, "sha": commit, "private": False, "gated": gated, "siblings": siblings})

    def _resolve(self, name: str, repo: Repo, verb: str, commit: str, path: str) -> None:
        headers = {"X-Repo-Commit": commit}
        if repo.gated:
            return self._error(401, "GatedRepo", f"Access to model {name} is restricted.", headers)
        file = repo.commits[commit].get(path)
        if file is None:
            return self._error(404, "EntryNotFound", "Entry not found", headers)
        if not file.lfs:
            return self._body(name, path, file, headers | {"ETag": f'"{file.etag}"'})
        location = f"{self.hub.cdn}/lfs/{name}/{commit}/{quote(path)}"
        linked = {"Location": location, "X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
        return self._send(302, headers | linked, b"")

    def _body(self, name: str, path: str, file: File, headers: dict[str, str]) -> None:
        """The file, or the range asked for, a chunk at a time, with a byte flipped where that was ordered."""
        start, stop, status = 0, file.size, 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or ""):
            start, stop, status = int(asked[1]), min(int(asked[2] or file.size) + 1, file.size), 206
            if start >= file.size:
                return self._error(416, None, "out of range", {"Content-Range": f"bytes */{file.size}"})
            headers = headers | {"Content-Range": f"bytes {start}-{stop - 1}/{file.size}"}
        self._send(status, headers | {"Accept-Ranges": "bytes"}, None, stop - start)
        if self.command == "HEAD":
            return None
        flip = file.size // 2 if self.hub.take_corruption(name, path) else -1
        with file.content.open("rb") if isinstance(file.content, Path) else io.BytesIO(file.content) as stream:
            stream.seek(start)
            while start < stop and (chunk := bytearray(stream.read(min(CHUNK, stop - start)))):
                if start <= flip < start + len(chunk):
                    chunk[flip - start] ^= 1
                try:
                    self.wfile.write(chunk)
                except ConnectionError:  # the client was killed, which some tests want
                    self.close_connection = True
                    return None
                start += len(chunk)
        return None

    def _json(self, value: object) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _error(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        named = {"X-Error-Code": code} if code else {}
        self._send(status, (headers or {}) | named | {"X-Error-Message": message}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes | None, length: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if body is not None else length))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)
