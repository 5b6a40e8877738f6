"""Damaged safetensors headers for `support/fuzz.py`: our reader compared with the library.

If we accept a file, the library must accept it, with the same names, dtypes, shapes and bytes. If the library accepts a file
that we refuse, it must break a rule in `STRICTER`, which is checked without our reader.
"""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import save

from gpt2.checkpoint.containers import HEADER_LIMIT
from gpt2.checkpoint.containers.safetensors_file import DTYPES, SafetensorsFile
from gpt2.errors import CheckpointError
from support.checks import random_bits
from support.fuzz import JUNK, NAMES, Subject, changed_json

DTYPE_NAMES = [*DTYPES, "U16", "U32", "U64", "F8_E5M2", "C64", "F4", "f32", "F320", "E8M0", ""]
PIECES = b"{ } [ ] \" , : 0 - 9 1e9 null true NaN \\ \\u \x00 \xff \xc3\xa9 \xef\xbb\xbf \\ud800 // ' ,, \xc2\xa0".split()
PIECES += [b" ", b"\n", b"\t", b"\x0b", b'"a":', b'{"a":']


def whole(pick: random.Random) -> bytes:
    """A file that the library wrote: up to six tensors of any dtype and shape, with or without metadata."""
    names = pick.sample(["a", "b", "wte.weight", "ä b", "h.0.ln_1.bias", "__x__", ""], pick.randint(0, 6))
    tensors = {name: random_bits(pick, pick.choice(list(DTYPES.values()))) for name in names}
    metadata = pick.choice([None, {}, {"format": "pt"}, {"a": "", "é": "\n"}])
    return save(tensors, metadata=metadata or None)  # the library's header for no tensors and {} is not JSON


def harmless(text: bytes, raw: Any, pick: random.Random) -> bytes:
    """The same header written differently."""
    if not isinstance(raw, dict):
        return text
    match pick.randrange(5):
        case 0:
            return json.dumps(raw, indent=pick.choice([None, 0, 3]), ensure_ascii=pick.random() < 0.5).encode("utf-8", "replace")
        case 1:
            names = list(raw)
            pick.shuffle(names)
            return json.dumps({name: raw[name] for name in names}).encode()
        case 2:
            return text.rstrip() + pick.choice([b"", b" ", b"\n", b"\t ", b"\r\n"]) * pick.randrange(9)
        case 3:
            return json.dumps(raw | {"__metadata__": {pick.choice(NAMES): pick.choice(NAMES)}}).encode()
    rows = {name: ({"unknown": pick.choice(JUNK), **row} if isinstance(row, dict) else row) for name, row in raw.items()}
    return json.dumps(rows if pick.random() < 0.2 else raw, separators=(",", ":")).encode()


def huge(pick: random.Random) -> bytes:
    """Headers that cost much to parse: deep, wide, long, or at the limit."""
    count = pick.choice([100, 1000, 20_000])
    text = pick.choice(
        [
            b"[" * count,
            b'{"a":' * count,
            b'{"a":' + b"[" * count + b"]" * count + b"}",
            b'{"a":' + b"9" * count + b"}",
            b'{"a":"' + b"\\u0061" * count + b'"}',
            json.dumps({f"{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(count // 10)}).encode(),
            json.dumps({"a": {"dtype": "F32", "shape": [1] * count, "data_offsets": [0, 4]}}).encode(),
            json.dumps({"__metadata__": {f"{n}": "" for n in range(count // 4)}}).encode(),
            b"{}" + b" " * count,
        ]
    )
    return len(text).to_bytes(8, "little") + text + bytes(pick.choice([0, 4]))


def damaged(pick: random.Random, content: bytes) -> bytes:
    """A file with a damaged header (meaning, text or bytes), a wrong length, or cut or extended data."""
    length = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + length], content[8 + length :]
    action = pick.random()
    if action < 0.5:
        raw = json.loads(text)
        for _ in range(pick.choice([1, 1, 1, 2, 4])):
            raw = changed_json(raw, pick, junk=DTYPE_NAMES if pick.random() < 0.3 else JUNK)
        text = json.dumps(raw, ensure_ascii=pick.random() < 0.7).encode("utf-8", "surrogatepass")
    elif action < 0.65:
        text = harmless(text, json.loads(text), pick)
    elif action < 0.9:
        flipped = bytearray(text)
        for _ in range(pick.choice([1, 1, 2, 5])):
            place = pick.randrange(len(flipped) + 1)
            new = pick.choice([*PIECES, b"", pick.randbytes(2), text[place : place + pick.randrange(40)]])
            flipped[place : place + pick.choice([0, 0, 1, 1, 2, 9])] = new
        text = bytes(flipped)
    length = len(text)
    if action < 0.9 and pick.random() < 0.85:
        text += b" " * (-len(text) % 8 if pick.random() < 0.5 else 0)
        length = len(text)
    else:
        length = pick.choice([0, 1, 2, 8, length, length, length + 1, len(content), 2**31, 2**32, 2**63, 2**64 - 1])
    content = length.to_bytes(8, "little") + text + data
    match pick.randrange(12):
        case 0:
            return content[: pick.randrange(len(content) + 1)]
        case 1:
            return content + pick.randbytes(pick.randrange(1, 9))
    return content


def header(content: bytes) -> Any:
    """A header that the library has accepted, as plain JSON; repeated keys stay separate."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length], object_pairs_hook=Pairs)


class Pairs(list):
    """A JSON object as its pairs."""


def objects(raw: Any) -> list[Pairs]:
    inner = [value for _, value in raw] if isinstance(raw, Pairs) else raw if isinstance(raw, list) else []
    return [*([raw] if isinstance(raw, Pairs) else []), *(found for value in inner for found in objects(value))]


def rows(raw: Any) -> list[dict[str, Any]]:
    return [dict(row) for name, row in raw if name != "__metadata__"]


class Rule(NamedTuple):
    """A file that we refuse and the library accepts, since no GPT-2 looks like it: the words of the refusal, a check of the
    header without our reader, and the header's text of an example."""

    words: str
    broken: Callable[[Any, bytes], bool]
    example: bytes


ROW = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
NINE_AXES, EMPTY = (re.sub(rb"\[1\]", shape, ROW) for shape in (b"[1,1,1,1,1,1,1,1,1]", b"[0,16777216,16777216]"))
STRICTER = {
    "a key occurs twice: which is meant?": Rule(
        "a key occurs twice",
        lambda raw, _: any(len({name for name, _ in pairs}) < len(pairs) for pairs in objects(raw)),
        ROW + b"," + ROW[1:] + b"}",
    ),
    "no brace at its very beginning, as the format demands": Rule(
        "not a JSON object", lambda _, content: content[8:9] != b"{", b"\n" + ROW + b"}"
    ),
    "__metadata__ that is null": Rule(
        "__metadata__ that is not text",
        lambda raw, _: dict(raw).get("__metadata__", "") is None,
        ROW + b',"__metadata__":null}',
    ),
    "a dtype that torch's GPT-2 has no use for": Rule(
        "has dtype", lambda raw, _: any(row["dtype"] not in DTYPES for row in rows(raw)), ROW.replace(b"F32", b"U32") + b"}"
    ),
    "more than eight axes": Rule(
        "contradicts itself", lambda raw, _: any(len(row["shape"]) > 8 for row in rows(raw)), NINE_AXES + b"}"
    ),
    "an empty tensor whose other axes make 2**48 or more": Rule(
        "contradicts itself",
        lambda raw, _: any(math.prod(axis or 1 for axis in row["shape"]) >= 2**48 for row in rows(raw)),
        ROW + b"," + EMPTY[1:].replace(b'"a"', b'"b"').replace(b"[0,4]", b"[4,4]") + b"}",
    ),
    "a header of more than 4 MB": Rule(
        "claims a header",
        lambda _, content: int.from_bytes(content[:8], "little") > HEADER_LIMIT,
        ROW + b"}" + b" " * HEADER_LIMIT,
    ),
}


def library(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    """The library's tensors of the file; None if it refuses."""
    try:
        return {name: (row["dtype"], list(row["shape"]), bytes(row["data"])) for name, row in safetensors.deserialize(content)}
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return None


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The raw bytes, without the copy that would turn every nonzero byte of a bool into 1."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def ours(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    file = SafetensorsFile(path)
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    tensors = {name: file.read(name) for name in file.entries}
    assert all((t.dtype, tuple(t.shape)) == (file.entries[name].dtype, file.entries[name].shape) for name, t in tensors.items())
    return {name: (kinds[t.dtype], [*t.shape], raw_bytes(t)) for name, t in tensors.items()}


def prepare(folder: Path) -> Subject:
    path, stricter = folder / "fuzz.safetensors", Counter[str]()
    path.write_bytes(save({"a": torch.ones(2)}))

    def damage(pick: random.Random) -> None:
        content = huge(pick) if pick.random() < 0.01 else damaged(pick, whole(pick))
        with open(path, "r+b") as file:  # in place: on ext4, truncating and rewriting a file takes milliseconds
            file.write(content)
            file.truncate()

    def read() -> None:
        content = path.read_bytes()
        theirs = library(content)
        try:
            tensors = ours(path)
        except CheckpointError as error:
            if theirs is not None:
                raw, message = header(content), str(error)
                rules = [name for name, rule in STRICTER.items() if rule.words in message and rule.broken(raw, content)]
                assert rules, (message, content)
                stricter[rules[0]] += 1
            raise
        assert tensors == theirs, content

    return Subject(damage, read, stricter=stricter)
