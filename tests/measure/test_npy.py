"""Headers of .npy files as programs in C and JavaScript write them: which byte is wrong, and what the header should be."""

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.commands import mistake, refusal

from gpt2.measure.npy import read_npy, read_npz

VALUES = np.arange(6, dtype="<f4").reshape(2, 3)
DICTIONARY = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
MAGIC = b"\x93NUMPY\1\0"
PADDED = DICTIONARY + " " * (117 - len(DICTIONARY)) + "\n"


def npy(header: str = PADDED, *, length: int | None = None, magic: bytes = MAGIC, data: bytes = VALUES.tobytes()) -> bytes:
    return magic + struct.pack("<H", len(header) if length is None else length) + header.encode("latin1") + data


RIGHT = {
    "as NumPy": npy(),
    "no spaces": npy(DICTIONARY),
    "no newline": npy(PADDED[:-1] + " "),
    "double quotes": npy(PADDED.replace("'", '"')),
    "another order": npy("{'shape': (2, 3), 'descr': '<f4', 'fortran_order': False}\n"),
    "version 2": b"\x93NUMPY\2\0" + struct.pack("<I", len(PADDED)) + PADDED.encode() + VALUES.tobytes(),
}
# The bytes, and what the line says of them; "the length" is bytes 8 and 9.
WRONG = {
    "unclosed": (npy(PADDED.replace("}", " ")), "byte 128 is 0x00, and should be '}'"),
    "unclosed shape": (npy(PADDED.replace(")", " ")), "byte 60 is '(', and should be the value of 'shape'"),
    "the length is too small": (npy(length=10), "are 10, and should be 118: the data begin at byte 128"),
    "the length is too large": (npy(length=119), "are 119, and should be 118: the data begin at byte 128"),
    "the length leaves the file": (npy(length=60_000), "are 60000, and should be 118"),
    "the length is big-endian": (npy(length=118 << 8), "are 30208, and should be 118"),
    "a terminating zero": (npy(DICTIONARY + "\0"), "are 60, and should be 59: the data begin at byte 69"),
    "brackets": (npy(PADDED.replace("(2, 3)", "[2, 3]")), "byte 60 is '[', and should be the value of 'shape'"),
    "a number": (npy(PADDED.replace("(2, 3)", "6")), "byte 60 is '6'"),
    "no tuple": (npy(PADDED.replace("(2, 3)", "(6)")), "such as (2, 16), or (16,)"),
    "false": (npy(PADDED.replace("False", "false")), "byte 44 is 'f', and should be the value of 'fortran_order': False or True"),
    "no quotes": (npy(PADDED.replace("'<f4'", "<f4")), "byte 20 is '<', and should be the value of 'descr'"),
    "no type": (npy(PADDED.replace("<f4", "<f9")), "byte 21 begins <f9, which is no type of NumPy's"),
    "a key without quotes": (npy(PADDED.replace("'descr'", "descr")), "byte 11 is 'd', and should be the key 'descr'"),
    "a key is missing": (npy(PADDED.replace("'fortran_order': False, ", "")), "should be the key 'fortran_order'"),
    "no magic": (npy(magic=b"\x92NUMPY\1\0"), "byte 0 is 0x92, and an .npy file begins with"),
    "version 9": (npy(magic=b"\x93NUMPY\x09\0"), "byte 6, the version, is 0x09"),
    "empty": (b"", "byte 0 is missing"),
    "cut": (npy()[:50], "byte 50 is missing"),
    "too few data": (npy(data=b"1234"), "the header says (2, 3) of <f4, 24 bytes, and 4 follow"),
    "float64 called float32": (npy(data=bytes(48)), "24 bytes, and 48 follow it from byte 128 on"),
    "a shape that lies": (npy(PADDED.replace("(2, 3)", "(2, 999999999999)")), "and 24 follow"),
    "objects": (npy(PADDED.replace("<f4", "|O")), "holds Python objects (a pickle)"),
}


@pytest.mark.parametrize("content", RIGHT.values(), ids=RIGHT)
def test_right_headers_are_read_as_numpy_reads_them(content: bytes, tmp_path: Path) -> None:
    """Control: a reader that is stricter than NumPy would refuse right dumps."""
    (tmp_path / "x.npy").write_bytes(content)
    array, theirs = read_npy(tmp_path / "x.npy"), np.load(tmp_path / "x.npy")
    assert array.dtype == theirs.dtype
    assert np.array_equal(array, theirs)


@pytest.mark.parametrize(("content", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_header_names_its_byte_and_the_right_header(content: bytes, said: str, tmp_path: Path) -> None:
    """NumPy ends some of these with a traceback, and reads others as numbers that are shifted by a byte."""
    (tmp_path / "x.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content)
    for message in (refusal(read_npy, tmp_path / "x.npy"), refusal(lambda: list(read_npz(tmp_path / "x.npz")))):
        assert said in message
        assert "; write " in message or "; save " in message
        if DICTIONARY.encode() in content and "the header says" not in message:
            assert DICTIONARY in message


def test_the_commands_say_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Bug: each of these ended with a traceback of Python's tokenizer."""
    folder = tmp_path / "dump"
    folder.mkdir()
    for name in ("ids", "logits"):
        (folder / f"{name}.npy").write_bytes(WRONG["unclosed"][0])
    np.savez(tmp_path / "dump.npz", ids=[1, 2])
    with zipfile.ZipFile(tmp_path / "dump.npz", "a") as archive:
        archive.writestr("logits.npy", WRONG["unclosed"][0])
    for words in (
        ("diagnose", str(folder)),
        ("diagnose", str(tmp_path / "dump.npz")),
        ("trace", "--out", str(tmp_path / "out.npz"), "--ids", str(folder / "ids.npy")),
    ):
        assert "byte 128 is 0x00, and should be '}'" in mistake(capsys, *words)
