"""Read the safetensors format: 8 bytes of header length, a JSON header with dtype, shape and offsets of each tensor, the data.

Source: huggingface/safetensors, README. The header is untrusted: the safetensors library checks it before it is used here.

The files of a sharded training run each hold some rows of every tensor. This is the layout of torch.distributed.checkpoint's
``HuggingFaceStorageWriter``: "DCP_SHARDING_INFO" in a header says at which row a file's part begins. DCP's own layout keeps that
in ``.metadata``, a pickle, which runs code when read; it is refused.
"""

import contextlib
import json
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpt2.checkpoint.containers import HEADER_LIMIT, Container, Damaged, Entry, Refused, countable, refuse_other_format, shown
from gpt2.config import quoted
from gpt2.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
NAME = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class SafetensorsFile(Container):
    """A safetensors file. (The official gpt2's data begins at byte 14,291, not aligned for floats, so it is never mapped.)"""

    kind = "safetensors"
    metadata: Mapping[str, str]

    def _directory(self) -> dict[str, Entry]:
        if (length := int.from_bytes(self._file.bytes(0, 8), "little")) > HEADER_LIMIT:
            refuse_other_format(self._file)
            raise Damaged(f"claims a header of {length:,} bytes, and no GPT-2 needs more than {HEADER_LIMIT:,}")
        try:
            with safe_open(self.path, "np"):
                pass
        except OSError as error:
            raise Refused(f"cannot be mapped ({error}); copy it to another disk") from None
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
            raise Refused(f"{shown(name)} has dtype {quoted(dtype)}, as quantised weights have; give what they were made from")
        if not countable(shape):
            raise Damaged(f"has a header with a shape that is too large for {shown(name)}")
        return Entry(DTYPES[dtype], tuple(shape), data + start)


def name_of(rank: int) -> str:
    return f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"


class RowShards(Container):
    """The files of all ranks in a folder, as one container. A tensor that is read is put together in memory, not mapped."""

    kind = "sharded safetensors"

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.path = folder
        self._parts: dict[str, list[tuple[int, SafetensorsFile]]] = {}
        for file in (SafetensorsFile(folder / name) for name in names):
            starts = _starts(file)
            for name in file.entries:
                self._parts.setdefault(name, []).append((starts[name], file))
        try:
            self.entries = self._directory()
        except Damaged as error:
            raise CheckpointError(f"{folder}: {error}; copy all files of the checkpoint") from None

    def _directory(self) -> Mapping[str, Entry]:
        return {name: self._entry(name) for name in self._parts}

    def _entry(self, name: str) -> Entry:
        """Return the whole tensor's shape, after checking that the parts follow each other without gap or overlap."""
        parts = sorted(self._parts[name], key=lambda part: (part[0], part[1].entries[name].shape))
        first, rows = parts[0][1].entries[name], 0
        for start, file in parts:
            entry = file.entries[name]
            if entry.dtype != first.dtype or entry.shape[1:] != first.shape[1:] or (len(parts) > 1 and not entry.shape):
                raise Damaged(f"the parts of {shown(name)} do not fit together")
            if start != rows:
                raise Damaged(f"rows {min(start, rows):,} to {max(start, rows):,} of {shown(name)} are missing or there twice")
            rows += entry.shape[0] if entry.shape else 0
        self._parts[name] = parts
        return Entry(first.dtype, (rows, *first.shape[1:]) if first.shape else (), 0)

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        parts = [file.read(name, dtype, mapped=mapped) for _, file in self._parts[name]]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def _starts(file: SafetensorsFile) -> dict[str, int]:
    """Return each tensor's first row. Raises CheckpointError: the header does not say it, or the tensor was cut along columns."""
    found: dict[str, list[int]] = {}
    with contextlib.suppress(KeyError, ValueError, TypeError, RecursionError):
        info: Any = json.loads(file.metadata[INFO])
        found = {name: [*map(operator.index, info[name][OFFSETS])] for name in file.entries}
    for name, entry in file.entries.items():
        if name not in found or len(found[name]) != len(entry.shape) or any(found[name][1:]):
            raise CheckpointError(f"{file.path}: has no {INFO} that parts tensors by rows; save the run's model as one file")
    return {name: offsets[0] if offsets else 0 for name, offsets in found.items()}
