"""Text of models and names of files on a terminal: control characters arrive as symbols, never as commands."""

from __future__ import annotations

import io
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

import gpt2
from gpt2.cli.main import main
from gpt2.data.chars import Chars
from gpt2.errors import InputError, printable

ASSET = Path(gpt2.__file__).parent / "assets" / "shakespeare-mini"
ATTACK = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b]0;pwned\x1b\\\x1b[2J\r\b\x7f\x9b2J"  # clipboard, title, clear the screen; as C1 too
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal(io.StringIO):
    """Standard output or error of somebody who looks at it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every escape sequence on the terminal is one that slipped through."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")


def on_a_terminal(*args: str) -> tuple[int, str]:
    """The exit code of a command and all that its terminal got, without the progress line, which is overwritten in place."""
    with redirect_stdout(Terminal()) as screen, redirect_stderr(screen):
        code = main(args)
    return code, screen.getvalue().replace("\r\x1b[2K", "")


def crafted(folder: Path, says: str = "\x1b") -> Path:
    """A model whose vocabulary is the attack's characters, and which says the same one for ever."""
    tokenizer = Chars.from_text(ATTACK + "a\n")
    model = gpt2.GPT2(gpt2.GPT2Config(tokenizer.n_vocab, 64, 8, 1, 2))
    with torch.no_grad():
        row = model.wte.weight[tokenizer.encode(says)[0]]
        row.mul_(50)
        model.ln_f.weight.zero_()
        model.ln_f.bias.copy_(row)
    gpt2.save(model, tokenizer, folder)
    return folder


def test_generate_shows_what_a_crafted_vocabulary_says(tmp_path: Path) -> None:
    """A model's text can set the clipboard, the window's title, and clear what was said before."""
    model = crafted(tmp_path / "model")
    code, shown = on_a_terminal("generate", str(model), "--prompt", ATTACK, "--temperature", "0", "--max-new-tokens", "5")
    assert code == 0
    assert not RAW.search(shown)
    assert "␛]52;c;cm0gLXJmIH4=␇" in shown
    assert "␍␈␡\\u009b2J␛␛␛␛␛\n" in shown


def test_generate_into_a_file_keeps_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Redirected, the text is data: a program may want exactly what the model said."""
    model = crafted(tmp_path / "model")
    assert main(["generate", str(model), "--prompt", "a", "--temperature", "0", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == "a" + 5 * "\x1b" + "\n"


def test_compare_shows_what_both_models_say(tmp_path: Path) -> None:
    """Continuations stand in its table as the models said them."""
    sides = [str(crafted(tmp_path / name, says)) for name, says in (("a", "\x1b"), ("b", "\x9b"))]
    text = tmp_path / "text.txt"
    text.write_text((ATTACK + "a\n") * 40, newline="")
    code, shown = on_a_terminal("compare", *sides, "--on", str(text), "--tokens", "600")
    assert code == 0
    assert not RAW.search(shown)
    assert "␛␛␛" in shown
    code, shown = on_a_terminal("compare", *sides, "--attention", ATTACK)
    assert code == 0
    assert not RAW.search(shown)


def test_info_and_messages_show_file_names_always(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Whoever unpacks an archive chooses none of its names; one with a line break in it could forge a line."""
    folder = tmp_path / "model\x1b]0;x\x07"
    shutil.copytree(ASSET, folder)
    (folder / "notes\x1b[2J\n  model.safetensors  official.txt").write_text("")
    code, shown = on_a_terminal("info", str(folder))
    assert [code, main(["info", str(folder)])] == [0, 0]
    for text in (shown, capsys.readouterr().out):
        assert not RAW.search(text)
        assert "model␛]0;x␇" in text
        assert "notes␛[2J␊  model.safetensors" in text
    (folder / "config.json").write_text("{")
    assert main(["info", str(folder)]) == 2
    assert not RAW.search(capsys.readouterr().err)


def test_a_sample_in_training_is_shown(tmp_path: Path) -> None:
    """The text that a run learns is somebody else's, and its samples are what it learnt."""
    text = tmp_path / "text.txt"
    text.write_text((ATTACK + "a\n") * 400, newline="")
    settings = {
        **{"steps": 1, "eval_every": 1, "save_every": 1, "context": 16, "batch_size": 1, "sample_tokens": 40, "eval_tokens": 64},
        **{"data.path": text, "data.tokenizer": "chars", "model.n_embd": 8, "model.n_head": 1, "model.n_layer": 1},
    }
    arguments = [f"--set={key}={value}" for key, value in settings.items()]
    code, shown = on_a_terminal("train", "shakespeare-mini", "--out", str(tmp_path / "run"), *arguments)
    assert code == 0
    assert "  | " in shown
    assert not RAW.search(shown)


def test_what_is_printable() -> None:
    """New lines and tabs lay out text; in a name they are part of an attack."""
    assert printable("a\n\tb\x00\x1b\x7f\x85\udcff é文") == "a\n\tb␀␛␡\\u0085\\udcff é文"
    assert printable("a\n\tb", one_line=True) == "a␊␉b"
    assert str(InputError("x\x1b[2J\ny: mend it")) == "x␛[2J\\ny: mend it"
