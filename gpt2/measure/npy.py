"""Read NumPy's ``.npy`` and ``.npz``; of a wrong header say which byte is wrong, and what the header should be.

Programs in C and JavaScript write these headers by hand, and NumPy, which evaluates them as Python, fails in a dozen ways. Here a
header is read by the format's description (NumPy enhancement proposal 1): magic, version, length, a dictionary of ``descr``,
``fortran_order`` and ``shape``, spaces, a newline. Nothing is evaluated or unpickled.
"""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpt2.data.files import opened
from gpt2.errors import InputError, printable, require_memory

FEWER = "write fewer tokens"
MAGIC = b"\x93NUMPY"
MAX_HEAD = 12 + (1 << 16)  # bytes: a header of version 1, with what stands before it
# Key -> its value as a regular expression, and in words.
VALUES = {
    "descr": (rb"""(['"])(?P<descr>[<>|=]?[A-Za-z?]\w{0,20})\1""", "a type in quotes, such as '<f4'"),
    "fortran_order": (rb"(?P<fortran_order>True|False)", "False or True"),
    "shape": (rb"\((?P<shape>\s*|(\s*\d{1,18}L?\s*,)+(\s*\d{1,18}L?)?\s*)\)", "whole numbers in (), such as (2, 16), or (16,)"),
}
KEY = rf"""(['"])({"|".join(VALUES)})\1""".encode()
# Where a wrong header may have the values of a right one.
HINTS = {
    "descr": rb"descr\W{0,4}(<?[biuf][1248])",
    "fortran_order": rb"fortran_order\W{0,4}([Tt]rue|1)",
    "shape": rb"shape\W{0,4}(\d[\d, ]*)",
}
# What reading can raise; zipfile raises RuntimeError for an encrypted file.
FAILURES = (OSError, EOFError, KeyError, ValueError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


def read_npy(path: Path, most: float = math.inf) -> np.ndarray:
    """Return the array in a file. Raises InputError: more than ``most`` bytes, damaged, or no array of numbers."""
    try:
        with opened(path) as file:
            return _read(file, str(path), path.stat().st_size, most)
    except FAILURES as error:
        raise damaged(path, error) from None


def read_npz(path: Path, most: float = math.inf, only: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of an archive by name, or ``only`` one; ``most`` bytes in all. Raises InputError as :func:`read_npy`."""
    try:
        with opened(path) as whole, zipfile.ZipFile(whole) as archive:
            members = [member for member in archive.infolist() if only in ("", member.filename.removesuffix(".npy"))]
            require_memory(sum(member.file_size for member in members), f"{path}: its unpacked arrays", FEWER, most)
            for member in members:
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as file:
                    yield name, _read(file, f"{path}: {printable(name, one_line=True)[:200]}", member.file_size, most)
    except FAILURES as error:
        raise damaged(path, error) from None


def _read(file: IO[bytes], where: str, size: int, most: float) -> np.ndarray:
    require_memory(size, f"{where}: its numbers", FEWER, most)
    head, fields = file.read(min(size, MAX_HEAD)), dict[str, Any]()
    wrong = _wrong(head, fields, size)
    if fields.get("descr", "").endswith("O"):
        raise InputError(f"{where}: holds Python objects (a pickle), which are not read; save plain arrays of numbers")
    if wrong:
        raise InputError(f"{where}: {wrong}; {'' if 'write' in wrong else _right(head, fields)}".removesuffix("; "))
    array = np.empty(fields["shape"], fields["descr"], order="F" if fields["fortran_order"] else "C")
    room = array.reshape(-1, order="A").view(np.uint8).data
    taken = head[fields["start"] :]
    room[: len(taken)] = taken
    room = room[len(taken) :]
    while room:
        if not (count := file.readinto(room)):  # type: ignore[attr-defined]
            raise EOFError(f"it ends {len(room):,} bytes before its array does")
        room = room[count:]
    return array


def _wrong(head: bytes, fields: dict[str, Any], size: int) -> str:
    """Put what a header says into ``fields``, with the data's ``start``; return which byte of it is wrong, or ""."""
    if not head.startswith(MAGIC):
        at = next(at for at, byte in enumerate(MAGIC) if head[at : at + 1] != bytes([byte]))
        return f"byte {at} is {_shown(head, at)}, and an .npy file begins with \\x93NUMPY"
    if head[6:7] not in (b"\1", b"\2", b"\3"):
        return f"byte 6, the version, is {_shown(head, 6)}, and should be 0x01"
    first = 10 if head[6] == 1 else 12
    start = fields["start"] = first + int.from_bytes(head[8:first], "little")
    at, wanted = _parse(head, first, fields)
    if wanted:
        return f"byte {at} is {_shown(head, at)}, and should be {wanted}"
    try:
        itemsize = np.dtype(fields["descr"]).itemsize
    except (TypeError, ValueError):
        name = fields.pop("descr")
        return f"byte {head.index(name.encode())} begins {name}, which is no type of NumPy's"
    wanted_bytes, end = itemsize * math.prod(fields["shape"]), at + len(head[at:]) - len(head[at:].lstrip(b" "))
    end += head[end : end + 1] == b"\n"
    length = f"bytes 8 to {first - 1}, the header's length, are {start - first}"
    if start < at or head[at:start].strip() or size - end == wanted_bytes != size - start:
        return f"{length}, and should be {end - first}: the data begin at byte {end}"
    if size - start != wanted_bytes:
        there = f"{max(0, size - start):,} follow it from byte {start} on; write the whole array, with its own shape and type"
        return f"the header says {fields['shape']} of {fields['descr']}, {wanted_bytes:,} bytes, and {there}"
    return ""


def _parse(head: bytes, at: int, fields: dict[str, Any]) -> tuple[int, str]:
    """Parse the dictionary at byte ``at`` into ``fields``; return its end and "", or the wrong byte and the right one."""

    def take(pattern: bytes) -> re.Match[bytes] | None:
        nonlocal at
        match = re.compile(rb"\s*" + pattern).match(head, at)
        at = match.end() if match else at + len(head[at:]) - len(head[at:].lstrip())
        return match

    if not take(rb"\{"):
        return at, "'{'"
    while not take(rb"\}"):
        if not (key := take(KEY)) or key[2].decode() in fields:
            missing = [name for name in VALUES if name not in fields]
            return at, f"the key {missing[0]!r}, in quotes" if missing else "'}', the end of the header's dictionary"
        name = key[2].decode()
        if not take(rb":"):
            return at, "':'"
        pattern, words = VALUES[name]
        if not (value := take(pattern)):
            return at, f"the value of {name!r}: {words}"
        text = value[name].decode()
        numbers = tuple(int(number) for number in re.findall(r"\d+", text))
        fields[name] = {"descr": text, "fortran_order": text == "True", "shape": numbers}[name]
        if not take(rb",") and not re.match(rb"\s*\}", head[at : at + 99]):
            return at, "',' or '}'"
    missing = [name for name in VALUES if name not in fields]
    return at - bool(missing), f"the key {missing[0]!r}, in quotes" if missing else ""


def _shown(head: bytes, at: int) -> str:
    byte = head[at : at + 1]
    return "missing" if not byte else repr(byte.decode()) if byte.isascii() and byte.decode().isprintable() else f"0x{byte.hex()}"


def _right(head: bytes, fields: dict[str, Any]) -> str:
    """Say what the header should be, as far as the wrong one tells."""
    hints = {name: match[1].decode() for name, hint in HINTS.items() if (match := re.search(hint, head[:1000]))}
    shape = tuple(int(number[:18]) for number in re.findall(r"\d+", hints.get("shape", "2, 16")))
    values = {
        "descr": f"<{hints.get('descr', 'f4').lstrip('<')}",
        "fortran_order": "fortran_order" in hints,
        "shape": shape,
    } | fields
    text = f"{{{', '.join(f'{name!r}: {values[name]!r}' for name in VALUES)}, }}"
    length = len(text) + 1 + -(11 + len(text)) % 64  # NumPy pads to a multiple of 64
    size = f"{length} as 2 bytes ({length % 256:#04x} {length // 256:#04x})"
    return f"write \\x93NUMPY, 0x01 0x00, {size}, {text}, spaces, and a newline as byte {9 + length}"


def damaged(path: Path, error: Exception) -> InputError:
    """Return the error of a file that cannot be read, in one line."""
    if isinstance(error, InputError):
        return error
    said = getattr(error, "strerror", None) or str(error).partition("\n")[0][:120] or type(error).__name__
    return InputError(f"{path}: cannot be read ({said}); write it again")
