"""Damaged safetensors headers for `support/fuzz.py`: our reader compared with the library.

We read what the library reads: the same names, dtypes, shapes and bytes. We refuse what it refuses, and what `STRICTER` names.
"""

import json
import random
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save

from gpt2.checkpoint.containers.safetensors_file import DTYPES, SafetensorsFile
from gpt2.errors import CheckpointError
from support.checks import random_bits
from support.fuzz import JUNK, Subject, changed_json

DTYPE_NAMES = [*DTYPES, "U16", "U32", "U64", "F8_E5M2", "C64", "F4", "f32", "F320", "E8M0", ""]
PIECES = b"{ } [ ] \" , : 0 - 9 1e9 null true NaN \\ \\u \x00 \xff \xc3\xa9 \xef\xbb\xbf \\ud800 // ' ,, \xc2\xa0".split()
PIECES += [b" ", b"\n", b"\t", b"\x0b", b'"a":', b'{"a":']
STRICTER = ("has dtype", "a shape that is too large", "in an unknown form")


def whole(pick: random.Random) -> bytes:
    """A file that the library wrote: up to six tensors of any dtype and shape, with or without metadata."""
    names = pick.sample(["a", "b", "wte.weight", "ä b", "h.0.ln_1.bias", "__x__", ""], pick.randint(0, 6))
    tensors = {name: random_bits(pick, pick.choice(list(DTYPES.values()))) for name in names}
    metadata = pick.choice([None, {}, {"format": "pt"}, {"a": "", "é": "\n"}])
    return save(tensors, metadata=metadata or None)  # the library's header for no tensors and {} is not JSON


def damaged(pick: random.Random, content: bytes) -> bytes:
    """A file with a damaged header (meaning, text or bytes), a wrong length, or cut or extended data."""
    length = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + length], content[8 + length :]
    action = pick.random()
    if action < 0.5:
        raw = json.loads(text)
        for _ in range(pick.choice([1, 1, 1, 2, 4])):
            raw = changed_json(raw, pick, junk=DTYPE_NAMES if pick.random() < 0.3 else JUNK)
        if isinstance(raw, dict) and pick.random() < 0.05:  # the library reads a row's values in order as well
            raw |= {key: list(row.values()) for key, row in raw.items() if key != "__metadata__" and isinstance(row, dict)}
        text = json.dumps(raw, ensure_ascii=pick.random() < 0.7).encode("utf-8", "surrogatepass")
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
    path = folder / "fuzz.safetensors"
    path.write_bytes(save({"a": torch.ones(2)}))

    def damage(pick: random.Random) -> None:
        with open(path, "r+b") as file:  # in place: on ext4, truncating and rewriting a file takes milliseconds
            file.write(damaged(pick, whole(pick)))
            file.truncate()

    def read() -> None:
        theirs = library(path.read_bytes())
        try:
            tensors = ours(path)
        except CheckpointError as error:
            if theirs is not None and not any(words in str(error) for words in STRICTER):
                raise AssertionError("refused, and the library reads it") from error
            raise
        assert tensors == theirs

    return Subject(damage, read)
