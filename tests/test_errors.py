"""Paths as a user writes them."""

from pathlib import Path

import pytest
from support.commands import refusal

from gpt2.data.documents import files
from gpt2.errors import user_path


def test_a_home_folder_is_meant_at_the_beginning_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~nosuchuser/x` was a traceback, `./~` the home folder, and `data.path=~/x`, which no shell expands, a folder `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    assert user_path("~/a.txt") == tmp_path / "a.txt"
    assert files("~/*.txt") == files("~/a.txt") == [tmp_path / "a.txt"]
    assert user_path("./~") == Path("~")
    assert user_path("a~b") == Path("a~b")
    assert "~nosuchuser is no user of this machine; write ./~nosuchuser/x" in refusal(user_path, "~nosuchuser/x")
