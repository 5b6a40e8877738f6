"""A Hub on loopback: what `huggingface_hub` asks of one, over real sockets, with faults on demand.

It has no other host for large files ("lfs"), no Xet, no pages of listings: those are the client's business. A token of
`hub.tokens` may upload. A client reads `hub.environ` once, when it is imported: give it to a process.
"""

import base64
import hashlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 100_000  # bytes of an uploaded file that goes to git LFS; or with zeros in its first bytes


@dataclass(frozen=True)
class Request:
    method: str
    path: str


@dataclass(frozen=True)
class File:
    """A file of a commit, with git's hash (of a large file: of its pointer), and a large file's sha256."""

    content: bytes
    lfs: bool

    @property
    def size(self) -> int:
        return len(self.content)

    @property
    def etag(self) -> str:
        return hashlib.sha256(self.content).hexdigest() if self.lfs else self.oid

    @property
    def oid(self) -> str:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.etag if self.lfs else ''}\nsize {self.size}\n"
        data = pointer.encode() if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def row(self, path: str) -> dict[str, Any]:
        lfs = {"lfs": {"oid": self.etag, "size": self.size, "pointerSize": 130}} if self.lfs else {}
        return {"type": "file", "oid": self.oid, "size": self.size, "path": path} | lfs


@dataclass
class Repo:
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # branch or tag -> commit
    gated: bool = False
    private: bool = False


class HubStandIn:
    """The server and its repositories. A context manager; ``close`` leaves a closed port."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.repos: dict[str, Repo] = {}
        self.fails: dict[str, tuple[int, str]] = {}  # a part of "METHOD path" -> status and message of its answer
        self.sent: Counter[str] = Counter()  # path -> bytes of bodies sent
        self.tokens: dict[str, tuple[str, ...]] = {}  # token -> the owners that it may write to
        self.blobs: dict[str, bytes] = {}  # sha256 -> uploaded
        self.put: Counter[str] = Counter()  # sha256 -> number of whole bodies received
        self.messages: list[str] = []  # of the commits
        self.orders: dict[tuple[str, str], int] = {}  # (fault, place) of the next answer -> its argument
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def __enter__(self) -> "HubStandIn":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if not self.closing.is_set():
            self.closing.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def add_repo(
        self, name: str, files: Mapping[str, bytes | Path], *, lfs: tuple[str, ...] = (), branch: str = "main", commit: str = ""
    ) -> str:
        """Commit ``files`` (the whole tree) on ``branch``, creating the repository if need be. Returns the commit.
        A data set's ``name`` begins with "datasets/"."""
        repo = self.repos.setdefault(name, Repo())
        tree = {path: File(c.read_bytes() if isinstance(c, Path) else c, path in lfs) for path, c in files.items()}
        seed = json.dumps([name, branch, len(repo.commits), sorted((path, file.etag) for path, file in tree.items())])
        commit = commit or hashlib.sha1(seed.encode()).hexdigest()
        repo.commits[commit] = tree
        repo.refs[branch] = commit
        return commit

    def corrupt(self, name: str, path: str) -> None:
        """Flip a byte in the middle of the next body of a file: same length, same headers, other content."""
        self.orders["corrupt", f"{name}/{path}"] = 1

    def hold(self, name: str, path: str, after: int) -> None:
        """After ``after`` bytes of the next body of a file, send or read nothing more until the client is gone."""
        self.orders["hold", f"{name}/{path}"] = after

    def environ(self, home: Path, **extra: str) -> dict[str, str]:
        """The environment of a process that knows this Hub alone, with its cache under ``home``."""
        kept = {k: v for k, v in os.environ.items() if not re.match(r"HF_|HUGGING|TRANSFORMERS_|.*_PROXY$", k, re.I)}
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        quiet["SSL_CERT_DIR"] = str(Path(__file__).parent)  # it speaks http: to read all certificates of a system takes 30 ms
        return kept | {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home)} | quiet | extra

    def files(self, name: str) -> dict[str, bytes]:
        """The files of the newest commit."""
        repo = self.repos[name]
        return {path: file.content for path, file in repo.commits[repo.refs["main"]].items() if path != ".gitattributes"}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A closed connection is not an error here; other errors go to the real stderr, which no test captures."""
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc(file=sys.__stderr__)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: otherwise a client waits 40 ms for the second
    hub: HubStandIn

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path).strip("/")
        hub.requests.append(Request(self.command, unquote(self.path)))
        place = f"{self.command} {path}"
        body = b"" if self.command == "PUT" else self.rfile.read(int(self.headers["Content-Length"] or 0))
        if failure := next((answer for part, answer in hub.fails.items() if part in place), None):
            return self.error(*failure)
        if found := re.fullmatch(r"api/(?:models|(datasets))/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/(.+))?", path):
            kind, name, verb, revision = found.groups()
            return self.api(f"{kind}/{name}" if kind else name, verb or "revision", revision or "main", body)
        if found := re.fullmatch(r"(.+)/resolve/([^/]+)/(.+)", path):
            return self.file(*found.groups())
        if path == "api/repos/create":
            return self.create(json.loads(body))
        if path == "api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if found := re.fullmatch(r"([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self.batch(json.loads(body)) if self.may_write(found[1]) else None
        return self.upload(path.rpartition("/")[2]) if self.command == "PUT" else self.error(404, "no such page")

    do_HEAD = do_POST = do_PUT = do_GET

    def tree_of(self, name: str, revision: str) -> tuple[Repo, str, dict[str, File]] | None:
        """The repository, the commit and its files; None if the request was refused."""
        if self.token and self.hub.tokens and self.token not in self.hub.tokens:
            return self.error(401, "Invalid credentials in Authorization header")
        repo, owner = self.hub.repos.get(name), name.partition("/")[0]
        if repo is None or (repo.private and owner not in self.hub.tokens.get(self.token, ())):
            return self.error(401, "Repository not found", X_Error_Code="RepoNotFound")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self.error(404, f"Invalid rev id: {revision}", X_Error_Code="RevisionNotFound")
        return repo, commit, repo.commits[commit]

    @property
    def token(self) -> str:
        return (self.headers["Authorization"] or "").removeprefix("Bearer ")

    def may_write(self, name: str) -> bool:
        owners = self.hub.tokens.get(self.token)
        if owners is None or name.partition("/")[0] not in owners:
            self.error(401 if owners is None else 403, "Invalid credentials in Authorization header")
            return False
        return True

    def api(self, name: str, verb: str, revision: str, body: bytes) -> None:
        if (found := self.tree_of(name, revision)) is None:
            return None
        repo, commit, tree = found
        if verb == "tree":
            folders = sorted({str(parent) for path in tree for parent in Path(path).parents} - {"."})
            rows = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in folders]
            return self.json(rows + [file.row(path) for path, file in sorted(tree.items())])
        if verb == "revision":
            siblings = [{"rfilename": path, "size": file.size} for path, file in sorted(tree.items())]
            return self.json({"id": name.removeprefix("datasets/"), "sha": commit, "private": repo.private, "siblings": siblings})
        if not self.may_write(name):
            return None
        if verb == "preupload":
            return self.json({"files": [self.preupload(row, tree) for row in json.loads(body)["files"]]})
        return self.commit(name, commit, body)

    def file(self, name: str, revision: str, path: str) -> None:
        """Send a file, with a byte flipped or held back if ordered."""
        if (found := self.tree_of(name, revision)) is None:
            return None
        repo, commit, tree = found
        if repo.gated:
            return self.error(403, f"Access to model {name} is restricted.", X_Error_Code="GatedRepo")
        if path not in tree:
            return self.error(404, "Entry not found", X_Error_Code="EntryNotFound")
        data, place = tree[path].content, f"{name}/{path}"
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "bytes=0-")[1])
        kept = {"ETag": f'"{tree[path].etag}"', "X-Repo-Commit": commit, "Content-Length": str(len(data) - start)}
        self.head(206 if start else 200, kept)
        if self.command == "HEAD":
            return None
        if self.hub.orders.pop(("corrupt", place), None):
            data = b"".join((data[: len(data) // 2], bytes([data[len(data) // 2] ^ 1]), data[len(data) // 2 + 1 :]))
        held = self.hub.orders.pop(("hold", place), None)
        self.hub.sent[place] += len(data[start:held])
        self.wfile.write(data[start:held])
        return None if held is None else self.wait_for_the_end()

    def wait_for_the_end(self) -> None:
        self.close_connection = True
        self.connection.settimeout(0.05)
        while not self.hub.closing.is_set():
            try:
                if not self.connection.recv(1 << 16):
                    return
            except TimeoutError:
                time.sleep(0.01)
            except ConnectionError:
                return

    def create(self, asked: dict) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if self.may_write(name):
            self.hub.add_repo(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
            self.hub.repos[name].private = asked["visibility"] == "private"
            self.json({"url": f"{self.hub.endpoint}/{name}"})

    def preupload(self, row: dict, tree: dict[str, File]) -> dict[str, Any]:
        large = row["size"] > LARGE or b"\0" in base64.b64decode(row["sample"])
        there = tree[row["path"]].etag if row["path"] in tree else None
        return {"path": row["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": there}

    def batch(self, asked: dict) -> None:
        objects = [{"oid": each["oid"], "size": each["size"]} for each in asked["objects"]]
        for each in objects:
            if each["oid"] not in self.hub.blobs:
                each["actions"] = {"upload": {"href": f"{self.hub.endpoint}/upload/{each['oid']}", "header": {}}}
        self.json({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        self.hub.blobs[oid] = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.put[oid] += 1
        return self.reply(200, b"")

    def commit(self, name: str, parent: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit", parent) != parent:
            return self.error(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(self.hub.repos[name].commits[parent])
        for value, key in [(line["value"], line["key"]) for line in lines if line["key"] != "header"]:
            content = base64.b64decode(value["content"]) if key == "file" else self.hub.blobs[value["oid"]]
            tree[value["path"]] = File(content, key == "lfsFile")
        self.hub.messages.append(header["summary"])
        files = {path: file.content for path, file in tree.items()}
        commit = self.hub.add_repo(name, files, lfs=tuple(path for path, file in tree.items() if file.lfs))
        url = f"{self.hub.endpoint}/{name}/commit/{commit}"
        return self.json({"success": True, "commitOid": commit, "commitUrl": url})

    def json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def error(self, status: int, message: str, **headers: str) -> None:
        self.reply(status, b"", {key.replace("_", "-"): value for key, value in headers.items()} | {"X-Error-Message": message})

    def reply(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.head(status, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
