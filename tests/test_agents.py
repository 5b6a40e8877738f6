"""AGENTS.md: the keys that it lists are those of each command's JSON, and what it says to read first is among them."""

import json
import re
import shlex
from pathlib import Path

import pytest
from support.random_models import write_checkpoint

from gpt2.cli.main import COMMANDS as NAMES, main

TEXT = (Path(__file__).parents[1] / "AGENTS.md").read_text(encoding="utf-8")
PORT = """
import gpt2


def build():
    return gpt2.load("model")
"""
SMALL = (
    "--set data.path=text.txt --set data.tokenizer=chars --set context=8 --set batch_size=1 --set model.n_layer=1 --set steps=1"
    " --set model.n_embd=16 --set model.n_head=2 --set sample_tokens=0"
)
# Each line of the list with a command of its kind, in an order in which they find their files.
COMMANDS = {
    "info": "info model",
    "verify": "verify model --quick",
    "verify --device": "verify model --device cpu",
    "compare": "compare model model:bf16 --tokens 9",
    "compare of several": "compare model model:bf16 model:f16 --tokens 9",
    "compare --noise": "compare model --noise --tokens 9",
    "compare --attention": "compare model --attention ab",
    "diagnose": "diagnose port.py:build --model model",
    "trace": "trace model --tokens 4 --out trace.npz",
    "generate": "generate model --prompt a --max-new-tokens 1",
    "generate --chat": "generate model --chat --prompt a --max-new-tokens 1",
    "train": f"train shakespeare-mini --out run {SMALL}",
    "publish --dry-run": "publish run/best me/tiny --dry-run",
    "train --list-data": f"train --list-data shakespeare-mini {SMALL}",
    "export": "export model out",
    "bench": "bench model --pairs 1 --context 8 --tokens 2",
    "explore": "explore model --prompt ab",
}

QUICK = {"info", "compare", "trace", "generate", "train", "train --list-data", "export", "publish --dry-run", "explore"}


def listed() -> dict[str, list[str]]:
    """The keys of each line of the list."""
    lines = re.findall(r"^- (.*(?:\n  .*)*)", TEXT, re.MULTILINE)
    parts = [line.partition("; ")[0].partition(": ") for line in lines]
    return {name.replace("`", ""): sorted(re.findall(r"`(\w+)`", keys)) for name, _, keys in parts}


@pytest.mark.parametrize("commands", [QUICK, pytest.param({*COMMANDS} - QUICK, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_the_keys_are_those_of_the_output(
    commands: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A program reads a key by its name: one that is renamed, or added and not listed, is not found."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "chat.json").write_text('{"before": "Q: ", "after": " A:"}')
    (tmp_path / "port.py").write_text(PORT)
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question.\n" * 20)
    assert listed().keys() == {*COMMANDS}
    for name, command in COMMANDS.items():
        if name in commands:
            check(name, command, capsys)
    assert main(["train", "--list", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["json_version"] == 4


def check(name: str, command: str, capsys: pytest.CaptureFixture) -> None:
    assert main([*shlex.split(command), "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body.pop("json_version") == 4, command
    assert sorted(body) == listed()[name], command


def test_what_is_read_first_is_there() -> None:
    """A table of promises beside another one: each command has a row, and each key of a row is in the list."""
    rows = [[cell.strip() for cell in row.split(" | ")] for row in re.findall(r"^\| (.*`gpt2 .*) \|$", TEXT, re.MULTILINE)]
    rows = [row for row in rows if "--settings" not in row[1]]  # whose keys are those of a recipe
    words = [re.search(r"`gpt2 (\w+(?: --list-data)?)(.*?)`", row[1]) for row in rows]
    assert {found[1].split()[0] for found in words} == {*NAMES}
    every = listed() | {"publish": [*listed()["publish --dry-run"], "wrong"]}
    for row, found in zip(rows, words, strict=True):
        keys = every["compare of several" if found[2].startswith(" A B C") else found[1]]
        assert {*re.findall(r"`(\w+)`", row[3])} <= {*keys}, row
    assert TEXT.count("\n") < 80
