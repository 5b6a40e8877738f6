"""A Xet storage on loopback, with the requests that `hf_xet` (1.8) sends: the positions of a file's chunks, ranges of blocks.

    with HubStandIn() as hub:
        hub.xet = XetStandIn(hub)
        subprocess.run([...], env=hub.environ(tmp_path, HF_HUB_DISABLE_XET="0"))

A file of 40 MB is three blocks ("xorbs") of 16 MB, each of chunks of 128 KiB, stored as they are. A chunk's header says a
version, its size as stored (three bytes), a kind of compression, and its size. The names of blocks are made up: on the way
down the client checks no Merkle hash. It asks for version 2 of the protocol first and takes version 1 after a 404.
"""

import json
import re
from email.message import Message

from support.hub_standin import File, HubStandIn

CHUNK = 128 << 10
BLOCK = 128 * CHUNK


class XetStandIn:
    """The storage for all large files of a stand-in Hub. ``status``, if not None, refuses every request."""

    def __init__(self, hub: HubStandIn) -> None:
        self.hub = hub
        self.status: int | None = None
        self.sent = 0  # bytes of blocks
        self.damaged = False  # whether a byte of each block is flipped
        self.silent = False

    def answer(self, path: str, headers: Message) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if self.silent:
            self.hub.wait_until_closed(120)
        if self.status is not None:
            return self.status, {}, b""
        if match := re.fullmatch(r"/v1/reconstructions/([0-9a-f]{64})", path):
            if headers["Authorization"] != "Bearer xet-token":
                return 401, {}, b""
            return 200, {}, json.dumps(self._terms(self._file(match[1]), headers["Range"])).encode()
        if match := re.fullmatch(r"/xorb/([0-9a-f]{64})/(\d+)", path):
            first, last = map(int, re.findall(r"\d+", headers["Range"]))
            body = self._block(self._file(match[1]), int(match[2]))[first : last + 1]
            self.sent += len(body)
            return 206, {}, body
        return 404, {}, b""

    def _file(self, name: str) -> File:
        trees = (tree for repo in self.hub.repos.values() for tree in repo.commits.values())
        return next(file for tree in trees for file in tree.values() if file.lfs and file.xet_hash == name)

    def _terms(self, file: File, span: str | None) -> dict[str, object]:
        """The blocks that hold a range of the file, and their addresses."""
        first, last = map(int, re.findall(r"\d+", span)) if span else (0, file.size - 1)
        numbers = range(first // BLOCK, min(last, file.size - 1) // BLOCK + 1)
        terms, fetches = [], {}
        for number in numbers:
            size = min(BLOCK, file.size - number * BLOCK)
            chunks = {"start": 0, "end": -(-size // CHUNK)}
            stored = {"start": 0, "end": size + 8 * chunks["end"] - 1}
            terms.append({"hash": f"{number:064x}", "unpacked_length": size, "range": chunks})
            url = f"{self.hub.cdn}/xorb/{file.xet_hash}/{number}"
            fetches[f"{number:064x}"] = [{"range": chunks, "url": url, "url_range": stored}]
        return {"offset_into_first_range": first - numbers[0] * BLOCK, "terms": terms, "fetch_info": fetches}

    def _block(self, file: File, number: int) -> bytes:
        data = bytearray(b"".join(file.content.read(number * BLOCK, min((number + 1) * BLOCK, file.size))))
        if self.damaged:
            data[0] ^= 1
        pieces = []
        for start in range(0, len(data), CHUNK):
            size = min(CHUNK, len(data) - start).to_bytes(3, "little")
            pieces += [b"\0", size, b"\0", size, data[start : start + CHUNK]]
        return b"".join(pieces)
