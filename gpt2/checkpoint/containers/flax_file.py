"""Read Flax's checkpoints, such as flax_model.msgpack: nested maps of arrays in MessagePack.

Sources: the MessagePack specification (msgpack/msgpack, spec.md); google/flax, flax/serialization.py: an array is an extension of
type 1 that holds its shape, the name of its dtype and its bytes, in C order. An array of 1 GiB and more is cut into pieces;
GPT-2's largest has a third of that, so pieces are not read. Only the headers are read here: the arrays stay in the mapped file.
"""

import struct
from collections.abc import Iterator

import torch

from gpt2.checkpoint.containers import Container, Damaged, Entry, Refused, countable, shown

ARRAY = 1  # the extension's type
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
MAX_DEPTH = 32

# First byte of a value -> the format of the length, or of the number, that follows it.
MAPS = {0xDE: ">H", 0xDF: ">I"}
LISTS = {0xDC: ">H", 0xDD: ">I"}
TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
SMALL_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
INTEGERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}


class FlaxFile(Container):
    """A checkpoint of Flax; an array's name is its path in the maps, joined by slashes."""

    kind = "Flax"

    def _directory(self) -> dict[str, Entry]:
        self._at = 0
        entries: dict[str, Entry] = {}
        for path, entry in self._arrays((), MAX_DEPTH):
            name = "/".join(path)
            if name in entries:
                raise Damaged(f"has {shown(name)} twice")
            entries[name] = entry
        if self._at != self._file.size:
            raise Damaged(f"has {self._file.size:,} bytes where its maps end at {self._at:,}")
        return entries

    def _arrays(self, path: tuple[str, ...], depth: int) -> Iterator[tuple[tuple[str, ...], Entry]]:
        """Yield the arrays of the map or the array at the current place, with their paths."""
        if depth == 0:
            raise Damaged(f"has more than {MAX_DEPTH} maps in one another")
        first = self._number(">B")
        if 0x80 <= first <= 0x8F or first in MAPS:
            for _ in range(self._number(MAPS[first]) if first in MAPS else first & 0x0F):
                yield from self._arrays((*path, self._text()), depth - 1)
        elif first in EXTENSIONS or first in SMALL_EXTENSIONS:
            yield path, self._array("/".join(path), SMALL_EXTENSIONS.get(first) or self._number(EXTENSIONS[first]))
        else:
            raise Damaged(f"has a value that is neither a map nor an array at byte {self._at - 1:,}")

    def _array(self, name: str, length: int) -> Entry:
        """Read an array's header and step over its bytes."""
        end = self._at + 1 + length
        if self._number(">B") != ARRAY or self._length(LISTS, 0x90, 0x9F) != 3:
            raise Damaged(f"has something else than an array at {shown(name)}")
        shape = tuple(self._integer() for _ in range(self._length(LISTS, 0x90, 0x9F, most=8)))
        dtype = self._text()
        stated = self._number(BYTES[first]) if (first := self._number(">B")) in BYTES else -1
        if dtype not in DTYPES:
            raise Refused(f"{shown(name)} is {shown(dtype)}; the weights must be floats")
        entry = Entry(DTYPES[dtype], shape, self._at)
        if not (countable(shape) and entry.end == self._at + stated == end <= self._file.size):
            raise Damaged(f"has {shown(name)} {list(shape)}, whose bytes are not as many as stated")
        self._at = end
        return entry

    def _text(self) -> str:
        return self._take(self._length(TEXTS, 0xA0, 0xBF, most=1000)).decode(errors="replace")

    def _length(self, formats: dict[int, str], low: int, high: int, *, most: int = 1 << 32) -> int:
        """Read the length of a text or a list: in the first byte, from ``low`` to ``high``, or in the bytes after it."""
        first = self._number(">B")
        if first not in formats and not low <= first <= high:
            raise Damaged(f"has an unexpected value at byte {self._at - 1:,}")
        length = self._number(formats[first]) if first in formats else first - low
        if length > most:
            raise Damaged(f"states a length of {length:,} before byte {self._at:,}")
        return length

    def _integer(self) -> int:
        first = self._number(">B")
        if first >= 0x80 and first not in INTEGERS:
            raise Damaged(f"has a size that is no number at byte {self._at - 1:,}")
        return self._number(INTEGERS[first]) if first in INTEGERS else first

    def _number(self, format: str) -> int:
        return struct.unpack(format, self._take(struct.calcsize(format)))[0]

    def _take(self, count: int) -> bytes:
        taken = self._file.bytes(self._at, count)
        if len(taken) < count:
            raise Damaged(f"is cut short at byte {self._file.size:,}")
        self._at += count
        return taken
