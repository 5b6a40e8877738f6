"""Read the safetensors files of a sharded training run: each holds some rows of every tensor.

This is the layout of torch.distributed.checkpoint's ``HuggingFaceStorageWriter``: "DCP_SHARDING_INFO" in a header says at which
row a file's part begins. DCP's own layout keeps that in ``.metadata``, a pickle, which runs code when read; it is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers import Container, Damaged, Entry, shown
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.errors import CheckpointError

NAME = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


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
    try:
        info: Any = json.loads(file.metadata[INFO])
        found = {name: info[name][OFFSETS] for name in file.entries}
        whole = all(type(offsets) is list for offsets in found.values())
        whole = whole and all(type(n) is int and 0 <= n < 1 << 48 for offsets in found.values() for n in offsets)
        fits = all(len(found[name]) == len(entry.shape) for name, entry in file.entries.items())
    except (KeyError, ValueError, TypeError, RecursionError):
        whole = fits = False
    if not whole or not fits or any(any(offsets[1:]) for offsets in found.values()):
        raise CheckpointError(
            f"{file.path}: its header has no {INFO} that parts tensors by rows; save the run's model as one file"
        )
    return {name: offsets[0] if offsets else 0 for name, offsets in found.items()}
