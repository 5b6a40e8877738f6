"""Error lines of commands and functions, scripts of tools/ as modules, the embedded checkpoint as files, running processes."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import gpt2
from gpt2.cli.main import main
from gpt2.errors import InputError
from support import forks

ASSET = Path(gpt2.__file__).parent / "assets" / "shakespeare-mini"


def load_script(name: str) -> ModuleType:
    """``tools/NAME.py`` as a module."""
    path = Path(__file__).parents[2] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watch_a_fork(command: list[str], folder: Path, limit: float, progress: object = None) -> int | None:
    """Do what `runner.watch` does in a fork, which need not import torch; tests of the runner itself start a real process."""
    flag, code, *arguments = command[command.index("-c") :]
    begin = "import os, sys; os.dup2(os.pipe()[0], 0)\n"  # a stdin that does not end
    begin += f"sys.dont_write_bytecode = {'-B' in command}\n"
    process = forks.Fork(flag, begin + code, *arguments)
    try:
        return process.poll(min(limit, 120))
    finally:
        process.kill()
        (folder / "printed").write_text("".join(process.communicate()))


def alive(pid: int | str) -> bool:
    """Whether a process runs; one that has ended may be a zombie until its parent reads its status. Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def refusal(call: Callable, *args: object, **kwargs: object) -> str:
    """The one error line of ``call``."""
    with pytest.raises(InputError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """Run a command that ends with ``code``; return its stdout."""
    assert main([*argv]) == code
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict:
    """The object that a command writes with ``--json -``."""
    return json.loads(printed(capsys, *argv, "--json", "-", code=code))


def mistake(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command with a user error: exit code 2, nothing on stdout; return the one line on stderr."""
    assert main([*argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("gpt2")
    return err
