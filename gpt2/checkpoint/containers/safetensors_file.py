"""The safetensors format, read directly.

A file is eight bytes of header length, a JSON header that names each tensor's dtype, shape and span, and the raw data
(huggingface/safetensors, README). The header comes from outside, so nothing in it is believed before it is checked.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers import HEADER_LIMIT, Entry, countable, shown
from gpt2.checkpoint.containers.mapped_file import MappedFile
from gpt2.config import quoted
from gpt2.errors import CheckpointError

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
# What a file that is not safetensors begins with, what it is then, and what to do.
OTHER_FORMATS = (
    (b"version https://git-lfs", "is a git-lfs pointer, not the file it points to; run `git lfs pull`"),
    (b"PK\x03\x04", "was written by torch.save; convert it to safetensors (transformers' save_pretrained does)"),
    (b"\x80", "is a pickle; convert it to safetensors (transformers' save_pretrained does)"),
    (b"GGUF", "is a GGUF file; give the checkpoint that it was made from"),
    (b"<", "is a web page; fetch the file itself"),
)


@dataclass(frozen=True)
class Span(Entry):
    """Where a tensor lies: ``start`` and ``end`` count bytes from the beginning of the file."""

    start: int
    end: int


class SafetensorsFile:
    """A safetensors file, its header checked and its data mapped when first asked for.

    The file stays open, so that header and data are one file's even if another is renamed over it meanwhile.

    Raises:
        CheckpointError: the header is damaged, lies about the data, or the file is cut short.
    """

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path, self._data = path, MappedFile(path)
        self.size = self._data.size
        head = self._data.bytes(0, 32)
        length = int.from_bytes(head[:8], "little")
        if self.size < 8:
            raise self._bad(f"is {f'only {self.size} bytes long' if self.size else 'empty'}")
        if length > HEADER_LIMIT:
            other = next((what for start, what in OTHER_FORMATS if head.startswith(start)), None)
            if other is not None:
                raise CheckpointError(f"{path}: {other}")
            raise self._bad(f"claims a header of {length:,} bytes, and no GPT-2 needs more than {HEADER_LIMIT:,}")
        if length > self.size - 8:
            raise self._bad(f"is cut short: {self.size:,} bytes, with a header of {length:,}")
        self.entries = self._parse(self._data.bytes(8, length), 8 + length)

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; not a whole safetensors file, fetch it again")

    def _parse(self, header: bytes, data: int) -> dict[str, Span]:
        try:
            text = header.decode("utf-8")
            raw = json.loads(text, object_pairs_hook=_without_repeats, **NUMBERS)
            json.dumps(raw, ensure_ascii=False).encode()  # fails on half a surrogate pair, which is no text
        except (ValueError, RecursionError) as error:
            raise self._bad(f"has a header that is not JSON ({str(error)[:80]})") from None
        if not isinstance(raw, dict) or not text.startswith("{"):
            raise self._bad("has a header that is not a JSON object")
        metadata = raw.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._bad("has a header with __metadata__ that is not text")
        entries = {name: self._entry(name, row, data) for name, row in raw.items()}
        end = data
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != end:
                kind = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
                raise self._bad(f"has a header in which {shown(name)} {kind}")
            end = entry.end
        if end != self.size:
            raise self._bad(f"has {self.size:,} bytes where its header says {end:,}")
        return entries

    def _entry(self, name: str, row: Any, data: int) -> Span:
        try:
            kind, shape, (start, end) = row["dtype"], row["shape"], row["data_offsets"]
            whole = all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, start, end))
        except (TypeError, KeyError, ValueError):
            raise self._bad(f"has a header without dtype, shape and data_offsets for {shown(name)}") from None
        if not isinstance(kind, str) or kind not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{self.path}: {shown(name)} has dtype {quoted(kind)}; convert it to one of {known}")
        whole = whole and isinstance(shape, list) and len(shape) <= 8 and countable(shape)
        if not whole or end - start != math.prod(shape) * DTYPES[kind].itemsize:
            claim = f"{kind} {quoted(shape)} in bytes {quoted(start)} to {quoted(end)}"
            raise self._bad(f"has a header that contradicts itself about {shown(name)}: {claim}")
        return Span(DTYPES[kind], tuple(shape), data + start, data + end)

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        """One tensor on the CPU, as stored or converted to ``dtype``: a view of the mapped file, or memory of its own.

        The official gpt2's data begins at byte 14,291, where no float is aligned; such a file is read once instead.
        """
        entry = self.entries[name]
        return self._data.tensor(entry.start, entry.shape, entry.dtype, dtype, mapped=mapped)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _int(text: str) -> float:
    """Minus zero is a float, as it is to every JSON reader that keeps its sign, and so no size of anything."""
    _float(text)
    return -0.0 if text == "-0" else int(text)


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError("a number is out of range")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


NUMBERS: dict[str, Any] = {"parse_int": _int, "parse_float": _float, "parse_constant": _no_constant}
