"""Read the safetensors format: 8 bytes of header length, a JSON header with dtype, shape and offsets of each tensor, the data.

Source: huggingface/safetensors, README. The header is untrusted, so everything in it is checked before use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from gpt2.checkpoint.containers import HEADER_LIMIT, Container, Damaged, Entry, countable, refuse_other_format, shown
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


class SafetensorsFile(Container):
    """A safetensors file. (The official gpt2's data begins at byte 14,291, not aligned for floats, so it is never mapped.)"""

    kind = "safetensors"
    metadata: Mapping[str, str]

    def _directory(self) -> dict[str, Entry]:
        size, length = self._file.size, int.from_bytes(self._file.bytes(0, 8), "little")
        if size < 8:
            raise Damaged(f"is only {size} bytes long")
        if length > HEADER_LIMIT:
            refuse_other_format(self._file)
            raise Damaged(f"claims a header of {length:,} bytes, and no GPT-2 needs more than {HEADER_LIMIT:,}")
        if length > size - 8:
            raise Damaged(f"is cut short: {size:,} bytes, with a header of {length:,}")
        self.metadata, rows = _parse(self._file.bytes(8, length))
        entries = {name: self._entry(name, row, 8 + length) for name, row in rows.items()}
        end = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != end:
                fault = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
                raise Damaged(f"has a header in which {shown(name)} {fault}")
            end = entry.end
        if end != size:
            raise Damaged(f"has {size:,} bytes where its header says {end:,}")
        return entries

    def _entry(self, name: str, row: Any, data: int) -> Entry:
        try:
            dtype, shape, (start, end) = row["dtype"], row["shape"], row["data_offsets"]
            whole = all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, start, end))
        except (TypeError, KeyError, ValueError):
            raise Damaged(f"has a header without dtype, shape and data_offsets for {shown(name)}") from None
        if not isinstance(dtype, str) or dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{self.path}: {shown(name)} has dtype {quoted(dtype)}; convert it to one of {known}")
        whole = whole and isinstance(shape, list) and len(shape) <= 8 and countable(shape)
        if not whole or end - start != math.prod(shape) * DTYPES[dtype].itemsize:
            claim = f"{dtype} {quoted(shape)} in bytes {quoted(start)} to {quoted(end)}"
            raise Damaged(f"has a header that contradicts itself about {shown(name)}: {claim}")
        return Entry(DTYPES[dtype], tuple(shape), data + start)


def _parse(header: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Parse the header's JSON object, more strictly than Python does; return its metadata, and a row for each tensor."""
    try:
        text = header.decode()
        # int refuses the constants NaN and Infinity, which are not JSON
        raw = json.loads(text, object_pairs_hook=_without_repeats, parse_int=_int, parse_float=_float, parse_constant=int)
        json.dumps(raw, ensure_ascii=False).encode()  # fails on a lone surrogate, which is not text
    except (ValueError, RecursionError) as error:
        raise Damaged(f"has a header that is not JSON ({str(error)[:80]})") from None
    if not isinstance(raw, dict) or not text.startswith("{"):
        raise Damaged("has a header that is not a JSON object")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Damaged("has a header with __metadata__ that is not text")
    return metadata, raw


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _int(text: str) -> float:
    """Return minus zero as a float, so that it is refused as a size, as in JSON readers that keep its sign."""
    _float(text)
    return -0.0 if text == "-0" else int(text)


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError("a number is out of range")
    return value
