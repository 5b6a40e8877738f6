"""The upload half of the Hub on loopback: create a repository, check a card, take files by git LFS, and commit.

    with HubStandIn() as hub:
        hub.uploads.tokens["hf_writer"] = ("me",)  # a token, and the owners that it may write to
        hub.uploads.hold(after=1_000_000)          # then the client is killed
        hub.uploads.put                            # sha256 -> number of whole bodies received

The order is `huggingface_hub`'s: `repos/create`, `validate-yaml`, `preupload` (which files are large), the LFS batch (which
large files are missing), a PUT of each to a signed address on another host, `verify`, and a commit in lines of JSON.
"""

import base64
import hashlib
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import yaml

if TYPE_CHECKING:
    from support.hub_standin import HubStandIn

LARGE = 100_000  # bytes; and every file with zeros in its first bytes
LICENCES = {"mit", "apache-2.0", "openrail", "cc-by-4.0", "other", "unknown"}
CARD = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(\r\n|\n|$))")


class Uploads:
    """What clients uploaded to one stand-in, and the faults ordered for the next uploads."""

    def __init__(self, hub: "HubStandIn") -> None:
        self.hub = hub
        self.tokens: dict[str, tuple[str, ...]] = {}
        self.blobs: dict[str, bytes] = {}  # sha256 -> content
        self.put: Counter[str] = Counter()  # sha256 -> whole bodies received
        self.received: list[int] = []  # bytes of every body, also of broken ones
        self.messages: list[str] = []  # of the commits
        self.fails: dict[str, tuple[int, str]] = {}  # step ("create", "preupload", "batch", "put", "commit") -> status, message

    def drop(self, after: int, times: int = 1) -> None:
        """Cut the connection after ``after`` bytes of the next ``times`` bodies."""
        self.hub._orders["put", "", ""] = (times, (after, False))

    def hold(self, after: int, times: int = 1) -> None:
        """After ``after`` bytes of the next ``times`` bodies, read nothing more until the client closes the connection."""
        self.hub._orders["put", "", ""] = (times, (after, True))

    def answer(self, handler: Any) -> None:
        """Answer a POST or a PUT."""
        path = unquote(urlsplit(handler.path).path).strip("/")
        if handler.command == "PUT":
            return self._put(handler, path.rpartition("/")[2])
        body = handler.rfile.read(int(handler.headers["Content-Length"] or 0))
        if path == "api/repos/create":
            return self._create(handler, json.loads(body))
        if path == "api/validate-yaml":
            errors = problems(json.loads(body)["content"])
            return handler._json(
                {"errors": [{"message": each} for each in errors], "warnings": []}, status=400 if errors else 200
            )
        if found := re.fullmatch(r"api/models/([^/]+/[^/]+)/(preupload|commit)/(.+)", path):
            name, step, revision = found.groups()
            if self._may(handler, name, step):
                return getattr(self, f"_{step}")(handler, name, revision, body)
            return None
        if found := re.fullmatch(r"([^/]+/[^/]+)\.git/info/lfs/objects/(batch|verify)", path):
            name, step = found.groups()
            if self._may(handler, name, step):
                return getattr(self, f"_{step}")(handler, json.loads(body))
            return None
        return handler._error(404, None, "no such page")

    def _may(self, handler: Any, name: str, step: str) -> bool:
        """Whether the request goes on; if not, it is answered."""
        token = (handler.headers["Authorization"] or "").removeprefix("Bearer ")
        if step in self.fails:
            status, message = self.fails[step]
            handler._error(status, None, message)
        elif token not in self.tokens:
            handler._error(401, None, "Invalid credentials in Authorization header")
        elif name.partition("/")[0] not in self.tokens[token]:
            handler._error(403, None, "You don't have the rights to create a model under this namespace")
        elif step != "create" and name not in self.hub.repos:
            handler._error(404, "RepoNotFound", "Repository not found")
        else:
            return True
        return False

    def _create(self, handler: Any, asked: dict) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if not self._may(handler, name, "create"):
            return None
        url = {"url": f"{self.hub.endpoint}/{name}"}
        if name in self.hub.repos:
            return handler._json(url, status=409)
        self.hub.add_repo(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.hub.repos[name].private = asked["visibility"] == "private"
        return handler._json(url)

    def _preupload(self, handler: Any, name: str, revision: str, body: bytes) -> None:
        repo = self.hub.repos[name]
        tree, rows = repo.commits[repo.commit_of(revision)], []
        for file in json.loads(body)["files"]:
            large = file["size"] > LARGE or b"\0" in base64.b64decode(file["sample"])
            there = tree[file["path"]].etag if file["path"] in tree else None
            row = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": there}
            rows.append(row)
        handler._json({"files": rows})

    def _batch(self, handler: Any, asked: dict) -> None:
        objects = []
        for each in asked["objects"]:
            entry: dict = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.blobs:
                upload = {"href": f"{self.hub.cdn}/upload/{each['oid']}?Signature=stand-in", "header": {}}
                verify = f"{self.hub.endpoint}{urlsplit(handler.path).path.replace('/batch', '/verify')}"
                entry["actions"] = {"upload": upload, "verify": {"href": verify, "header": {}}}
            objects.append(entry)
        handler._json({"transfer": "basic", "objects": objects})

    def _put(self, handler: Any, oid: str) -> None:
        """Take one large file at its signed address, which refuses a token."""
        if handler.headers["Authorization"] or "Signature=" not in handler.path:
            return handler._error(403, None, "not by a signature alone")
        size, content = int(handler.headers["Content-Length"]), bytearray()
        cut = self.hub.take("put")
        until = size if cut is None else min(size, cut[0])
        while len(content) < until and (chunk := handler.rfile.read1(min(1 << 16, until - len(content)))):
            content += chunk
        self.received.append(len(content))
        if len(content) < size:
            handler.close_connection = True
            if cut and cut[1]:
                while not self.hub.wait_until_closed(0.02) and not handler.client_is_gone():
                    pass
            handler.connection.close()
            return None
        if "put" in self.fails:
            return handler._error(*self.fails["put"][:1], None, self.fails["put"][1])
        if hashlib.sha256(content).hexdigest() != oid:
            return handler._error(400, None, "these bytes have another sha256")
        self.blobs[oid] = bytes(content)
        self.put[oid] += 1
        return handler._send(200, {}, b"")

    def _verify(self, handler: Any, asked: dict) -> None:
        there = len(self.blobs.get(asked["oid"], b"")) == asked["size"]
        handler._json({}) if there else handler._error(404, None, "no such object")

    def _commit(self, handler: Any, name: str, revision: str, body: bytes) -> None:
        repo = self.hub.repos[name]
        parent = repo.commit_of(revision)
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit", parent) != parent:
            return handler._error(412, None, "A commit has happened since. Please refresh and try again.")
        files = {path: file.content.content for path, file in repo.commits[parent].items()}
        large = {path for path, file in repo.commits[parent].items() if file.lfs}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                large.discard(value["path"])
            elif line["key"] == "lfsFile":
                if len(self.blobs.get(value["oid"], b"")) != value["size"]:
                    return handler._error(400, None, "an LFS object is missing")
                files[value["path"]] = self.blobs[value["oid"]]
                large.add(value["path"])
        self.messages.append(header["summary"])
        commit = self.hub.add_repo(name, files, lfs=tuple(large))
        return handler._json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{commit}"})


def problems(card: str) -> list[str]:
    """What the Hub would refuse in a card's metadata: the rules that the client does not check itself."""
    block = CARD.match(card)
    try:
        data = yaml.safe_load(block[2]) if block else {}
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    if not isinstance(data, dict):
        return ["the metadata must be an object"]
    found = []
    if data.get("license", "mit") not in LICENCES:
        found.append('"license" must be one of the known licences')
    for code in data.get("language") or []:
        if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", code):
            found.append(f'"language" must only contain ISO 639 codes, not {code}')
    bases = data.get("base_model") or []
    for base in bases if isinstance(bases, list) else [bases]:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
            found.append(f'"base_model" must be an id of the Hub, not {base}')
    return found
