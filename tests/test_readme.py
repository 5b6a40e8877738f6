"""The README says what is there: its commands parse, its tree is the tree, and CI runs the very line it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from gpt2.cli.main import parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language; "" is a bare fence."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [content for name, content in fenced if name == language]


COMMANDS = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines() if line.startswith("$ gpt2")]
COMMANDS += [command for command in re.findall(r"`(gpt2 [a-z][^`]*)`", README) if "..." not in command]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_shown_is_one_that_parses(command: str) -> None:
    """A command in a README that does not run is the first thing a newcomer meets."""
    words = shlex.split(command)[1:]
    assert words[-1] == "--help" or parser().parse_args(words).run


def test_ci_runs_the_readme_s_test_command() -> None:
    """Otherwise a dependency that only CI installs would never be missed."""
    script = (ROOT / ".ci" / "run").read_text()
    extract = re.search(r"command=\$\((.*)\)\n", script)[1]
    command = subprocess.run(["bash", "-c", extract], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert command == blocks("sh")[1].strip()
    assert "-m pytest" in command


def test_nothing_is_left_to_fill_in() -> None:
    """A figure that was never measured must not be a gap that nobody sees."""
    assert "@@" not in README
