"""What is particular to Keras' HDF5 and Flax's MessagePack; that they load rightly is in test_dialects.py."""

import sys
from pathlib import Path
from typing import Any

import h5py
import msgpack
import numpy as np
import pytest
from support.checks import refused
from support.old_layouts import flax, keras, packed

from gpt2.checkpoint.loading import load

PATH = "transformer/m/transformer/wpe/embeddings:0"


def test_without_h5py_the_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """h5py is optional: a ModuleNotFoundError would not say which extra has it."""
    keras(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused(lambda: load(str(tmp_path)), "reading HDF5 needs h5py; pip install 'gpt2-toolkit[hdf5]'")


PIECE, FLOATS = "in one piece (compressed, or in another file)", "the weights must be floats"
OTHER_FILE = {"dtype": "<f4", "external": [("secret", 0, 768)]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [(None, PIECE), (OTHER_FILE, PIECE), ({"dtype": ">f4"}, FLOATS), ({"dtype": "<i4"}, FLOATS), ({"dtype": "S4"}, FLOATS)],
)
def test_a_tensor_that_is_not_plain_floats_in_its_place_is_refused(tmp_path: Path, changes: Any, says: str) -> None:
    """Read in place, a compressed tensor (None) is noise, and so are big-endian floats; a link could name any file."""
    keras(tmp_path, compression=None if changes else "gzip")
    if changes:
        with h5py.File(tmp_path / "tf_model.h5", "a") as file:
            file.create_dataset(PATH, (16, 12), **changes)
    refused(lambda: load(str(tmp_path)), says)


def ext(shape: Any, dtype: Any, data: Any, kind: int = 1) -> msgpack.ExtType:
    return msgpack.ExtType(kind, msgpack.packb((shape, dtype, data), use_bin_type=True))


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"a": ext((2,), "float32", bytes(7))}, "whose bytes are not as many as stated"),
        ({"a": ext((-1,), "float32", bytes(4))}, "has a size that is no number"),
        ({"a": ext((1,), "int32", bytes(4))}, "a is int32; the weights must be floats"),
        ({"a": ext((1 << 40, 1 << 40), "float32", b"")}, "whose bytes are not as many as stated"),
        ({"a": ext((1,), "float32", bytes(4), kind=3)}, "something else than an array at a"),
        ({"a": 1}, "neither a map nor an array"),
        ({"a/b": np.zeros(1), "a": {"b": np.zeros(1)}}, "has a/b twice"),
        ({1: np.zeros(1)}, "has an unexpected value"),
        (b"\x81\xa1a" * 2000, "has more than 32 maps in one another"),  # could exceed Python's limit of recursion
    ],
)
def test_a_flax_file_that_contradicts_itself_is_refused(tmp_path: Path, tree: Any, says: str) -> None:
    """A stranger's file: its lengths and types are checked before anything is read with them."""
    (tmp_path / "flax_model.msgpack").write_bytes(tree if isinstance(tree, bytes) else packed(tree))
    refused(lambda: load(str(tmp_path)), says)


def test_a_flax_file_is_read_in_place(tmp_path: Path) -> None:
    """A copy of every array would double the memory of loading."""
    truth = flax(tmp_path)
    with open(tmp_path / "flax_model.msgpack", "ab") as file:
        file.write(b"\x00")
    refused(lambda: load(str(tmp_path)), "where its maps end at")
    flax(tmp_path)
    model = load(str(tmp_path))
    assert all(np.array_equal(model.state_dict()[name], tensor) for name, tensor in truth.items())
