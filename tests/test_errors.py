"""Paths as a user writes them."""

from pathlib import Path

import pytest
from support.commands import mistake, refusal

import gpt2
from gpt2.checkpoint import describe
from gpt2.data.documents import files
from gpt2.errors import InputError, misfit, user_path


def test_one_function_expands_a_home_folder() -> None:
    """Two places were left out, and ended in a traceback for a user that is not there."""
    package = Path(gpt2.__file__).parent
    assert [file.name for file in package.rglob("*.py") if "expanduser" in file.read_text(encoding="utf-8")] == ["errors.py"]


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


@pytest.mark.parametrize("name", ["x" * 5000, f"{'x' * 5000}/model.safetensors", f"./{'y' * 5000}.gguf:bf16"])
def test_a_long_name_is_cut(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A name of 5,000 letters filled the terminal, and hid what was wrong with it."""
    assert len(mistake(capsys, "info", name)) < 1000
    assert str(InputError("x" * 400)) == "x" * 400


def test_an_error_without_words_says_so() -> None:
    """A user's build() that raised InputError("") ended in an empty line."""
    assert str(InputError("")) == str(InputError("\n")) == "no reason is given"


def test_too_little_memory_is_no_misfit() -> None:
    """A search took it for parts that do not fit together, and went on."""
    with misfit():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="memory"), misfit():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def test_a_panic_of_a_library_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A library in Rust panics with what is no Exception: outside the places that expect it, this was a traceback."""

    class PanicException(BaseException):
        pass

    def panic(*args: object, **settings: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(describe, "describe", panic)
    assert "a library failed on these files (index out of bounds); fetch or write them again" in mistake(capsys, "info")


def test_what_a_test_leaves_behind_is_seen(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the fixtures in conftest.py, which fail such a test."""
    left = request.config.pluginmanager.get_plugin(str(Path(__file__).parent / "conftest.py"))
    process, package = left.of_the_process(), left.of_the_package()
    monkeypatch.setenv("LEFT", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.get_num_threads", lambda: 99)
    monkeypatch.setattr(describe, "describe", print)
    assert left.differ(process, left.of_the_process()) == {"$LEFT", "folder", "torch"}
    assert left.changed(package, left.of_the_package()) == {"gpt2.checkpoint.describe.describe"}
