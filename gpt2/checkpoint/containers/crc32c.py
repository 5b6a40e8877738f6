"""Compute CRC-32C, the checksum of TensorFlow's files, at gigabytes a second in numpy.

The checksum is the remainder of the data, a polynomial over GF(2), modulo Castagnoli's P (RFC 3720, 12.1). P divides S(x) =
x^5685 + x^1362 + x^426 + 1, so the data may be reduced modulo S first: three XORs of the data with itself, shifted, leave 5,685
bits. Squaring over GF(2) doubles the exponents, S(x)^64 = S(x^64), so the same XORs work on 64-bit words, or on bytes. A table
reduces the last 5,685 bytes one by one.
"""

from __future__ import annotations

import mmap
from functools import reduce

import numpy as np

POLYNOMIAL = 0x82F63B78  # the lowest bit is x^31's
DEGREE = 5685
SHIFTS = (DEGREE - 1362, DEGREE - 426, DEGREE)
CHUNK = 1 << 17  # words of 64 bits folded at a time


def crc32c(data: bytes | mmap.mmap | np.ndarray, crc: int = 0) -> int:
    """Return the checksum of ``data``, continued from ``crc``."""
    units, register = np.frombuffer(data, np.uint8), crc ^ 0xFFFFFFFF
    if units.size > DEGREE:
        units, register = _folded(units, register), 0
    for byte in units.tobytes():
        register = _TABLE[(register ^ byte) & 255] ^ register >> 8
    return register ^ 0xFFFFFFFF


def _folded(data: np.ndarray, register: int) -> np.ndarray:
    """Return ``DEGREE`` bytes with the same remainder as ``data``, after XOR of the register into its first four bytes."""
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
    """Reduce the units modulo S, in place: only the last ``DEGREE`` count afterwards."""
    end = len(units) - DEGREE
    for start in range(0, end, SHIFTS[0]):
        stop = min(start + SHIFTS[0], end)
        for shift in SHIFTS:
            units[start + shift : stop + shift] ^= units[start:stop]


def _by_bit(crc: int, _: int) -> int:
    return crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)


_TABLE = [reduce(_by_bit, range(8), byte) for byte in range(256)]
