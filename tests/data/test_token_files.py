"""Token files as nanoGPT writes them: mapped, checked and identified."""

import numpy as np
import pytest
from support.commands import refusal

from gpt2.data import token_files
from gpt2.errors import InputError


@pytest.fixture
def folder(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "train.bin")  # the file format of nanoGPT's prepare.py
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "val.bin")
    return tmp_path


def test_files_are_mapped_and_not_read(folder):
    """OpenWebText has 17 GB: a copy of it would not fit into memory."""
    train, val = token_files.read(folder, 1000)
    assert isinstance(train, np.memmap)
    assert not train.flags.writeable
    assert train.tolist() == list(range(1000))
    assert len(val) == 100


def test_ids_are_little_endian_on_every_machine(tmp_path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(b"\0\0\x02\x01\xff\xff")
    assert token_files.read(tmp_path, 65536)[0].tolist() == [0, 258, 65535]


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), (b"", "0 bytes are not"), (b"abc", "3 bytes are not a positive number")]
)
def test_what_is_no_token_file_is_refused(folder, content, says):
    path = folder / "val.bin"
    path.unlink() if content is None else path.write_bytes(content)
    assert says in refusal(token_files.read, folder, 1000)


def test_ids_beyond_the_vocabulary_are_refused(folder, monkeypatch):
    """Training would stop with an index error, or on a GPU with an assertion without details."""
    with pytest.raises(InputError, match=r"train\.bin: id 999 lies outside the tokenizer's vocabulary of 999"):
        token_files.read(folder, 999)
    monkeypatch.setattr(token_files, "SAMPLES", 10)
    monkeypatch.setattr(token_files, "BLOCK", 10)
    with pytest.raises(InputError, match="id 999"):  # the last block is always among the checked ones
        token_files.read(folder, 999)


def test_fingerprints_tell_files_apart(folder, monkeypatch):
    train, val = token_files.read(folder, 1000)
    before = token_files.fingerprint(train, val)
    assert before == token_files.fingerprint(train.copy(), val) != token_files.fingerprint(train[:-1], val)
    monkeypatch.setattr(token_files, "SAMPLES", 10)
    monkeypatch.setattr(token_files, "BLOCK", 10)
    assert token_files.fingerprint(train, val) != token_files.fingerprint(train[:-1], val)
