"""Read OpenAI's TensorFlow checkpoints without TensorFlow.

A checkpoint is a *bundle*: ``model.ckpt.index``, a table from names to protobufs, says where each tensor lies in
``model.ckpt.data-00000-of-00001``, with a checksum (tensorflow, ``core/util/tensor_bundle``,
``core/protobuf/tensor_bundle.proto``). ``checkpoint`` names the bundle; ``hparams.json`` is OpenAI's; ``.meta`` is not read.

The table is LevelDB's: sorted keys and values in blocks with checksums. It has data blocks, a meta block (not read), an index
block, and a footer of 48 bytes that locates these two (google/leveldb, doc/table_format.md; ``core/lib/io/format.cc``). Each
entry omits the prefix that its key shares with the key before, except at *restarts*, where a search can begin.

The files are untrusted: blocks must follow each other and keys rise, so no byte is read twice and no key occurs twice.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint import containers
from gpt2.checkpoint.containers import Container, Damaged, Entry, MappedFile, Refused, countable, refuse_other_format, shown
from gpt2.config import quoted
from gpt2.data.files import reading
from gpt2.errors import CheckpointError

# TensorFlow's dtype numbers (core/framework/types.proto) of weights and counters.
DTYPES = {1: torch.float32, 3: torch.int32, 9: torch.int64, 14: torch.bfloat16, 19: torch.float16}
# The fields that we read of each message, and their encoding: varint, four bytes, or length and bytes.
VARINT, BYTES, FIXED32 = 0, 2, 5
HEADER = {1: VARINT, 2: VARINT}  # num_shards, endianness
SLICES, IN_SLICES = 7, "%s is stored in slices; save the checkpoint without a partitioner"
# dtype, shape, shard_id, offset, size, crc32c, slices
ENTRY = {1: VARINT, 2: BYTES, 3: VARINT, 4: VARINT, 5: VARINT, 6: FIXED32, SLICES: BYTES}
SHAPE_DIM, SHAPE_UNKNOWN, DIM = 2, 3, {1: VARINT}
INDEX_LIMIT = 500_000  # bytes; gpt2-xl with Adam's moments, 1,743 tensors, has 75 kB
PIECE = 1 << 23  # bytes per checksum step
# Of the table.
MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER = 48
TRAILER = 5  # after a block: a byte for its compression, and a checksum of both
MAX_KEY = 512  # bytes; shared prefixes can make keys far larger than the file


@dataclass(frozen=True)
class BundleEntry(Entry):
    """A tensor in the data file; ``kind`` is TensorFlow's dtype number."""

    kind: int
    checksum: int


class TensorBundle(Container):
    """The checkpoint ``prefix.index`` with its data file, with TensorFlow's names and shapes.

    A tensor of a type that weights have not is listed as uint8 and refused on reading. Several data files, slices and big-endian
    order, which OpenAI's have not, are refused at once.
    """

    kind = "TensorFlow"
    entries: Mapping[str, BundleEntry]

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._checked: set[str] = set()
        super().__init__(prefix.with_name(f"{prefix.name}.index"))

    def _directory(self) -> dict[str, BundleEntry]:
        refuse_other_format(self._file)
        if self._file.size > INDEX_LIMIT:
            raise Damaged(f"is {self._file.size:,} bytes long, and no GPT-2 needs more than {INDEX_LIMIT:,}")
        table = _pairs(self._file.bytes(0, INDEX_LIMIT))
        key, message = next(table, (None, b""))
        if key != b"":
            raise Damaged("has no header entry")
        header = _record(message, HEADER)
        shards = header.get(1, 0)
        if header.get(2, 0):
            raise Refused("is in big-endian byte order; convert the checkpoint to safetensors where it was made")
        if shards != 1:
            raise Refused(f"claims {shards:,} data files, and OpenAI's have one; save the checkpoint in one")
        entries: dict[str, BundleEntry] = {}
        for key, value in table:
            name = _name(key)
            entries[name] = _entry(name, value)
        self._data = MappedFile(self._prefix.with_name(f"{self._prefix.name}.data-00000-of-00001"))
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start < end:
                raise Refused(f"{shown(name)} overlaps the tensor before it; fetch the checkpoint again")
            if (end := entry.end) > self._data.size:
                refuse_other_format(self._data)
                raise CheckpointError(f"{self._data.path}: is cut short: {self._data.size:,} bytes; fetch it again")
        return entries

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        """Read as :meth:`Container.read`; verify a tensor's checksum on first use."""
        import google_crc32c  # without its C library it warns; that concerns TensorFlow's files alone

        entry = self.entries[name]
        if entry.kind not in DTYPES:
            what = f"{shown(name)} is of TensorFlow's dtype {entry.kind}, which is not a weight's"
            raise CheckpointError(f"{self.path}: {what}; save the checkpoint without it")
        file = self._data
        crc, at = 0, entry.start
        while name not in self._checked and at < entry.end:
            if not (piece := file.bytes(at, min(PIECE, entry.end - at))):
                raise CheckpointError(f"{file.path}: was cut short while it was read; fetch it again")
            crc, at = google_crc32c.extend(crc, piece), at + len(piece)
        if name not in self._checked and _masked(crc) != entry.checksum:
            raise CheckpointError(f"{file.path}: {shown(name)} is damaged, its checksum does not fit; fetch the file again")
        self._checked.add(name)
        return file.tensor(entry.start, entry.shape, entry.dtype, dtype, mapped=mapped)


def _name(key: bytes) -> str:
    if key.startswith(b"\0"):  # of a slice: zero, variable, zero, where in it
        raise Refused(IN_SLICES % shown(key.split(b"\0")[1].decode(errors="replace")))
    if not key.isascii():
        raise Damaged(f"has a name that is not ASCII, {quoted(key)}")
    return key.decode()


def _entry(name: str, message: bytes) -> BundleEntry:
    """Parse one tensor (BundleEntryProto)."""
    entry = _record(message, ENTRY)
    if SLICES in entry:
        raise Refused(IN_SLICES % shown(name))
    kind, shard, start, size, checksum = (entry.get(field, 0) for field in (1, 3, 4, 5, 6))
    shape = _shape(entry.get(2, b""))
    if shard or max(start, size) >= 1 << 48 or not countable(shape):
        raise Damaged(f"contradicts itself about {shown(name)}: {size:,} bytes at {start:,} of data file {shard:,}")
    if kind not in DTYPES:
        return BundleEntry(torch.uint8, (size,), start, kind, checksum)
    stored = BundleEntry(DTYPES[kind], shape, start, kind, checksum)
    if stored.end != start + size:
        claim = f"{stored.dtype} {list(shape)}".removeprefix("torch.")
        raise Damaged(f"contradicts itself about {shown(name)}: {claim} in {size:,} bytes")
    return stored


def _fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yield number, wire type and value of each field."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        field, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = _varint(message, at)
            yield field, wire, value
            continue
        if wire == BYTES:
            length, at = _varint(message, at)
        elif wire in (1, FIXED32):
            length = 4 if wire == FIXED32 else 8
        else:
            raise Damaged("has an entry that is not a protobuf")
        if at + length > len(message):
            raise Damaged("has an entry that is cut short")
        data = message[at : at + length]
        yield field, wire, data if wire == BYTES else int.from_bytes(data, "little")
        at += length


def _record(message: bytes, kinds: Mapping[int, int]) -> dict[int, Any]:
    """Parse the fields in ``kinds``, each of its wire type and at most once; an absent one is 0 or nothing."""
    record: dict[int, Any] = {}
    for field, wire, value in _fields(message):
        if field in kinds:
            if field in record or wire != kinds[field]:
                raise Damaged("has an entry that contradicts itself")
            record[field] = value
    return record


def _shape(message: bytes) -> tuple[int, ...]:
    """Parse a TensorShapeProto."""
    shape: list[int] = []
    for field, wire, value in _fields(message):
        if field == SHAPE_UNKNOWN and value:
            raise Damaged("has a tensor of unknown shape")
        if field == SHAPE_DIM:
            if wire != BYTES or len(shape) == 8:
                raise Damaged("has a tensor of impossible shape")
            shape.append(_record(value, DIM).get(1, 0))
    return tuple(shape)


def checkpoint_prefix(directory: Path) -> Path | None:
    """Return the prefix of a directory's checkpoint, or None. Raises CheckpointError: the named one is missing, or several."""
    state, text = directory / "checkpoint", b""
    with reading(directory, "check that it is yours to read", CheckpointError):
        there = sorted(entry.name for entry in directory.iterdir() if not entry.is_dir())
    indexes = [name for name in there if name.endswith(".index")]
    if state.name in there:
        text = MappedFile(state).bytes(0, containers.HEADER_LIMIT)
    line = re.search(rb'^model_checkpoint_path:[ \t]*"((?:[^"\\\r\n]|\\.)*+)"', text, re.MULTILINE)
    if line is not None:
        name = re.split(r"[/\\]", line[1].decode("utf-8", "replace"))[-1]
        if f"{name}.index" in indexes:
            return directory / name
        raise CheckpointError(f"{state}: names {shown(name)}, and no {shown(f'{name}.index')} is there; fetch it too")
    if indexes and text:
        raise CheckpointError(f"{state}: names no checkpoint; fetch it again, or remove it")
    if len(indexes) > 1:
        raise CheckpointError(f"{directory}: holds {containers.listed(indexes)}, and no file checkpoint says which; give one")
    return directory / indexes[0].removesuffix(".index") if indexes else None


def _pairs(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield every key and value, keys strictly rising. Raises Damaged, at the latest at the table's end."""
    if len(data) < FOOTER or not data.endswith(MAGIC):
        raise Damaged("does not end as an index does")
    footer = data[-FOOTER:]
    _, _, at = _handle(footer, 0)  # the meta block
    start, size, _ = _handle(footer, at)
    end, last = 0, None
    for _, handle in _entries(_block(data, start, size)):
        start, size, _ = _handle(handle, 0)
        if start < end:
            raise Damaged("has blocks that overlap")
        for key, value in _entries(_block(data, start, size)):
            if last is not None and key <= last:
                raise Damaged("has keys that are not in order")
            yield key, value
            last = key
        end = start + size + TRAILER


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned number, seven bits per byte, lowest first; return it and the next offset."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise Damaged("ends within a number")
        byte, at = data[at], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            break
    if byte > 127 or number >> 64:
        raise Damaged("has a number of more than 64 bits")
    return number, at


def _masked(crc: int) -> int:
    """Return a checksum in its stored form (``core/lib/hash/crc32c.h``)."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _handle(data: bytes, at: int) -> tuple[int, int, int]:
    """Return a block's offset and size, and the next offset."""
    start, at = _varint(data, at)
    size, at = _varint(data, at)
    return start, size, at


def _block(data: bytes, start: int, size: int) -> bytes:
    import google_crc32c

    end = start + size + TRAILER
    if end > len(data) - FOOTER:
        raise Damaged(f"names a block up to byte {end:,} and has {len(data):,}")
    block, (compression, crc) = data[start : start + size], struct.unpack("<BI", data[start + size : end])
    if _masked(google_crc32c.value(data[start : start + size + 1])) != crc:
        raise Damaged(f"is damaged: the checksum of the block at byte {start:,} does not fit")
    if compression:
        raise Damaged("has a compressed block, which TensorFlow does not write")
    return block


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values. An entry has three lengths (shared prefix, rest of the key, value), then the rest and the value.

    The restarts at the end, which only a search needs, are not read.
    """
    count = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (count + 1)
    if end < 0 or count < 1:
        raise Damaged("has a block too short for its restarts")
    key, at = b"", 0
    while at < end:
        shared, at = _varint(block, at)
        new, at = _varint(block, at)
        length, at = _varint(block, at)
        if shared > len(key) or at + new + length > end:
            raise Damaged("has a block that contradicts itself")
        if shared + new > MAX_KEY:
            raise Damaged(f"has a name of {shared + new:,} bytes")
        key = key[:shared] + block[at : at + new]
        yield key, block[at + new : at + new + length]
        at += new + length
