"""Read the safetensors format: 8 bytes of header length, a JSON header with dtype, shape and offsets of each tensor, the data.

Source: huggingface/safetensors, README. The header is untrusted: the safetensors library checks it before it is used here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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
        try:
            with safe_open(self.path, "np"):
                pass
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be mapped ({error}); copy it to another disk") from None
        except SafetensorError as error:
            what = ascii(str(error).removeprefix("Error while deserializing header: "))[1:-1]
            raise Damaged(f"has a header that the safetensors library refuses ({what[:120]})") from None
        rows = json.loads(self._file.bytes(8, length))
        self.metadata = rows.pop("__metadata__", None) or {}
        return {name: self._entry(name, row, 8 + length) for name, row in rows.items()}

    def _entry(self, name: str, row: Any, data: int) -> Entry:
        if not isinstance(row, dict) or not isinstance(row["dtype"], str):  # the library also reads [dtype, shape, offsets]
            raise Damaged(f"has a header that describes {shown(name)} in an unknown form")
        dtype, shape, (start, _) = row["dtype"], row["shape"], row["data_offsets"]
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise CheckpointError(f"{self.path}: {shown(name)} has dtype {quoted(dtype)}; convert it to one of {known}")
        if len(shape) > 8 or not countable(shape):
            raise Damaged(f"has a header with a shape that is too large for {shown(name)}")
        return Entry(DTYPES[dtype], tuple(shape), data + start)
