"""What `torch.save` writes, read without `torch.load`.

Two forms. Since torch 1.6 (2020) a zip archive, nothing in it compressed: a pickle `data.pkl` that describes the tensors, and
`data/0`, `data/1`, ... their storages (torch/serialization.py, `_save`). Before, and in the official gpt2's own
`pytorch_model.bin`, five pickles in a row (a magic number, a version, facts about the machine, the tensors' description, the
storages' keys) and then the storages, each behind its length (`_legacy_save`).

In either the description is a pickle, and a pickle can run code. It is read as data instead (`pickle_data.py`), and no storage
is touched before its tensor has been seen to lie inside it. So both forms are mapped, and an optimizer's state is never read.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import quoted
from ..errors import CheckpointError
from .containers import Entry, listed, shown
from .mapped_file import MappedFile
from .pickle_data import Call, ForbiddenName, Name, Persistent, Pickle, PickleError, read_pickle
from .safetensors_file import DTYPES

# nanoGPT's ckpt.pt of GPT-2 XL has 600 kB of pickle; some keep every loss of a long run there.
PICKLE_LIMIT = 16_000_000
DIRECTORY_LIMIT = 4_000_000  # of a zip archive, which costs twenty times that in memory
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001  # what a file begins with that `_legacy_save` wrote

STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.QInt8Storage": torch.qint8,
    "torch.QUInt8Storage": torch.quint8,
    "torch.QInt32Storage": torch.qint32,
    "torch.QUInt4x2Storage": torch.quint4x2,
    "torch.QUInt2x4Storage": torch.quint2x4,
    "torch.storage.UntypedStorage": torch.uint8,
}
REBUILD = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
WRAPPED = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
# Tensors that are no plain array, and what they are.
OTHER_TENSORS = {
    "torch._utils._rebuild_qtensor": "quantised",
    "torch._utils._rebuild_sparse_tensor": "sparse",
    "torch._utils._rebuild_nested_tensor": "nested",
    "torch._utils._rebuild_meta_tensor_no_storage": "on the meta device, without data",
    "torch._utils._rebuild_wrapper_subclass": "of a tensor class of its own",
    "torch._utils._rebuild_device_tensor_from_numpy": "a copy from a device without storages",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a copy from a device without storages",
}
TYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# Every name that a pickle of weights may mention: what torch's own weights_only allows, since none of it is ever called.
ALLOWED = frozenset(
    [
        "collections.OrderedDict",
        "collections.Counter",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.set",
        "builtins.complex",
        "torch.storage.TypedStorage",
        FROM_TYPE,
        *REBUILD,
        *WRAPPED,
        *OTHER_TENSORS,
        *STORAGES,
        *(name.replace("torch.", "torch.cuda.", 1) for name in STORAGES),
        *TYPES,
        *(str(value) for value in vars(torch).values() if isinstance(value, torch.qscheme)),
    ]
)
WRAPPERS = ("model", "state_dict", "model_state_dict")  # where trainers keep the weights: nanoGPT, Lightning, torch's tutorials
# What a file that is no torch file begins with, what it is then, and what to do.
OTHER_FORMATS = (
    (b"version https://git-lfs", "is a git-lfs pointer, not the file it points to; run `git lfs pull`"),
    (b"<", "is a web page; fetch the file itself"),
    (b"GGUF", "is a GGUF file; name it .gguf"),
    (b"\x89HDF", "is an HDF5 file (Keras); give the PyTorch or safetensors one"),
    (b"\x1f\x8b", "is compressed by gzip; unpack it"),
)


@dataclass(frozen=True)
class Strided(Entry):
    """A tensor whose first element lies at byte ``start`` of the file; ``stride`` in elements."""

    start: int
    stride: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        wanted = 1
        for length, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and step != wanted:
                return not math.prod(self.shape)
            wanted *= length
        return True


class TorchFile:
    """A file that torch.save wrote, its tensors those of the state dict in it, under the file's own names.

    The state dict may be all of the file or lie under one of ``WRAPPERS``; what else is there (an optimizer, counters) is left
    alone. ``model_args`` is nanoGPT's, where the file has it.

    Raises:
        CheckpointError: damaged, not torch's, asks for code to be run, or holds anything but plain dense tensors.
    """

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
        value, self._storages = self._from_zip() if zipped else self._from_pickles()
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
                f"{self.path}: refused, since loading it would run code: its pickle asks for {quoted(error.name)}, and weights "
                "need no code; ask for them as safetensors, or convert it in a sandbox"
            ) from None
        except PickleError as error:
            raise self._bad(str(error)) from None

    # The zip form

    def _from_zip(self) -> tuple[Any, dict[str, tuple[int, int]]]:
        """What the file's pickle describes, and where each storage lies: key -> (start, bytes)."""
        members = self._members()
        roots = [name.removesuffix("/data.pkl") for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in members):
            raise CheckpointError(
                f"{self.path}: is a TorchScript program, which would run code; give the state dict it was made from"
            )
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
        storages = {name.removeprefix(prefix): row[:2] for name, row in members.items() if name.startswith(prefix)}
        return value, storages

    def _members(self) -> dict[str, tuple[int, int, int]]:
        """The archive's directory: name -> (first byte of the data, size, crc), nothing compressed, nothing shared."""
        try:
            archive = zipfile.ZipFile(_Bounded(self._file))
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, OverflowError) as error:
            raise self._bad(f"has a zip directory that cannot be read ({str(error)[:80]})") from None
        members: dict[str, tuple[int, int, int]] = {}
        end = 0
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            name = info.orig_filename
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
                raise CheckpointError(
                    f"{self.path}: {shown(name)} in it is compressed, which torch.save never does; unpack and save it again"
                )
            local = self._file.bytes(info.header_offset, 30)
            lengths = (int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
            start = info.header_offset + 30 + sum(lengths)
            if info.header_offset < end or not local.startswith(b"PK\x03\x04") or start + info.file_size > archive.start_dir:
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
        magic = self._unpickle(data)
        if magic.value != MAGIC:
            raise CheckpointError(f"{self.path}: is a pickle, but not one of torch.save; give a checkpoint")
        version = self._unpickle(data, magic.end)
        if version.value != VERSION:
            raise self._bad(f"is of version {quoted(version.value)}, and torch only ever wrote {VERSION}")
        described = self._unpickle(data, self._unpickle(data, version.end).end)
        keys = self._unpickle(data, described.end)
        sizes: dict[str, tuple[int, int]] = {}
        for id in described.persistent:
            dtype, key, count = self._storage(id)
            if sizes.setdefault(key, (count, dtype.itemsize)) != (count, dtype.itemsize):
                raise self._bad(f"contradicts itself about storage {shown(key)}")
        storages: dict[str, tuple[int, int]] = {}
        at = keys.end
        for key in keys.value if isinstance(keys.value, list) else []:
            if not isinstance(key, str) or key not in sizes or key in storages:
                raise self._bad(f"lists a storage {quoted(key)} that it does not describe")
            count, width = sizes[key]
            if self._file.bytes(at, 8) != count.to_bytes(8, "little"):
                raise self._bad(f"has another size for storage {shown(key)} than it describes")
            storages[key] = (at + 8, count * width)
            at += 8 + count * width
        if at != self._file.size:
            raise self._bad(f"has {self._file.size:,} bytes where its storages end at {at:,}")
        return described.value, storages

    # What both describe

    def _entries(self, value: Any) -> dict[str, Strided]:
        state = self._state_dict(value)
        others = [str(name) for name, item in state.items() if type(name) is not str or type(item) is not Call]
        if others:
            raise CheckpointError(f"{self.path}: has no tensor at {listed(others)}; save model.state_dict() alone")
        if not state:
            raise CheckpointError(f"{self.path}: holds no tensors; give the file with the weights")
        return {name: self._entry(name, item) for name, item in state.items()}

    def _state_dict(self, value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise CheckpointError(f"{self.path}: holds {_kind(value)} where a state dict should be; save model.state_dict()")
        inside = [value.get(key) for key in WRAPPERS]
        wrapped = [state for state in inside if type(state) is dict and any(type(item) is Call for item in state.values())]
        if len(wrapped) > 1:
            raise CheckpointError(
                f"{self.path}: has weights under more than one of {listed([*WRAPPERS])}; save one of them alone"
            )
        return wrapped[0] if wrapped else value

    def _storage(self, id: Any) -> tuple[torch.dtype, str, int]:
        """A storage's dtype, key and number of elements, as a pickle mentions it."""
        # ("storage", class, key, device, elements), and in the old form None, where a view of another storage once was.
        if type(id) is not tuple or len(id) not in (5, 6) or id[0] != "storage" or id[5:] not in ((), (None,)):
            raise self._bad(f"has {quoted(id)} where a storage should be")
        _, kind, key, _, count = id[:5]
        dtype = STORAGES.get(kind.name.replace("torch.cuda.", "torch.", 1)) if type(kind) is Name else None
        if dtype is None or type(key) is not str or type(count) is not int or not 0 <= count < 1 << 48:
            raise self._bad(f"has {quoted(id)} where a storage should be")
        return dtype, key, count

    def _entry(self, name: str, call: Call) -> Strided:
        for _ in range(4):  # a parameter of a tensor with attributes, at the most
            if call.name in WRAPPED and call.args and type(call.args[0]) is Call:
                call = call.args[0]
            elif call.name == FROM_TYPE and len(call.args) == 4 and _are(call.args, (Name, Name, tuple)):
                call = Call(call.args[0].name, call.args[2])
        if call.name not in REBUILD:
            what = OTHER_TENSORS.get(call.name, "no tensor")
            raise CheckpointError(f"{self.path}: {shown(name)} is {what}; save it as a plain dense tensor")
        storage, start, shape, stride, *rest = (*call.args, None, None, None, None)[: max(len(call.args), 4)]
        whole = _are((storage, start, shape, stride), (Persistent, int, tuple, tuple)) and all(
            type(n) is int and 0 <= n < 1 << 48 for n in (start, *shape, *stride)
        )
        if not whole or len(shape) != len(stride) or len(shape) > 8:
            raise self._bad(f"describes {shown(name)} in a way that makes no sense")
        stored, key, count = self._storage(storage.id)
        dtype = stored
        if call.name == REBUILD[2]:
            kind = rest[2] if len(rest) > 2 else None
            dtype = TYPES.get(kind.name) if type(kind) is Name else None
        if dtype not in DTYPES.values():
            known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES.values())
            raise CheckpointError(f"{self.path}: {shown(name)} has dtype {dtype}; convert it to one of {known}")
        if any(type(extra) is dict and any(extra.values()) for extra in rest[2:]):
            raise CheckpointError(f"{self.path}: {shown(name)} is a negated or conjugated view; save it as a plain dense tensor")
        first, size = self._storages.get(key, (0, -1))
        if size != count * stored.itemsize:
            raise self._bad(f"has no data of {count * stored.itemsize:,} bytes for {shown(name)}")
        if math.prod(shape):
            reach = 0  # the furthest element, counted from the first
            for step, length in sorted(pair for pair in zip(stride, shape, strict=True) if pair[1] > 1):
                if step <= reach:
                    more = "uses elements more than once (expand)"
                    raise CheckpointError(f"{self.path}: {shown(name)} {more}; save it as a plain dense tensor")
                reach += step * (length - 1)
            if (start + reach + 1) * dtype.itemsize > size:
                raise self._bad(f"describes {shown(name)} as reaching beyond its data")
        return Strided(dtype, shape, first + start * dtype.itemsize, stride)

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


def _are(values: Sequence[Any], types: Sequence[type]) -> bool:
    return all(type(value) is kind for value, kind in zip(values, types, strict=False))


def _kind(value: Any) -> str:
    if type(value) is Call:
        return "a single tensor" if value.name in (*REBUILD, *WRAPPED, *OTHER_TENSORS) else f"a call of {value.name}"
    return f"a {type(value).__name__}"


def _plain(value: Any) -> bool:
    """Whether a value is what nanoGPT keeps as model_args: a few names, each with a number, a flag, a word or nothing."""
    if type(value) is not dict or len(value) > 100:
        return False
    plain = all(type(key) is str and type(item) in (str, int, float, bool, type(None)) for key, item in value.items())
    return plain and all(len(str(text)) < 1000 for pair in value.items() for text in pair)


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
