"""Arrays that programs in C and JavaScript write by hand: a wrong one ends with one line that shows a right header."""

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.commands import mistake, refusal

from gpt2.measure.npy import read_npy, read_npz

VALUES = np.arange(6, dtype="<f4").reshape(2, 3)


def npy(header: str = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", data: bytes = VALUES.tobytes()) -> bytes:
    return b"\x93NUMPY\1\0" + struct.pack("<H", 118) + f"{header:117}\n".encode() + data


WRONG = {
    "unclosed": (npy().replace(b"}", b" "), "EOF in multi-line statement"),
    "no magic": (b"\x92" + npy()[1:], "the magic string is not correct"),
    "too few data": (npy(data=b"1234"), ""),
    "float64 called float32": (npy(data=bytes(48)), "the file has more than the 24 bytes of (2, 3) of float32"),
    "a shape that lies": (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 999999999999), }"), ""),
    "objects": (npy("{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }"), "Object arrays cannot be loaded"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_array_is_refused_and_a_right_header_shown(case: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """NumPy ends some of these with a traceback of Python's tokenizer, and reads float64 called float32 as other numbers."""
    content, said = WRONG[case]
    for name, written in ("x", content), ("right", npy()):
        (tmp_path / f"{name}.npy").write_bytes(written)
        with zipfile.ZipFile(tmp_path / f"{name}.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", written)
    assert np.array_equal(read_npy(tmp_path / "right.npy"), VALUES)  # control
    assert np.array_equal(dict(read_npz(tmp_path / "right.npz"))["x"], VALUES)
    (tmp_path / "right.npy").unlink()
    for message in (
        refusal(read_npy, tmp_path / "x.npy"),
        refusal(lambda: list(read_npz(tmp_path / "x.npz"))),
        mistake(capsys, "diagnose", str(tmp_path)),  # a directory of arrays
    ):
        assert said in message
        assert "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 16), }" in message
