"""What is written for readers holds: help, docstrings, and the files that contributors are sent to."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpt2
from gpt2.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
# What an example takes that is not here, by what stands in it; the rest is run.
NEEDS = {
    r"^(verify|bench) random:": "minutes",
    r"^torchrun": "several machines",
    r"\bgpt2(-medium|-xl)?(:bf16|:int8)?( |$)": "the official weights",
    r"out/(macbeth|step|mini)|\./my-model|ckpt\.pt|my\.txt": "files of the reader's",
    r"^train (?!--list)": "minutes",
    r"^explore(?!.*(--html|--json))": "a browser",
}


def examples() -> list[str]:
    """The commands in the examples of every help, without what is said beside them."""
    lines = [line for command in COMMANDS for line in command.EXAMPLES.splitlines() if line.startswith("  ")]
    return [re.split(r" {3,}", line.strip())[0] for line in lines if re.search(r"^  (gpt2|torchrun|echo) ", line)]


def needs(example: str) -> str | None:
    command = example.rpartition("| ")[2].removeprefix("gpt2 ")
    return next((why for pattern, why in NEEDS.items() if re.search(pattern, command)), None)


RUN = [example for example in examples() if needs(example) is None]


def test_every_command_s_help_has_examples_that_are_run() -> None:
    """A rule that excuses too much would leave nothing to run."""
    ran = {example.rpartition("gpt2 ")[2].split()[0] for example in RUN}
    assert ran >= {command.__name__.rpartition(".")[2].removesuffix("_command") for command in COMMANDS}, RUN
    assert len(RUN) >= 14


@pytest.mark.slow
@pytest.mark.parametrize("example", RUN)
def test_an_example_of_the_help_runs(example: str, tmp_path: Path) -> None:
    """That it parses does not say that it works."""
    shutil.copy(ROOT / "tests" / "support" / "faulty" / "hostile" / "sound.py", tmp_path / "port.py")
    command = re.sub(r"(^|\| )gpt2 ", rf"\1{shlex.quote(sys.executable)} -m gpt2 ", example)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["bash", "-euc", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    if "--json -" in example:
        json.loads(done.stdout)
    for file in re.findall(r"--(?:html|json|out) (\S+\.\w+)", example):
        assert (tmp_path / file).stat().st_size > 1000, file


def public() -> list[tuple[str, object]]:
    """Every public name, and every public method and property that its class defines itself."""
    found = []
    for name in gpt2.__all__:
        thing = getattr(gpt2, name)
        found.append((name, thing))
        if inspect.isclass(thing):
            own = {part: value for part, value in vars(thing).items() if not part.startswith("_")}
            kinds = (property, classmethod, staticmethod)
            found += [(f"{name}.{part}", v) for part, v in own.items() if inspect.isfunction(v) or isinstance(v, kinds)]
    return found


@pytest.mark.parametrize(("name", "thing"), public(), ids=[name for name, _ in public()])
def test_every_public_name_says_what_it_is(name: str, thing: object) -> None:
    """pydoc shows a bare signature where nobody wrote a line; of a dataclass it shows the signature as if someone had."""
    text = thing.__doc__ or ""
    assert len(text) > 15, name
    assert not text.startswith(f"{name}("), f"{name}: only the signature that dataclass writes"


def test_functions_say_what_they_raise() -> None:
    """What can go wrong with a user's input is part of what a function is."""
    for name in ("load", "load_tokenizer", "load_into", "verify", "diagnose", "generate", "save"):
        assert "Raises:" in getattr(gpt2, name).__doc__, name


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_that_are_spoken_of_are_there(name: str) -> None:
    """A guide that sends people to a file of last month's name loses them."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    if name == "CONTRIBUTING.md":
        for path in re.findall(r"`((?:gpt2|tests|tools|\.ci)/[\w/.]+)", text):
            assert (ROOT / path).exists(), path
        for word, path in re.findall(r"`([A-Z_]{4,})` (?:of|in) `([\w/.]+\.py)`", text):
            found = [ROOT / path] if "/" in path else list(ROOT.glob(f"gpt2/**/{path}"))
            assert any(re.search(rf"^{word}\b", file.read_text(), re.MULTILINE) for file in found), (word, path)


def test_the_changelog_has_this_version_and_the_licence_its_name() -> None:
    """A release without a word of what changed."""
    assert f"\n## {gpt2.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")
    assert 'license = "MIT"' in (ROOT / "pyproject.toml").read_text()
