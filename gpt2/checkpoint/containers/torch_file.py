"""What `torch.save` writes, read without `torch.load`.

Two forms. Since torch 1.6 (2020) a zip archive, nothing in it compressed: a pickle `data.pkl` that describes the tensors, and
`data/0`, `data/1`, ... their storages (torch/serialization.py, `_save`). Before, and in the official gpt2's own
`pytorch_model.bin`, five pickles in a row (a magic number, a version, facts about the machine, the tensors' description, the
storages' keys) and then the storages, each behind its length (`_legacy_save`).

In either the description is a pickle, and a pickle can run code. It is read as data instead (`pickle_data.py`), and no storage
is touched before its tensor has been seen to lie inside it (`torch_tensors.py`). So both forms are mapped, and an optimizer's
state is never read.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers import listed, shown
from gpt2.checkpoint.containers.mapped_file import MappedFile
from gpt2.checkpoint.containers.pickle_data import Call, ForbiddenName, Pickle, PickleError, read_pickle
from gpt2.checkpoint.containers.torch_tensors import ALLOWED, NotDense, Storage, Strided, describe, kind, storage
from gpt2.config import quoted
from gpt2.errors import CheckpointError

# nanoGPT's ckpt.pt of GPT-2 XL has 200 kB of pickle; some keep every loss of a long run there.
PICKLE_LIMIT = 16_000_000
DIRECTORY_LIMIT = 4_000_000  # of a zip archive, which costs twenty times that in memory
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001  # what a file begins with that `_legacy_save` wrote

WRAPPERS = ("model", "state_dict", "model_state_dict")  # where trainers keep the weights: nanoGPT, Lightning, torch's tutorials
# What a file that is no torch file begins with, what it is then, and what to do.
OTHER_FORMATS = (
    (b"version https://git-lfs", "is a git-lfs pointer, not the file it points to; run `git lfs pull`"),
    (b"<", "is a web page; fetch the file itself"),
    (b"GGUF", "is a GGUF file; name it .gguf"),
    (b"\x89HDF", "is an HDF5 file (Keras); give the PyTorch or safetensors one"),
    (b"\x1f\x8b", "is compressed by gzip; unpack it"),
)


class TorchFile:
    """A file that torch.save wrote, its tensors those of the state dict in it, under the file's own names.

    The state dict may be all of the file or lie under one of ``WRAPPERS``; what else is there (an optimizer, counters) is left
    alone. ``model_args`` is nanoGPT's, where the file has it.

    Raises:
        CheckpointError: damaged, not torch's, asks for code to be run, or holds anything but plain dense tensors.
    """

    kind = "torch.save"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        head = self._file.bytes(0, 32)
        if not head:
            raise self._bad("is empty")
        other = next((what for start, what in OTHER_FORMATS if head.startswith(start)), None)
        if other is not None:
            raise CheckpointError(f"{path}: {other}")
        zipped = head.startswith(b"PK\x03\x04")
        value, self._places = self._from_zip() if zipped else self._from_pickles()
        args = value.get("model_args") if isinstance(value, dict) else None
        self.model_args: Mapping[str, Any] | None = args if _plain(args) else None
        self.entries: Mapping[str, Strided] = self._entries(value)

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; not a whole file of torch.save, fetch it again")

    def _unpickle(self, data: bytes, start: int = 0) -> Pickle:
        try:
            return read_pickle(data, ALLOWED, start)
        except ForbiddenName as error:
            raise CheckpointError(
                f"{self.path}: refused, since loading it would run code: its pickle asks for {shown(error.name)}, and weights "
                "need no code; have their state_dict() saved, or convert the file to safetensors in a sandbox"
            ) from None
        except PickleError as error:
            raise self._bad(str(error)) from None

    # The zip form

    def _from_zip(self) -> tuple[Any, dict[str, tuple[int, int]]]:
        """What the file's pickle describes, and where each storage lies: key -> (start, bytes)."""
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
            raise self._bad(f"has a pickle of {size:,} bytes, and no GPT-2 needs more than {PICKLE_LIMIT:,}")
        data = self._file.bytes(start, size)
        if crc and zlib.crc32(data) != crc:  # 0 is torch's set_crc32_options(False)
            raise self._bad("has a pickle that does not match its checksum")
        value = self._unpickle(data).value
        prefix = f"{root}/data/"
        return value, {name.removeprefix(prefix): row[:2] for name, row in members.items() if name.startswith(prefix)}

    def _members(self) -> dict[str, tuple[int, int, int]]:
        """The archive's directory: name -> (first byte of the data, size, crc), nothing compressed, nothing shared."""
        try:
            archive = zipfile.ZipFile(_Bounded(self._file))
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, OverflowError, struct.error) as error:
            raise self._bad(f"has a zip directory that cannot be read ({str(error)[:80]})") from None
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise CheckpointError(
                f"{self.path}: is a TorchScript program, which would run code; give the state dict it was made from"
            )
        members: dict[str, tuple[int, int, int]] = {}
        end = 0
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            name = info.orig_filename
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
                raise CheckpointError(
                    f"{self.path}: {shown(name)} in it is compressed, which torch.save never does; unpack and save it again"
                )
            if info.header_offset < end:
                raise self._bad(f"has a zip directory that lies about {shown(name)}")
            local = self._file.bytes(info.header_offset, 30)
            start = info.header_offset + 30 + sum(int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
            if not local.startswith(b"PK\x03\x04") or start + info.file_size > archive.start_dir:
                raise self._bad(f"has a zip directory that lies about {shown(name)}")
            if name in members:
                raise self._bad(f"has {shown(name)} twice in its zip directory")
            members[name] = (start, info.file_size, info.CRC)
            end = start + info.file_size
        return members

    # The form before torch 1.6

    def _from_pickles(self) -> tuple[Any, dict[str, tuple[int, int]]]:
        """As :meth:`_from_zip`."""
        data = self._file.bytes(0, PICKLE_LIMIT)
        if not data.startswith((pickle.PROTO, pickle.GLOBAL)):  # GLOBAL begins a pickle of protocol 0, and is to be named
            raise self._bad("is neither a zip archive nor a pickle")
        magic = self._unpickle(data)
        if magic.value != MAGIC:
            raise CheckpointError(f"{self.path}: is a pickle, but not one of torch.save; give a checkpoint")
        version = self._unpickle(data, magic.end)
        if version.value != VERSION:
            raise self._bad(f"is of version {quoted(version.value)}, and torch only ever wrote {VERSION}")
        described = self._unpickle(data, self._unpickle(data, version.end).end)
        keys = self._unpickle(data, described.end)
        try:
            mentioned = [storage(id) for id in described.persistent]
        except PickleError as error:
            raise self._bad(str(error)) from None
        held: dict[str, Storage] = {}
        for one in mentioned:
            if held.setdefault(one.key, one) != one:
                raise self._bad(f"contradicts itself about storage {shown(one.key)}")
        places: dict[str, tuple[int, int]] = {}
        at = keys.end
        for key in keys.value if isinstance(keys.value, list) else []:
            if type(key) is not str or key not in held or key in places:
                raise self._bad(f"lists a storage {quoted(key)} that it does not describe")
            places[key] = (at + 8, held[key].nbytes)
            end = at + 8 + held[key].nbytes
            if end <= self._file.size and self._file.bytes(at, 8) != held[key].count.to_bytes(8, "little"):
                raise self._bad(f"has another size for storage {shown(key)} than it describes")
            at = end
        if at != self._file.size:
            raise self._bad(f"has {self._file.size:,} bytes where its storages end at byte {at:,}")
        return described.value, places

    # What both describe

    def _entries(self, value: Any) -> dict[str, Strided]:
        state = self._state_dict(value)
        others = [str(name) for name, item in state.items() if type(name) is not str or type(item) is not Call]
        if others:
            raise CheckpointError(f"{self.path}: has no tensor at {listed(others)}; save model.state_dict() alone")
        if not state:
            raise CheckpointError(f"{self.path}: holds no tensors; give the file with the weights")
        entries = {}
        for name, item in state.items():
            try:
                entries[name] = describe(item, self._places)
            except NotDense as error:
                raise CheckpointError(f"{self.path}: {shown(name)} is {error}; save it as a plain dense tensor") from None
            except PickleError as error:
                raise self._bad(f"has a tensor {shown(name)} that {error}") from None
        return entries

    def _state_dict(self, value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise CheckpointError(f"{self.path}: holds {kind(value)} where a state dict should be; save model.state_dict()")
        inside = {key: value[key] for key in WRAPPERS if type(value.get(key)) is dict}
        wrapped = [key for key, state in inside.items() if any(type(item) is Call for item in state.values())]
        if len(wrapped) > 1:
            raise CheckpointError(f"{self.path}: has weights under {listed(wrapped)}; save one of them alone")
        return inside[wrapped[0]] if wrapped else value

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        """One tensor on the CPU, as stored or converted to ``dtype``; contiguous, whatever strides it was saved with.

        As stored, it is a view of the mapped file wherever it is contiguous and aligned there (the zip form aligns all).
        """
        entry = self.entries[name]
        if entry.contiguous:
            return self._file.tensor(entry.start, entry.shape, entry.dtype, dtype, mapped=mapped)
        reach = 1 + sum(step * (length - 1) for step, length in zip(entry.stride, entry.shape, strict=True))
        source = self._file.tensor(entry.start, (reach,), entry.dtype, mapped=False)
        tensor = torch.empty(entry.shape, dtype=dtype or entry.dtype)
        return tensor.copy_(source.as_strided(entry.shape, entry.stride))


def _plain(value: Any) -> bool:
    """Whether a value is what nanoGPT keeps as model_args: a few names, each with a number, a flag, a word or nothing."""
    if type(value) is not dict or len(value) > 100:
        return False
    types = all(type(key) is str and type(item) in (str, int, float, bool, type(None)) for key, item in value.items())
    texts = [text for pair in value.items() for text in pair if type(text) is str]
    numbers = [item for item in value.values() if type(item) is int]
    return types and all(len(text) < 1000 for text in texts) and all(abs(number) < 1 << 63 for number in numbers)


class _Bounded:
    """The file as `zipfile` wants it, which reads as much as the archive's end tells it to: no more than a directory may have."""

    def __init__(self, file: MappedFile) -> None:
        self._file, self._at = file, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._file.size)[whence]
        if at < 0:
            raise OSError("before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        count = self._file.size - self._at if count < 0 else count
        if count > DIRECTORY_LIMIT:
            raise zipfile.BadZipFile(f"it claims {count:,} bytes")
        data = self._file.bytes(self._at, count)
        self._at += len(data)
        return data
