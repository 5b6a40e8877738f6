"""OpenAI's TensorFlow checkpoints, read without TensorFlow.

A checkpoint is a *bundle*: ``model.ckpt.index`` says which tensor lies where in ``model.ckpt.data-00000-of-00001`` (and further
shards). The index is a LevelDB table, blocks of sorted keys that leave out what they share with the key before, each block with
a checksum; its values are protobufs (tensorflow: ``core/util/tensor_bundle``, ``core/protobuf/tensor_bundle.proto``,
``core/lib/io/format.cc``). The data files are the tensors' bytes, one after another, each with its checksum in the index.
TensorFlow writes indexes uncompressed since bundles exist, so a compressed one is refused.

Nothing that the files say is believed before it is checked.
"""

from __future__ import annotations

import math
import mmap
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..config import MAX_SIZE, quoted
from ..errors import CheckpointError
from .containers import HEADER_LIMIT, Entry, listed, read_json, shown
from .crc32c import crc32c
from .safetensors_file import OTHER_FORMATS, PIECE

# TensorFlow's numbers of dtypes (core/framework/types.proto), where a torch dtype has the same bytes.
DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}
OTHER_DTYPES = {7: "text", 8: "complex numbers", 18: "complex numbers", 20: "a resource", 21: "a variant"}
MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER = 48
TRAILER = 5  # after each block: its compression, and the checksum of block and compression
# gpt2-xl with Adam's moments has 1,743 tensors with names of at most 40 letters.
MAX_ENTRIES, MAX_NAME, MAX_SHARDS = 50_000, 512, 1_000
HPARAMS = ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer")


@dataclass(frozen=True)
class Span(Entry):
    """Where a tensor lies: in data file ``shard``, from byte ``start`` to ``end``; ``kind`` is TensorFlow's dtype."""

    kind: int
    shard: int
    start: int
    end: int
    crc32c: int


class TensorBundle:
    """The checkpoint ``prefix.index`` with its ``prefix.data-*`` files, under TensorFlow's names and shapes.

    What torch has no dtype for (text, above all) is entered as its bytes, uint8, and refused when it is read.

    Raises:
        CheckpointError: the index is damaged or lies, a data file is missing or short, or a variable is partitioned.
    """

    def __init__(self, prefix: Path) -> None:
        self.path = prefix.with_name(f"{prefix.name}.index")
        pairs = self._table(self._index())
        key, header = next(pairs, (b"", b""))
        if key or not header:
            raise self._bad("has no header entry")
        shards = self._header(header)
        self.entries: dict[str, Span] = {}
        for key, value in pairs:
            if len(self.entries) == MAX_ENTRIES:
                raise self._bad(f"lists more than {MAX_ENTRIES:,} tensors")
            name = self._name(key)
            self.entries[name] = self._entry(name, value, shards)
        self._data = self._open(prefix, shards)

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}; not a whole TensorFlow index, fetch the checkpoint again")

    def _index(self) -> bytes:
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                data = file.read(HEADER_LIMIT + 1)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read ({error.strerror}); check that it is there, and yours to read"
            ) from None
        if not data.endswith(MAGIC) or len(data) < FOOTER:
            other = next((what for start, what in OTHER_FORMATS if data.startswith(start)), None)
            if other is not None:
                raise CheckpointError(f"{self.path}: {other}")
            if size > HEADER_LIMIT:
                raise self._bad(f"is {size:,} bytes long, and no GPT-2 needs more than {HEADER_LIMIT:,}")
            raise self._bad("does not end as an index does" if data else "is empty")
        return data

    # -- the table ---------------------------------------------------------------------------------------------------

    def _table(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values, in strictly ascending order of the keys."""
        footer = data[-FOOTER : -len(MAGIC)]
        meta_at, meta_size, at = *self._varints(footer, 0, 2)[:2], self._varints(footer, 0, 2)[2]
        index_at, index_size, _ = self._varints(footer, at, 2)
        self._block(data, meta_at, meta_size)
        end, last = 0, None
        for bound, handle in self._pairs(self._block(data, index_at, index_size)):
            start, size, _ = self._varints(handle, 0, 2)
            if start < end:
                raise self._bad("has blocks that overlap")
            for key, value in self._pairs(self._block(data, start, size)):
                if last is not None and key <= last:
                    raise self._bad("has keys that are not in order")
                yield key, value
                last = key
            if last is not None and last > bound:
                raise self._bad("has keys that are not in order")
            end = start + size + TRAILER

    def _block(self, data: bytes, start: int, size: int) -> bytes:
        if start + size + TRAILER > len(data) - FOOTER:
            raise self._bad(f"names a block of {size:,} bytes at {start:,} and has {len(data):,} in all")
        block, trailer = data[start : start + size + 1], data[start + size + 1 : start + size + TRAILER]
        if _masked(crc32c(block)) != int.from_bytes(trailer, "little"):
            raise self._bad(f"is damaged: the checksum of its block at byte {start:,} does not fit")
        if block[-1]:
            raise CheckpointError(f"{self.path}: is compressed, which TensorFlow never writes; save the checkpoint with it anew")
        return block[:-1]

    def _pairs(self, block: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The entries of a block: how much of the key before is kept, how much is new, the value's length; new key, value."""
        restarts = int.from_bytes(block[-4:], "little")
        end = len(block) - 4 * (restarts + 1)
        if end < 0:
            raise self._bad("has a block too short for its restarts")
        key, at = b"", 0
        while at < end:
            shared, new, length, at = self._varints(block, at, 3)
            if shared > len(key) or at + new + length > end:
                raise self._bad("has a block with an entry past its end")
            if shared + new > MAX_NAME:
                raise self._bad(f"has a name of {shared + new:,} bytes")
            key = key[:shared] + block[at : at + new]
            yield key, block[at + new : at + new + length]
            at += new + length

    def _varints(self, data: bytes, at: int, count: int) -> tuple[int, ...]:
        """``count`` numbers, and where the next byte is."""
        numbers = []
        for _ in range(count):
            number = 0
            for shift in range(0, 70, 7):
                if at >= len(data):
                    raise self._bad("ends within a number")
                byte = data[at]
                at += 1
                number |= (byte & 127) << shift
                if byte < 128:
                    break
            if byte > 127 or number >> 64:
                raise self._bad("has a number of more than 64 bits")
            numbers.append(number)
        return *numbers, at

    # -- the protobufs -----------------------------------------------------------------------------------------------

    def _fields(self, message: bytes) -> Iterator[tuple[int, int | bytes]]:
        """Number and value of each field of a protobuf."""
        at = 0
        while at < len(message):
            tag, at = self._varints(message, at, 1)
            wire = tag & 7
            if wire == 0:
                value, at = self._varints(message, at, 1)
                yield tag >> 3, value
                continue
            if wire == 2:
                length, at = self._varints(message, at, 1)
            elif wire in (1, 5):
                length = 8 if wire == 1 else 4
            else:
                raise self._bad("has an entry that is no protobuf")
            if at + length > len(message):
                raise self._bad("has an entry cut short")
            value = message[at : at + length]
            yield tag >> 3, value if wire == 2 else int.from_bytes(value, "little")
            at += length

    def _record(self, message: bytes, numbers: set[int], messages: set[int]) -> dict[int, int | bytes]:
        """The fields that we know, each at most once and of its type."""
        record: dict[int, int | bytes] = {}
        for field, value in self._fields(message):
            if field in numbers | messages:
                if field in record or isinstance(value, bytes) != (field in messages):
                    raise self._bad("has an entry that contradicts itself")
                record[field] = value
        return record

    def _header(self, message: bytes) -> int:
        """The number of data files (BundleHeaderProto)."""
        header = self._record(message, {1, 2}, {3})
        if header.get(2, 0):
            raise CheckpointError(f"{self.path}: was written on a big-endian machine; convert it there to safetensors")
        version = self._record(header.get(3, b""), {1, 2}, set())
        if version.get(2, 0) > 1:
            raise CheckpointError(f"{self.path}: asks for a newer reader (version {version[2]}); save it with TensorFlow 1 or 2")
        shards = header.get(1, 0)
        if not 1 <= shards <= MAX_SHARDS:
            raise self._bad(f"claims {shards:,} data files")
        return shards

    def _name(self, key: bytes) -> str:
        if key.startswith(b"\0"):
            raise self._partitioned("some variables")
        try:
            return key.decode("utf-8")
        except UnicodeDecodeError:
            raise self._bad(f"has a name that is no text ({quoted(key)})") from None

    def _partitioned(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what} are stored in slices; save the checkpoint without a partitioner")

    def _entry(self, name: str, message: bytes, shards: int) -> Span:
        """One tensor (BundleEntryProto)."""
        slices = [value for field, value in self._fields(message) if field == 7]
        if slices:
            raise self._partitioned(f"{shown(name)} and perhaps others")
        entry = self._record(message, {1, 3, 4, 5, 6}, {2})
        kind, shard, start, size = (entry.get(field, 0) for field in (1, 3, 4, 5))
        shape = self._shape(entry.get(2, b""))
        if shard >= shards or max(start, size, *shape, 0) >= 1 << 48:
            raise self._bad(f"contradicts itself about {shown(name)}: {size:,} bytes at {start:,} of data file {shard}")
        dtype = DTYPES.get(kind)
        if dtype is None:
            return Span(torch.uint8, (size,), kind, shard, start, start + size, entry.get(6, 0))
        if math.prod(shape) * dtype.itemsize != size:
            claim = f"{dtype} {list(shape)} in {size:,} bytes".removeprefix("torch.")
            raise self._bad(f"contradicts itself about {shown(name)}: {claim}")
        return Span(dtype, shape, kind, shard, start, start + size, entry.get(6, 0))

    def _shape(self, message: bytes) -> tuple[int, ...]:
        """TensorShapeProto."""
        shape = []
        for field, value in self._fields(message):
            if field == 2 and isinstance(value, bytes):
                shape.append(self._record(value, {1}, set()).get(1, 0))
            elif field in (2, 3) and value:
                raise self._bad("has a tensor of unknown shape")
        if len(shape) > 8:
            raise self._bad(f"has a tensor of {len(shape):,} dimensions")
        return tuple(shape)

    # -- the data ----------------------------------------------------------------------------------------------------

    def _open(self, prefix: Path, shards: int) -> dict[int, _DataFile]:
        needed: dict[int, list[tuple[int, int, str]]] = {}
        for name, entry in self.entries.items():
            needed.setdefault(entry.shard, []).append((entry.start, entry.end, name))
        files = {}
        for shard, spans in sorted(needed.items()):
            files[shard] = _DataFile(prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}"))
            end = 0
            for start, stop, name in sorted(spans):
                if start < end:
                    raise self._bad(f"lets {shown(name)} overlap the tensor before it")
                end = stop
            files[shard].holds(end)
        return files

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        """One tensor on the CPU, as stored or converted to ``dtype``; its checksum is verified.

        As stored, it is a view of the mapped file, private to this process when written to, unless the data is not aligned or
        ``mapped`` is false: then it is read into memory of its own. A conversion goes piece by piece, so that the source is
        never in memory as a whole.
        """
        entry = self.entries[name]
        if entry.kind not in DTYPES:
            what = OTHER_DTYPES.get(entry.kind, f"of TensorFlow's dtype {entry.kind}")
            raise CheckpointError(f"{self.path}: {shown(name)} is {what}, not a weight; leave it out")
        return self._data[entry.shard].read(name, entry, dtype or entry.dtype, mapped)


class _DataFile:
    """One ``.data-*`` file, open, and mapped when first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by the finalizer
            weakref.finalize(self, self._file.close)
            self.size = self._file.seek(0, 2)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); fetch it too, beside its .index") from None

    def holds(self, end: int) -> None:
        """See that the file is at least ``end`` bytes long."""
        if self.size >= end:
            return
        self._file.seek(0)
        head = self._file.read(32)
        other = next((what for start, what in OTHER_FORMATS if head.startswith(start)), None)
        raise CheckpointError(f"{self.path}: {other or f'is cut short: {self.size:,} bytes of {end:,}; fetch it again'}")

    @cached_property
    def _mapping(self) -> mmap.mmap | None:
        """The file, copied on write: what is written stays in this process. None where it cannot be mapped."""
        try:
            return mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError):
            return None

    @cached_property
    def _scratch(self) -> Tensor:
        """One for all conversions: a new one for each leaves holes in malloc's heap."""
        return torch.empty(PIECE, dtype=torch.uint8)

    def read(self, name: str, entry: Span, dtype: torch.dtype, mapped: bool) -> Tensor:
        count = math.prod(entry.shape)
        if mapped and count and entry.start % entry.dtype.itemsize == 0 and dtype == entry.dtype and self._mapping is not None:
            return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=entry.start).view(entry.shape)
        tensor = torch.empty(entry.shape, dtype=dtype)
        flat = tensor.view(-1)
        self._file.seek(entry.start)
        if dtype == entry.dtype:
            self._fill(flat)
        else:
            piece = self._scratch.view(entry.dtype)
            for start in range(0, count, len(piece)):
                part = piece[: count - start]
                self._fill(part)
                flat[start : start + len(piece)] = part
        return tensor

    def _fill(self, flat: Tensor) -> None:
        """Read from where the file stands until ``flat`` is full."""
        room = memoryview(flat.view(torch.uint8).numpy())
        while room:
            try:
                count = self._file.readinto(room)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error.strerror}); check its disk") from None
            if not count:
                raise CheckpointError(f"{self.path}: was cut short while it was read; fetch it again")
            room = room[count:]


def _masked(crc: int) -> int:
    """How TensorFlow stores a checksum (``core/lib/hash/crc32c.h``), lest one be taken over data that holds one."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def checkpoint_prefix(directory: Path) -> Path | None:
    """The prefix of the checkpoint in a directory, None where there is none.

    It is the one that TensorFlow's ``checkpoint`` file names, of whose path, often another machine's, only the last part
    counts; without that file, the only ``.index``.

    Raises:
        CheckpointError: the file names one that is not there, is damaged, or is absent beside more than one ``.index``.
    """
    state = directory / "checkpoint"
    try:
        found = sorted(entry.name for entry in directory.iterdir() if entry.name.endswith(".index") and entry.is_file())
        text = None
        if state.is_file():
            with open(state, "rb") as file:
                text = file.read(HEADER_LIMIT)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error.strerror}); check that it is yours to read") from None
    if text is not None:
        line = re.search(rb'^model_checkpoint_path:[ \t]*"((?:[^"\\\r\n]|\\.)*)"', text, re.MULTILINE)
        if line is not None:
            name = _unescaped(line[1]).replace("\\", "/").rsplit("/", 1)[-1]
            if f"{name}.index" not in found:
                raise CheckpointError(f"{state}: names {shown(name)}, and no {shown(name + '.index')} is there; fetch it too")
            return directory / name
        if found:
            raise CheckpointError(f"{state}: names no checkpoint; fetch it again, or remove it and keep one .index")
    if len(found) > 1:
        raise CheckpointError(f"{directory}: holds {listed(found)} and no file `checkpoint` that names one; keep one")
    return directory / found[0].removesuffix(".index") if found else None


_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _unescaped(text: bytes) -> str:
    """A string of a protobuf's text form: there a byte that is not ASCII is three octal digits."""

    def byte(escape: re.Match[bytes]) -> bytes:
        code = escape[1]
        return bytes([int(code, 8) & 255]) if code.isdigit() else _ESCAPES.get(code, code)

    return re.sub(rb"\\([0-7]{1,3}|.)", byte, text).decode("utf-8", "replace")


def read_hparams(path: Path) -> dict[str, int]:
    """OpenAI's ``hparams.json``: n_vocab, n_ctx, n_embd, n_head, n_layer, and nothing else.

    Raises:
        CheckpointError: one is missing, is not a size, or something else is there, which might change the model.
    """
    content = read_json(path)
    missing = [name for name in HPARAMS if name not in content]
    if missing:
        raise CheckpointError(f"{path}: lacks {listed(missing)}; fetch it again")
    unknown = sorted(name for name in content if name not in HPARAMS)
    if unknown:
        raise CheckpointError(f"{path}: has {listed(unknown)}, which OpenAI's GPT-2 has not; remove what changes nothing")
    for name, value in content.items():
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise CheckpointError(f"{path}: {name} is {quoted(value)}, not a size; fetch it again")
    return content
