"""Files that a command writes, and what it prints of its arguments: whole or not at all, and obeyed by no terminal."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from support.commands import ASSET, mistake, refusal
from support.random_models import write_checkpoint

from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.containers import MappedFile
from gpt2.cli.main import line_of, main
from gpt2.data.files import read_json, write_output


@pytest.mark.parametrize("words", [["info", "--json"], ["explore", "--prompt", "O", "--html"]], ids=" ".join)
def test_an_earlier_report_outlasts_a_full_disk(words: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    """Reports were written in place: a full disk lost the earlier one. Control: with room the new one is there."""
    report = tmp_path / "report"
    report.write_text(earlier := '{"json_version": 3}')
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        assert main([*words, str(report)]) == 2
    assert f"{report}: cannot be written (No space left on device); make room" in capsys.readouterr().err
    assert report.read_text() == earlier
    assert main([*words, str(report)]) == 0
    assert report.read_text() != earlier
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


EVIL = "\x1b[31m\u202egnp.exe\u2066\r"


def test_arguments_and_paths_are_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Unknown options, and the names of what was written, reached the terminal with their control characters."""
    assert main(["info", f"--{EVIL}"]) == 2
    assert main(["trace", "--out", str(tmp_path / f"{EVIL}.npz"), "--tokens", "4"]) == 0
    assert main(["info", f"./{EVIL}"]) == 2
    said = capsys.readouterr().err
    assert r"␛[31m\u202egnp.exe\u2066␍.npz" in said
    assert not set(EVIL[:1] + EVIL[5] + "\u2066\r") & set(said)


@pytest.mark.parametrize(
    "words",
    [
        ("diagnose", "--model", "shakespeare-mini", "{}.npz"),
        ("compare", "shakespeare-mini", "trace:{}.safetensors"),
        ("compare", "shakespeare-mini", "shakespeare-mini", "--on", "{}.txt:context=8"),
        ("compare", "shakespeare-mini", "shakespeare-mini", "--cases", "{}.jsonl"),
        ("info", "{}.safetensors"),
        ("export", "shakespeare-mini", "out", "--like", "{}.py:build"),
        ("train", "{}.toml"),
        ("trace", "--out", "x.npz", "--ids", "{}.npy"),
        ("trace", "--out", "x.npz", "--ids", "{}.txt"),
        ("train", "--list-data", "shakespeare-mini", "--set", "data.path={}.txt"),
    ],
    ids=" ".join,
)
def test_a_pipe_or_device_in_a_file_s_place_is_refused(words: tuple[str, ...], tmp_path: Path, capsys, monkeypatch) -> None:
    """A pipe waited without end, and /dev/zero filled the memory."""
    monkeypatch.chdir(tmp_path)
    suffix = re.search(r"\}(\.\w+)", " ".join(words))[1]
    os.mkfifo(f"pipe{suffix}")
    os.symlink("/dev/zero", f"zero{suffix}")
    for name in ("pipe", "zero"):
        assert "a pipe or a device" in mistake(capsys, *(word.format(name) for word in words))
        assert "a pipe or a device" in refusal(MappedFile, tmp_path / f"{name}{suffix}")
    Path("empty").touch()
    for error in (BlockingIOError, OSError(5, "")):  # of /proc/kmsg and /proc/self/mem, which say that they are empty files
        monkeypatch.setattr("os.read", Mock(side_effect=error))
        assert "a pipe or a device" in refusal(read_json, Path("empty"))


def test_an_output_replaces_no_file_of_a_model(tmp_path: Path, monkeypatch, capsys) -> None:
    """``export m out --json out/config.json`` left a report in place of the config. A result may be written again."""
    monkeypatch.chdir(tmp_path)
    folder, model = tmp_path / "model", str(write_checkpoint(tmp_path / "tiny"))
    folder.mkdir()
    for name in ("config.json", "vocab.json"):  # before anything is written
        assert "would be lost" in mistake(capsys, "export", model, str(folder), "--json", str(folder / name))
    folder.rmdir()  # nothing was written
    shutil.copytree(model, folder)
    (tmp_path / "link").symlink_to(folder)
    for source, out in (("model", "model/"), ("link", "model"), ("model", "link"), ("model", "tiny/../model")):
        assert "is read too" in mistake(capsys, "export", f"{source}:bf16", out)  # which dropped its other heads
    assert main(words := ["export", "shakespeare-mini", "shakespeare-mini"]) == main(words) == 0  # no folder is read
    (folder / "empty").touch()
    (folder / "mine.html").write_text(f"<!doctype html>{' ' * 400}")
    np.savez(folder / "mine.npz", ids=np.zeros(2), logits=np.zeros((99, 9)))
    (folder / "mine.py").write_text('# "about" Matplotlib\nassert r["json_version"] == 4')  # was taken for a result of ours
    (folder / "mine.pt").write_bytes(bytes(8) + b'{"__metadata__":{"format":"pt","about":"my own"}}')
    for words, names in {
        "info --json": "r.json r.json empty config.json mine.html mine.py mine.pt",
        "explore --prompt O --html": "p.html p.html mine.html",
        "trace --tokens 2 --out": "t.safetensors t.safetensors t.npz t.npz t.bin t.bin model.safetensors mine.npz",
    }.items():
        for name in names.split():
            code = main([*words.replace(" ", f" {folder} ", 1).split(), str(folder / name)])
            assert code == (2 if name[:4] in ("conf", "mine", "mode") else 0), name


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json", "tokenizer.json", "vocab.json"])
def test_a_pipe_in_a_model_s_folder_is_refused_by_name(name: str, tmp_path: Path, capsys) -> None:
    """As config.json it was "no config.json there; the folder holds config.json"; as vocab.json it was passed over."""
    folder = tmp_path / "model"
    shutil.copytree(ASSET, folder)
    (folder / (name if name.endswith(".json") else "model.safetensors")).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for words in (["info"], ["generate", "--prompt", "x", "--max-new-tokens", "1"]):
        assert re.search(f"{re.escape(name)}.*a pipe or a device", mistake(capsys, *words, str(folder)))


def test_only_what_a_checkpoint_is_read_from_is_hashed(tmp_path: Path, capsys) -> None:
    """A file of 6 GB beside the weights was hashed for a minute; as one of the small ones it is refused by its size."""
    folder = tmp_path / "model"
    shutil.copytree(ASSET, folder)
    for name in ("stray.safetensors", "optimizer.bin", "notes.txt", "LICENSE"):
        (folder / name).touch()
        os.truncate(folder / name, 6 * 10**9)
    assert {path.name for path in open_path(folder).files().values()} == {path.name for path in ASSET.iterdir()} - {"README.md"}
    said = mistake(capsys, "publish", str(folder), "a/b", "--dry-run")
    assert "LICENSE: has 6,000,000,000 bytes, and such a file at most" in said
    os.truncate(folder / "vocab.json", 6 * 10**9)
    assert "vocab.json: has 6,000,000,000 bytes" in mistake(capsys, "info", str(folder))


def test_ctrl_c_while_it_starts_is_no_traceback() -> None:
    """The first 200 ms import: an interrupt was a traceback of theirs. Control: afterwards Python's own handler is back."""
    begin = "import os, signal; signal.signal(2, signal.default_int_handler); "  # a shell's background job ignores it
    code = f"{begin}import gpt2.cli; os.kill(os.getpid(), 2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-2, "")
    code = f"{begin}import gpt2.cli.main; print(signal.getsignal(2) is signal.default_int_handler)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), "/a/b: Permission denied; see that it is there"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "the working folder has been deleted"),  # os.getcwd()
    ],
)
def test_an_unforeseen_error_of_the_system_is_one_line(error: OSError, said: str, monkeypatch, capsys) -> None:
    """A folder that may not be entered was a traceback. Control: where the working folder is there, a bug of ours has its."""
    monkeypatch.setattr("gpt2.checkpoint.describe.describe", Mock(side_effect=error))
    assert line_of(error) is None or error.filename
    monkeypatch.setattr("os.getcwd", Mock(side_effect=error))
    assert said in mistake(capsys, "info")
