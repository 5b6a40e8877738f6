"""The checksum by folding, against a plain implementation and the examples of the RFC."""

import random

import numpy as np
import pytest
from support import tf_bundle

from gpt2.checkpoint.containers.crc32c import DEGREE, crc32c


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_checksums(data: bytes, expected: int) -> None:
    """RFC 3720, B.4."""
    assert crc32c(data) == expected


def test_every_length_and_split_gives_the_plain_checksum() -> None:
    """Possible bugs: a wrong exponent, a missing tail of one to seven bytes, a lost register between two parts, a skipped
    chunk end."""
    pick = random.Random(0)
    lengths = [*range(20), *range(DEGREE - 9, DEGREE + 18), *(pick.randrange(60_000) for _ in range(25))]
    for length in lengths:
        data = pick.randbytes(length)
        expected, cut = tf_bundle.crc32c(data), pick.randrange(length + 1)
        assert crc32c(data) == expected, length
        assert crc32c(data[cut:], crc32c(data[:cut])) == expected, (length, cut)
        assert crc32c(np.frombuffer(b"x" + data, np.uint8)[1:]) == expected, length


@pytest.mark.parametrize("words", [DEGREE - 1, DEGREE, 999])
def test_more_than_one_chunk(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    """A chunk shorter than the part carried over from the previous chunk."""
    monkeypatch.setattr("gpt2.checkpoint.containers.crc32c.CHUNK", words)
    for length in (8 * words * 3, 8 * words * 3 + 7, 8 * words * 3 + 8, 100_000):
        data = random.Random(length).randbytes(length)
        assert crc32c(data) == tf_bundle.crc32c(data)
