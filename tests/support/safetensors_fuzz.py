"""Damaged safetensors headers, our reader beside the library: `python -m support.safetensors_fuzz COUNT SEED FOLDER`.

Every file must open and read, or give one CheckpointError of one line. What we accept the library must accept, with the same
names, dtypes, shapes and bytes; what it accepts and we refuse must break one of the rules in `STRICTER`, seen by other means
than our reader's. The last line of stdout is a JSON object: how many both accept and refuse, how often each refusal was given
(numbers and names taken out), how often each stricter rule, the slowest file, and the memory that the process grew by.
"""

import json
import math
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save

from gpt2.checkpoint.containers import HEADER_LIMIT
from gpt2.checkpoint.containers.safetensors_file import DTYPES, SafetensorsFile
from gpt2.errors import CheckpointError

NUMBERS = [-1, 0, 1, 2, 3, 4, 7, 8, 12, 16, 24, 255, 2**16, 2**31, 2**32, 2**47, 2**48, 2**53, 2**62, 2**63, 2**64 - 1, 2**64]
JUNK: list[Any] = [*NUMBERS, 10**30, 0.0, 1.0, 1.5, 1e300, -0.0, True, False, None, "", "F32", "F64", "BOOL", "F8_E4M3", "a\nb"]
JUNK += ["\ud800", "\0", "é", "x" * 3000, "9" * 5000, [], [0], [1, 2], [[]], {}, {"dtype": "F32"}, float("nan"), float("inf")]
JUNK += [{"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, [1] * 9, [0, 2**40], [2**32, 2**32], [0, 2**63]]
KINDS = [*DTYPES, "U16", "U32", "U64", "F8_E5M2", "C64", "F4", "f32", "F320", "E8M0", ""]
NAMES = [
    "wte.weight",
    "h.0.attn.bias",
    "__metadata__",
    "",
    "a",
    "b",
    "a\nb",
    "\x1b[2J",
    "é" * 40,
    "x" * 5000,
    "\ud800",
    "\0",
    "{",
    '"',
]
PIECES = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"0",
    b"-",
    b"9",
    b"1e9",
    b"null",
    b"true",
    b"NaN",
    b" ",
    b"\n",
    b"\t",
    b"\\",
    b"\\u",
]
PIECES += [
    b"\x00",
    b"\xff",
    b"\xc3\xa9",
    b"\xef\xbb\xbf",
    b"\\ud800",
    b'"a":',
    b'{"a":',
    b"//",
    b"'",
    b",,",
    b"\x0b",
    b"\xc2\xa0",
]


def whole(pick: random.Random) -> bytes:
    """A file that the library wrote: up to six tensors of any dtype and shape, and perhaps metadata."""
    tensors = {}
    for name in pick.sample(["a", "b", "wte.weight", "ä b", "h.0.ln_1.bias", "__x__", ""], pick.randint(0, 6)):
        shape = [pick.choice([0, 1, 2, 3, 5]) for _ in range(pick.randint(0, 4))]
        dtype = pick.choice(list(DTYPES.values()))
        raw = torch.tensor(list(pick.randbytes(torch.Size(shape).numel() * dtype.itemsize)), dtype=torch.uint8)
        tensors[name] = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)
    metadata = pick.choice([None, {}, {"format": "pt"}, {"a": "", "é": "\n"}])
    return save(tensors, metadata=metadata or None)  # the library's own header for nothing and {} is not JSON


def change(raw: Any, pick: random.Random) -> Any:
    """One change somewhere in a JSON value: a number off by a little, a key away, renamed, twice or exchanged, or nonsense."""
    if isinstance(raw, dict) and raw and pick.random() < 0.9:
        key = pick.choice(list(raw))
        match pick.randrange(10):
            case 0:
                return {name: value for name, value in raw.items() if name != key}
            case 1:
                return {(pick.choice(NAMES) if name == key else name): value for name, value in raw.items()}
            case 2:
                other = pick.choice(list(raw))
                return raw | {key: raw[other], other: raw[key]}
            case 3:
                return raw | {pick.choice(NAMES): pick.choice([*JUNK, *raw.values()])}
        return raw | {key: change(raw[key], pick)}
    if isinstance(raw, list) and raw and pick.random() < 0.8:
        place = pick.randrange(len(raw))
        if pick.random() < 0.2:
            return [
                *raw[:place],
                *pick.choice([[], [pick.choice(NUMBERS)], [raw[place]] * 2, [1, raw[place]]]),
                *raw[place + 1 :],
            ]
        return [*raw[:place], change(raw[place], pick), *raw[place + 1 :]]
    if type(raw) is int and pick.random() < 0.6:
        return raw + pick.choice([-8, -4, -2, -1, 1, 2, 4, 8])
    return pick.choice(KINDS if isinstance(raw, str) and pick.random() < 0.7 else JUNK)


def harmless(text: bytes, raw: Any, pick: random.Random) -> bytes:
    """The same header in other words."""
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
    """Headers that are built to cost something: deep, wide, long, or at the limit."""
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


def damaged(pick: random.Random) -> bytes:
    if pick.random() < 0.01:
        return huge(pick)
    content = whole(pick)
    length = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + length], content[8 + length :]
    action = pick.random()
    if action < 0.5:
        raw = json.loads(text)
        for _ in range(pick.choice([1, 1, 1, 2, 4])):
            raw = change(raw, pick)
        text = json.dumps(raw, ensure_ascii=pick.random() < 0.7).encode("utf-8", "surrogatepass")
    elif action < 0.65:
        text = harmless(text, json.loads(text), pick)
    elif action < 0.9:
        flipped = bytearray(text)
        for _ in range(pick.choice([1, 1, 2, 5])):
            place = pick.randrange(len(flipped) + 1)
            width = pick.choice([0, 0, 1, 1, 2, 9])
            flipped[place : place + width] = pick.choice(
                [*PIECES, b"", pick.randbytes(2), text[place : place + pick.randrange(40)]]
            )
        text = bytes(flipped)
    if action < 0.9 and pick.random() < 0.85:
        if pick.random() < 0.5:
            text += b" " * (-len(text) % 8)
        content = len(text).to_bytes(8, "little") + text + data
    else:
        length = pick.choice([0, 1, 2, 8, len(text) - 1, len(text) + 1, len(content), 2**31, 2**32, 2**63, 2**64 - 1, len(text)])
        content = (max(length, 0)).to_bytes(8, "little") + text + data
    match pick.randrange(12):
        case 0:
            return content[: pick.randrange(len(content) + 1)]
        case 1:
            return content + pick.randbytes(pick.randrange(1, 9))
    return content


def header(content: bytes) -> Any:
    """A header that the library has accepted, as plain JSON, repeated keys kept apart."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length], object_pairs_hook=Pairs)


class Pairs(list):
    """A JSON object as its pairs."""


def objects(raw: Any) -> list[Pairs]:
    inner = [value for _, value in raw] if isinstance(raw, Pairs) else raw if isinstance(raw, list) else []
    return [*([raw] if isinstance(raw, Pairs) else []), *(found for value in inner for found in objects(value))]


def rows(raw: Any) -> list[dict[str, Any]]:
    return [dict(row) for name, row in raw if name != "__metadata__"]


# What we refuse though the library accepts it, with the words we do it in. Each is a file that no GPT-2 comes in.
STRICTER: dict[str, tuple[str, Callable[[Any, bytes], bool]]] = {
    "a key occurs twice: which is meant?": (
        "a key occurs twice",
        lambda raw, _: any(len({name for name, _ in pairs}) < len(pairs) for pairs in objects(raw)),
    ),
    "no brace at its very beginning, as the format demands": ("not a JSON object", lambda _, content: content[8:9] != b"{"),
    "__metadata__ that is null": ("__metadata__ that is not text", lambda raw, _: dict(raw).get("__metadata__", "") is None),
    "a dtype that torch's GPT-2 has no use for": (
        "has dtype",
        lambda raw, _: any(row["dtype"] not in DTYPES for row in rows(raw)),
    ),
    "more than eight axes": ("contradicts itself", lambda raw, _: any(len(row["shape"]) > 8 for row in rows(raw))),
    "an empty tensor whose other axes make 2**48 or more": (
        "contradicts itself",
        lambda raw, _: any(math.prod(axis or 1 for axis in row["shape"]) >= 2**48 for row in rows(raw)),
    ),
    "a header of more than 4 MB": ("claims a header", lambda _, content: int.from_bytes(content[:8], "little") > HEADER_LIMIT),
}


def library(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    """What the library makes of it; None where it refuses."""
    try:
        return {name: (row["dtype"], list(row["shape"]), bytes(row["data"])) for name, row in safetensors.deserialize(content)}
    except BaseException as error:  # a panic in Rust is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return None


def ours(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    file = SafetensorsFile(path)
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    found = {}
    for name, entry in file.entries.items():
        tensor = file.read(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape)
        found[name] = (kinds[tensor.dtype], [*tensor.shape], bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return found


def kind(message: str) -> str:
    """A refusal without what is this file's own: names, numbers, dtypes and shapes."""
    about = re.sub(r"^.* has dtype .*", "# has dtype #", message.partition(";")[0])
    return re.sub(r"\d[\d,]*|\(.*\)|(?<=about ).*|(?<= for ).*|(?<=in which ).*(?= (leaves|overlaps))", "#", about)


def fuzz(count: int, seed: int, folder: Path) -> dict[str, Any]:
    pick, path = random.Random(seed), folder / "fuzz.safetensors"
    both, refusals, stricter, slowest, before = 0, Counter[str](), Counter[str](), 0.0, 0
    with open(path, "wb") as file:
        for number in range(count):
            if number == min(500, count // 2):  # what python and torch allocate once
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            content = damaged(pick)
            file.seek(0)
            file.write(content)
            file.truncate()
            file.flush()
            theirs = library(content)
            begin = time.perf_counter()
            try:
                found = ours(path)
            except CheckpointError as error:
                message = str(error)
                assert message.isprintable(), (number, message)
                assert message.startswith(f"{path}: "), (number, message)
                assert "; " in message, (number, message)
                assert len(message) < 700, (number, message)
                refusals[kind(message.removeprefix(f"{path}: "))] += 1
                if theirs is not None:
                    raw = header(content)
                    rules = [rule for rule, (words, holds) in STRICTER.items() if words in message and holds(raw, content)]
                    assert rules, (number, message, content)
                    stricter[rules[0]] += 1
            else:
                both += 1
                assert theirs is not None, (number, content)
                assert found == theirs, (number, content)
            slowest = max(slowest, time.perf_counter() - begin)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"both": both, "refused": refusals, "stricter": stricter, "slowest_s": slowest, "grown_mb": grown}


if __name__ == "__main__":
    torch.set_num_threads(1)
    began = time.perf_counter()
    found = fuzz(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    print(json.dumps(found | {"seconds": time.perf_counter() - began}))
