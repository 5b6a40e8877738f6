"""Read `torch.save` files without `torch.load`.

Since torch 1.6 (2020) it is an uncompressed zip archive: the pickle `data.pkl` describes the tensors, and `data/0`, `data/1`,
... are their storages (torch/serialization.py, `_save`). The older form, also the official gpt2's `pytorch_model.bin`, has five
pickles (magic number, version, machine, tensors, storage keys) and then the storages, each after its length (`_legacy_save`).

A pickle can run code, so it is read as data (`pickle_data.py`); every tensor must lie within its storage (`torch_tensors.py`).
Both forms are mapped, and an optimizer's state is never read.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers import Container, Damaged, listed, refuse_other_format, shown
from gpt2.checkpoint.containers.pickle_data import Call, ForbiddenName, Pickle
from gpt2.checkpoint.containers.torch_tensors import ALLOWED, NotDense, Storage, Strided, describe, kind_of, storage
from gpt2.config import quoted
from gpt2.errors import CheckpointError

# nanoGPT's ckpt.pt of GPT-2 XL has a pickle of 200 kB; some contain every loss of a long run.
PICKLE_LIMIT = 16_000_000
DIRECTORY_LIMIT = 4_000_000  # of a zip archive's directory, which takes twenty times that in memory
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001  # first bytes of a `_legacy_save` file
WRAPPERS = ("model", "state_dict", "model_state_dict")  # keys of the weights: nanoGPT, Lightning, torch's tutorials


class TorchFile(Container):
    """A torch.save file: the tensors of its state dict (also under one of ``WRAPPERS``), and nanoGPT's ``model_args``."""

    kind = "torch.save"
    entries: Mapping[str, Strided]
    model_args: Mapping[str, Any] | None

    def _directory(self) -> dict[str, Strided]:
        zipped = self._file.bytes(0, 4) == b"PK\x03\x04"
        value, places = self._from_zip() if zipped else self._from_pickles()
        args = value.get("model_args") if isinstance(value, dict) else None
        self.model_args = args if _plain(args) else None
        entries = {}
        for name, call in self._state_dict(value).items():
            try:
                entries[name] = describe(call, places)
            except NotDense as error:
                raise CheckpointError(f"{self.path}: {shown(name)} is {error}; save it as a plain dense tensor") from None
            except Damaged as error:
                raise Damaged(f"has a tensor {shown(name)} that {error}") from None
        return entries

    def _unpickle(self, data: bytes, start: int = 0) -> Pickle:
        try:
            return Pickle(data, ALLOWED, start)
        except ForbiddenName as error:
            raise CheckpointError(
                f"{self.path}: refused, since loading it would run code: its pickle asks for {shown(str(error))}, and weights "
                "need no code; have their state_dict() saved, or convert the file to safetensors in a sandbox"
            ) from None

    def _from_zip(self) -> tuple[Any, dict[str, tuple[int, int]]]:
        """Return the pickle's value, and the place of each storage: key -> (start, bytes)."""
        members = self._members()
        roots = [name.removesuffix("/data.pkl") for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise CheckpointError(f"{self.path}: is a zip archive, but not one of torch.save; give a checkpoint")
        (root,) = roots
        order = members.get(f"{root}/byteorder")
        if order is not None and self._file.bytes(*order[:2]) != b"little":
            raise CheckpointError(f"{self.path}: was written on a big-endian machine; convert it to safetensors there")
        start, size, crc = members[f"{root}/data.pkl"]
        if size > PICKLE_LIMIT:
            raise Damaged(f"has a pickle of {size:,} bytes, and no GPT-2 needs more than {PICKLE_LIMIT:,}")
        data = self._file.bytes(start, size)
        if crc and zlib.crc32(data) != crc:  # 0 is torch's set_crc32_options(False)
            raise Damaged("has a pickle that does not match its checksum")
        prefix = f"{root}/data/"
        places = {name.removeprefix(prefix): row[:2] for name, row in members.items() if name.startswith(prefix)}
        return self._unpickle(data).value, places

    def _members(self) -> dict[str, tuple[int, int, int]]:
        """Read the archive's directory: name -> (data start, size, crc); nothing compressed or shared."""
        try:
            archive = zipfile.ZipFile(_Bounded(self._file.file.fileno(), closefd=False))
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, OverflowError, struct.error) as error:
            raise Damaged(f"has a zip directory that cannot be read ({str(error)[:80]})") from None
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            what = "is a TorchScript program, which would run code; give the state dict it was made from"
            raise CheckpointError(f"{self.path}: {what}")
        members: dict[str, tuple[int, int, int]] = {}
        end = 0
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            name = info.orig_filename
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
                what = f"{shown(name)} in it is compressed, which torch.save never does; unpack and save it again"
                raise CheckpointError(f"{self.path}: {what}")
            local = self._file.bytes(info.header_offset, 30)
            start = info.header_offset + 30 + sum(int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
            outside = info.header_offset < end or start + info.file_size > archive.start_dir
            if outside or not local.startswith(b"PK\x03\x04"):
                raise Damaged(f"has a zip directory that lies about {shown(name)}")
            if name in members:
                raise Damaged(f"has {shown(name)} twice in its zip directory")
            members[name] = (start, info.file_size, info.CRC)
            end = start + info.file_size
        return members

    def _from_pickles(self) -> tuple[Any, dict[str, tuple[int, int]]]:
        """Do what :meth:`_from_zip` does for the form before torch 1.6."""
        data = self._file.bytes(0, PICKLE_LIMIT)
        if not data.startswith((pickle.PROTO, pickle.GLOBAL)):  # a pickle of protocol 0 begins with GLOBAL
            refuse_other_format(self._file)
            raise Damaged("is neither a zip archive nor a pickle")
        magic = self._unpickle(data)
        if magic.value != MAGIC:
            raise CheckpointError(f"{self.path}: is a pickle, but not one of torch.save; give a checkpoint")
        version = self._unpickle(data, magic.end)
        if version.value != VERSION:
            raise Damaged(f"is of version {quoted(version.value)}, and torch only ever wrote {VERSION}")
        described = self._unpickle(data, self._unpickle(data, version.end).end)
        keys = self._unpickle(data, described.end)
        held: dict[str, Storage] = {}
        for one in map(storage, described.persistent):
            if held.setdefault(one.key, one) != one:
                raise Damaged(f"contradicts itself about storage {shown(one.key)}")
        places: dict[str, tuple[int, int]] = {}
        at = keys.end
        for key in keys.value if isinstance(keys.value, list) else []:
            if type(key) is not str or key not in held or key in places:
                raise Damaged(f"lists a storage {quoted(key)} that it does not describe")
            places[key] = (at + 8, held[key].nbytes)
            end = at + 8 + held[key].nbytes
            if end <= self._file.size and self._file.bytes(at, 8) != held[key].count.to_bytes(8, "little"):
                raise Damaged(f"has another size for storage {shown(key)} than it describes")
            at = end
        if at != self._file.size:
            raise Damaged(f"has {self._file.size:,} bytes where its storages end at byte {at:,}")
        return described.value, places

    def _state_dict(self, value: Any) -> dict[str, Call]:
        """Return the only dict of tensors in a pickle's value."""
        if type(value) is not dict:
            raise CheckpointError(f"{self.path}: holds {kind_of(value)} where a state dict should be; save model.state_dict()")
        inside = {key: value[key] for key in WRAPPERS if type(value.get(key)) is dict}
        wrapped = [key for key, state in inside.items() if any(type(item) is Call for item in state.values())]
        if len(wrapped) > 1:
            raise CheckpointError(f"{self.path}: has weights under {listed(wrapped)}; save one of them alone")
        state = inside[wrapped[0]] if wrapped else value
        others = [str(name) for name, item in state.items() if type(name) is not str or type(item) is not Call]
        if others:
            raise CheckpointError(f"{self.path}: has no tensor at {listed(others)}; save model.state_dict() alone")
        if not state:
            raise CheckpointError(f"{self.path}: holds no tensors; give the file with the weights")
        return state

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        entry = self.entries[name]
        if entry.contiguous:
            return super().read(name, dtype, mapped=mapped)
        reach = 1 + sum(step * (length - 1) for step, length in zip(entry.stride, entry.shape, strict=True))
        source = self._file.tensor(entry.start, (reach,), entry.dtype, mapped=False)
        tensor = torch.empty(entry.shape, dtype=dtype or entry.dtype)
        return tensor.copy_(source.as_strided(entry.shape, entry.stride))


def _plain(value: Any) -> bool:
    """Return whether a value looks like nanoGPT's model_args: a few names, each with a number, flag, word or None."""
    if type(value) is not dict or len(value) > 100:
        return False
    types = all(type(key) is str and type(item) in (str, int, float, bool, type(None)) for key, item in value.items())
    texts = [text for pair in value.items() for text in pair if type(text) is str]
    numbers = [item for item in value.values() if type(item) is int]
    return types and all(len(text) < 1000 for text in texts) and all(abs(number) < 1 << 63 for number in numbers)


class _Bounded(io.FileIO):
    """The file for `zipfile`, which reads as much as the archive claims: limited to a directory's size."""

    def read(self, count: int | None = -1) -> bytes:
        if count is not None and count > DIRECTORY_LIMIT:
            raise zipfile.BadZipFile(f"it claims {count:,} bytes")
        return super().read(count)
