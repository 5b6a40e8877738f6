"""CRC-32C, TensorFlow's checksum of index blocks and of tensors, at gigabytes a second in numpy.

The checksum is the remainder of the data, read as one polynomial over GF(2), on division by Castagnoli's P (RFC 3720, 12.1).
P divides S(x) = x^5685 + x^1362 + x^426 + 1, so the data may be divided by S first: three XORs of the data with itself, shifted,
leave 5,685 bits. Squaring over GF(2) only doubles the exponents, so S(x)^64 = S(x^64), and the same XORs work on units of 64
bits, or of 8. The 5,685 bytes that remain go through a table, byte by byte.
"""

from __future__ import annotations

import mmap
from functools import reduce

import numpy as np

POLYNOMIAL = 0x82F63B78  # the first bit, x^31's, is the lowest
DEGREE = 5685
SHIFTS = (DEGREE - 1362, DEGREE - 426, DEGREE)
CHUNK = 1 << 17  # words of 64 bits folded at a time


def crc32c(data: bytes | mmap.mmap | np.ndarray, crc: int = 0) -> int:
    """The checksum of ``data``; given ``crc``, the checksum of what came before, of both together."""
    units, register = np.frombuffer(data, np.uint8), crc ^ 0xFFFFFFFF
    if units.size > DEGREE:
        units, register = _folded(units, register), 0
    for byte in units.tobytes():
        register = _TABLE[(register ^ byte) & 255] ^ register >> 8
    return register ^ 0xFFFFFFFF


def _folded(data: np.ndarray, register: int) -> np.ndarray:
    """``DEGREE`` bytes that have the remainder of ``data``, the register added to its first four bytes."""
    words = data.size // 8
    work = np.zeros(DEGREE + min(words, CHUNK), np.uint64)
    for start in range(0, words, CHUNK):
        part = data[8 * start : 8 * min(start + CHUNK, words)]
        end = DEGREE + part.size // 8
        work[DEGREE:end].view(np.uint8)[:] = part
        if start == 0:
            work[DEGREE] ^= np.uint64(register)
        _fold(work[:end])
        work[:DEGREE] = work[end - DEGREE : end].copy()
    rest = np.concatenate([work[:DEGREE].view(np.uint8), data[8 * words :]])
    _fold(rest)
    return rest[-DEGREE:]


def _fold(units: np.ndarray) -> None:
    """Add every unit but the last ``DEGREE`` to those that it equals modulo S."""
    end = len(units) - DEGREE
    for start in range(0, end, SHIFTS[0]):
        stop = min(start + SHIFTS[0], end)
        for shift in SHIFTS:
            units[start + shift : stop + shift] ^= units[start:stop]


def _by_bit(crc: int, _: int) -> int:
    return crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)


_TABLE = [reduce(_by_bit, range(8), byte) for byte in range(256)]
