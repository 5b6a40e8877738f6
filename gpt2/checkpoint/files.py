"""Tensors out of files: the safetensors format, read directly.

A file is eight bytes of header length, a JSON header that names each tensor's dtype, shape and span, and the raw data
(huggingface/safetensors, README). The header comes from outside, so nothing in it is believed before it is checked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# The largest GPT-2 has 580 tensors and 60 kB of header; a header of megabytes is an attack on the JSON parser.
HEADER_LIMIT = 4_000_000
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: ``start`` and ``end`` count bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A safetensors file, its header checked and its data mapped when first asked for.

    Raises:
        CheckpointError: the header is damaged, lies about the data, or the file is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = file.seek(0, 2)
                file.seek(0)
                length = int.from_bytes(file.read(8), "little")
                if self.size < 8 or length > self.size - 8:
                    raise self._bad(f"is cut short ({self.size:,} bytes, of which the header claims {length:,})")
                if length > HEADER_LIMIT:
                    raise self._bad(f"has a header of {length:,} bytes; no GPT-2 needs more than {HEADER_LIMIT:,}")
                header = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        self.entries = self._parse(header, 8 + length)

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; not a whole safetensors file, fetch it again")

    def _parse(self, header: bytes, data: int) -> dict[str, Entry]:
        try:
            raw = json.loads(header.decode("utf-8"), object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise self._bad(f"has a header that is not JSON ({str(error)[:80]})") from None
        if not isinstance(raw, dict):
            raise self._bad("has a header that is not a JSON object")
        raw.pop("__metadata__", None)
        entries = {name: self._entry(name, row, data) for name, row in raw.items()}
        end = data
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != end:
                kind = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
                raise self._bad(f"has a header in which {name} {kind}")
            end = entry.end
        if end != self.size:
            raise self._bad(f"has {self.size:,} bytes where its header says {end:,}")
        return entries

    def _entry(self, name: str, row: Any, data: int) -> Entry:
        try:
            kind, shape, (start, end) = row["dtype"], row["shape"], row["data_offsets"]
            whole = all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, start, end))
        except (TypeError, KeyError, ValueError):
            raise self._bad(f"has a header without dtype, shape and data_offsets for {name}") from None
        if not isinstance(kind, str) or kind not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} has dtype {kind!r}; known: {', '.join(DTYPES)}")
        if not whole or not isinstance(shape, list) or len(shape) > 8 or end - start != math.prod(shape) * DTYPES[kind].itemsize:
            raise self._bad(f"has a header that contradicts itself about {name}: {kind} {shape} in bytes {start} to {end}")
        return Entry(DTYPES[kind], tuple(shape), data + start, data + end)

    @cached_property
    def _mapping(self) -> torch.UntypedStorage:
        return torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=self.size)

    def read(self, name: str, *, mapped: bool = True) -> Tensor:
        """One tensor, as stored.

        A view of the mapped file, private to this process when written to, unless the data is not aligned to its dtype (the
        official gpt2's begins at byte 14,291) or ``mapped`` is false: then it is read into memory of its own.
        """
        entry = self.entries[name]
        if mapped and entry.start % entry.dtype.itemsize == 0 and entry.end > entry.start:
            empty = torch.empty(0, dtype=entry.dtype)
            return empty.set_(self._mapping, entry.start // entry.dtype.itemsize, entry.shape)
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if entry.end > entry.start:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(entry.start)
                room = memoryview(tensor.view(-1).view(torch.uint8).numpy())
                while room:
                    count = file.readinto(room)
                    if not count:
                        raise self._bad("was cut short while it was read")
                    room = room[count:]
        return tensor


def open_weights(path: Path) -> dict[str, SafetensorsFile]:
    """Which open file holds each tensor of a checkpoint, given a directory or a ``.safetensors`` file.

    Raises:
        CheckpointError: no weights there, a shard missing, or shards that disagree with their index.
    """
    if path.is_file():
        return _by_tensor([SafetensorsFile(path)])
    single, index = path / "model.safetensors", path / INDEX
    if single.is_file():
        return _by_tensor([SafetensorsFile(single)])
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        shards = set(weight_map.values()) if isinstance(weight_map, dict) else None
        if not shards or not all(isinstance(s, str) and re.fullmatch(r"[\w.-]+\.safetensors", s) for s in shards):
            raise CheckpointError(f"{index}: has no weight_map from tensors to .safetensors files; fetch it again")
        held = _by_tensor([SafetensorsFile(path / shard) for shard in sorted(shards)])
        wrong = [name for name, shard in weight_map.items() if name not in held or held[name].path.name != shard]
        if wrong or len(held) != len(weight_map):
            raise CheckpointError(f"{index}: the shards do not hold what it lists ({', '.join(wrong[:3]) or 'extra tensors'})")
        return held
    raise CheckpointError(f"{path}: no model.safetensors there; {_what_is_there(path)}")


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object from outside, or a CheckpointError."""
    try:
        if path.stat().st_size > HEADER_LIMIT:
            raise CheckpointError(f"{path}: is {path.stat().st_size:,} bytes; a checkpoint's JSON has a few thousand")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({str(error)[:80]}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object; fetch it again")
    return value


def _by_tensor(files: list[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    held: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.entries:
            if name in held:
                raise CheckpointError(f"{file.path}: {name} is also in {held[name].path.name}; fetch the checkpoint again")
            held[name] = file
    return held


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _what_is_there(path: Path) -> str:
    if (path / "best" / "model.safetensors").is_file():
        return f"it is the folder of a training run, give {path}/best"
    names: Iterator[str] = (p.name for p in path.iterdir()) if path.is_dir() else iter(())
    shown = sorted(names)[:6]
    return f"the folder holds {', '.join(shown)}" if shown else "the folder is empty"
