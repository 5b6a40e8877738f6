"""Files that a command writes, and what it prints of its arguments: whole or not at all, and obeyed by no terminal."""

import errno
import os
from pathlib import Path

import pytest

from gpt2.cli.main import main
from gpt2.data.files import write_output

OUTPUTS = {
    "--json": ["info", "--json"],
    "--html": ["compare", "shakespeare-mini", "shakespeare-mini:bf16", "--tokens", "20", "--html"],
}


@pytest.mark.parametrize("words", OUTPUTS.values(), ids=OUTPUTS)
def test_an_earlier_report_outlasts_a_full_disk(words: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    """Reports were written in place: a full disk lost the earlier one. Control: with room the new one is there."""
    report = tmp_path / "report"
    report.write_text("earlier")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert main([*words, str(report)]) == 2
    assert f"{report}: cannot be written (No space left on device); make room" in capsys.readouterr().err
    assert report.read_text() == "earlier"
    assert main([*words, str(report)]) == 0
    assert report.read_text() != "earlier"
    assert os.listdir(tmp_path) == ["report"]


def test_a_link_is_replaced_and_a_device_written_into(tmp_path: Path) -> None:
    """A link at the target led the writer to another file; /dev/null must not become a file."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    write_output(tmp_path / "link", "report")
    assert ((tmp_path / "mine").read_text(), (tmp_path / "link").read_text()) == ("mine", "report")
    assert not (tmp_path / "link").is_symlink()
    write_output("/dev/null", "x")
    assert Path("/dev/null").is_char_device()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", b"bytes")
    assert os.read(reader, 100) == b"bytes"
    os.close(reader)
