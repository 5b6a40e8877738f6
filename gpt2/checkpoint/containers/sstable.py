"""Read LevelDB's table format, used by TensorFlow's indexes: sorted keys and values in blocks with checksums.

A file has data blocks, a meta block (not read), an index block, and a footer of 48 bytes that locates these two
(google/leveldb, doc/table_format.md; tensorflow, ``core/lib/io/format.cc``). Each entry omits the prefix that its key shares
with the key before, except at *restarts*, where a search can begin.

The files are untrusted: blocks must follow each other and keys rise, so no byte is read twice and no key occurs twice.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from gpt2.checkpoint.containers import Damaged

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER = 48
TRAILER = 5  # after a block: a byte for its compression, and a checksum of both
MAX_KEY = 512  # bytes; shared prefixes can make keys far larger than the file


def pairs(data: bytes) -> Iterator[tuple[bytes, bytes]]:
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


def varint(data: bytes, at: int) -> tuple[int, int]:
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


def masked(crc: int) -> int:
    """Return a checksum in its stored form (``core/lib/hash/crc32c.h``)."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _handle(data: bytes, at: int) -> tuple[int, int, int]:
    """Return a block's offset and size, and the next offset."""
    start, at = varint(data, at)
    size, at = varint(data, at)
    return start, size, at


def _block(data: bytes, start: int, size: int) -> bytes:
    import google_crc32c

    end = start + size + TRAILER
    if end > len(data) - FOOTER:
        raise Damaged(f"names a block up to byte {end:,} and has {len(data):,}")
    block, (compression, crc) = data[start : start + size], struct.unpack("<BI", data[start + size : end])
    if masked(google_crc32c.value(data[start : start + size + 1])) != crc:
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
        shared, at = varint(block, at)
        new, at = varint(block, at)
        length, at = varint(block, at)
        if shared > len(key) or at + new + length > end:
            raise Damaged("has a block that contradicts itself")
        if shared + new > MAX_KEY:
            raise Damaged(f"has a name of {shared + new:,} bytes")
        key = key[:shared] + block[at : at + new]
        yield key, block[at + new : at + new + length]
        at += new + length
