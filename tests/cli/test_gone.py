"""What is gone from the command line: a user of an earlier gpt2 is told what to use instead."""

from __future__ import annotations

import pytest
from support.commands import mistake

from gpt2.cli.gone import GONE, require_none_gone

ROWS = [(command, word, advice) for command, words in GONE.items() for word, advice in words.items()]


@pytest.mark.parametrize(("command", "word", "advice"), ROWS, ids=[f"{command} {word}" for command, word, _ in ROWS])
def test_what_is_gone_says_what_to_use(command: str, word: str, advice: str, capsys: pytest.CaptureFixture) -> None:
    """A script's author would have to search the changelog after "unrecognized arguments"."""
    for line in ([command, word], *([[command, "x", f"{word}=1"]] if word.startswith("--") else [])):
        assert mistake(capsys, *line) == f"gpt2: {command} {word} is gone: {advice}\n"


def test_a_word_is_gone_only_as_a_command() -> None:
    """A run's folder, or a value, may have any name."""
    for line in (["train", "plot", "watch"], ["train"], [], ["generate", "--prompt", "watch"]):
        require_none_gone(line)
