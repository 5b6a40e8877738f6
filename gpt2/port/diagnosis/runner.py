"""``gpt2 diagnose FILE.py:build``: somebody's file run in a process of its own, whatever it does there.

It may hang, crash, print, exit, or ask for a GPU: the process is watched from outside, its streams go nowhere, and all that it
has to say comes back in a file. Whatever goes wrong is one line that names the user's own line of code. When this process ends,
in whatever way, the other ends too (:mod:`gpt2.port.diagnosis.guard`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

from gpt2.errors import InputError
from gpt2.port.diagnosis import guard as guard_script
from gpt2.port.diagnosis.guard import end
from gpt2.port.diagnosis.report import Cause, Diagnosis, Divergence

PATIENCE = 60.0  # seconds for what the file does of its own: import, build, one forward
WHOLE = 20  # times that for the diagnosis
TAIL = 4000  # bytes kept of what it prints
LIMIT = 64_000_000  # bytes read of its answer, which has some thousands
START = "import sys; sys.path.insert(0, sys.argv[2]); from gpt2.port.diagnosis.worker import main; main(sys.argv[1])"


@dataclass(frozen=True)
class Target:
    """A file, and what in it is called."""

    path: Path
    name: str

    @property
    def shown(self) -> str:
        return f"{self.path.name}:{self.name}"


def target(text: str) -> Target:
    """``FILE.py:build``; ``FILE.py`` alone means ``build``.

    Raises:
        InputError: no such file.
    """
    file, colon, name = text.rpartition(":")
    if not colon or name.endswith(".py") or os.sep in name:
        file, name = text, "build"
    path = Path(file).expanduser()
    if path.is_dir():
        raise InputError(f"{file}: is a directory; give the Python file that builds your model, as in {path / 'port.py'}:build")
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.py"))[:5] if path.parent.is_dir() else []
        there = f"; there are {', '.join(near)}" if near else ""
        raise InputError(f"{file}: no such file{there}; give a Python file and a function in it, as in port.py:build")
    if not name.isidentifier():
        raise InputError(f"{text}: {name!r} is no name of a function; write {path.name}:build")
    return Target(path.resolve(), name)


def run(text: str, model: str, *, timeout: float = PATIENCE, revision: str | None = None, offline: bool = False) -> Diagnosis:
    """Build the model in a process of its own, and diagnose it there.

    Args:
        text: ``FILE.py:build``, where ``build(checkpoint_dir)`` or ``build()`` returns the module.
        timeout: seconds for what the file does of its own; the diagnosis itself may take longer.

    Raises:
        InputError: no such file, function or model; anything that keeps the module from being built and run.
    """
    found = target(text)
    _fetch(model, revision, offline)
    with tempfile.TemporaryDirectory(prefix="gpt2-diagnose-", ignore_cleanup_errors=True) as folder:
        limits = {"short": timeout, "whole": timeout * WHOLE}
        order = {"file": str(found.path), "name": found.name, "model": model, "revision": revision, "offline": offline, **limits}
        (Path(folder) / "order.json").write_text(json.dumps(order))
        code, printed = _watch(Path(folder), found, timeout)
        answer = Path(folder) / "answer.json"
        if not answer.exists():
            raise InputError(_died(Path(folder), found, code, printed))
        with open(answer, "rb") as file:
            return _diagnosis(file.read(LIMIT), found)


def _fetch(model: str, revision: str | None, offline: bool) -> None:
    """Have the checkpoint on this machine before the clock runs."""
    from gpt2.checkpoint.checkpoint import open_checkpoint
    from gpt2.checkpoint.names import VERIFIES, ModelName

    open_checkpoint(ModelName.parse(model, VERIFIES, revision=revision), offline=offline)


def _watch(folder: Path, found: Target, timeout: float) -> tuple[int, str]:
    """The process from start to end: its exit code, and the end of what it printed."""
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-P", "-c", START, str(folder), root]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    guard = _guard(process, folder)
    assert process.stdout is not None
    printed: list[bytes] = [b""]
    reader = Thread(target=_read, args=(process.stdout, printed), daemon=True)
    reader.start()
    try:
        start = time.monotonic()
        while process.poll() is None:
            stage, since = _stage(folder)
            limit = timeout * WHOLE if stage == "diagnosis" else timeout
            if stage == "start":  # ours: importing torch
                since, limit = start, timeout * WHOLE
            if time.monotonic() - since > limit and not (folder / "answer.json").exists():
                raise InputError(_hung(folder, found, stage, limit))
            if stage == "done":
                break
            time.sleep(0.02)
    finally:
        end(process.pid)
        process.wait()
        guard.kill()
        guard.communicate()
        reader.join(1)
        if not reader.is_alive():  # else somebody that left the group still holds the other end
            process.stdout.close()
    return process.returncode, printed[0].decode(errors="replace")


def _guard(process: subprocess.Popen[bytes], folder: Path) -> subprocess.Popen[bytes]:
    """The process that ends ``process`` if this one is gone, in a session of its own: Ctrl-C is for this one."""
    command = [sys.executable, "-I", "-S", guard_script.__file__, str(folder)]
    nowhere = subprocess.DEVNULL
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    assert guard.stdin is not None
    guard.stdin.write(b"%d\n" % process.pid)
    guard.stdin.flush()
    return guard


def _stage(folder: Path) -> tuple[str, float]:
    """The last line of the file that the worker adds one to as it begins each stage."""
    try:
        stage, since = (folder / "stage").read_text().splitlines()[-1].split()
        return stage, float(since)
    except (OSError, ValueError, IndexError):
        return "start", 0.0


def _read(stream: IO[bytes], printed: list[bytes]) -> None:
    while chunk := os.read(stream.fileno(), 65536):
        printed[0] = (printed[0] + chunk)[-TAIL:]


WHY = {"SIGKILL": ": out of memory?", "SIGBUS": ": was the model's weight file cut short meanwhile?"}
WORDS = {"import": "being imported", "build": "its {name}()", "forward": "its forward, called on 2 x 8 ids,", "diagnosis": "it"}


def _hung(folder: Path, found: Target, stage: str, limit: float) -> str:
    time.sleep(0.3)  # in which it writes where it is
    what = WORDS.get(stage, "it").format(name=found.name)
    return (
        f"{found.shown}: {what} did not end in {limit:g} s{_line(folder, found)}; find out why, or give it longer with --timeout"
    )


def _died(folder: Path, found: Target, code: int, printed: str) -> str:
    stage, _ = _stage(folder)
    during = {"import": "while it was imported", "build": f"in {found.name}()", "forward": "in its forward"}.get(stage, "")
    killer = signal.Signals(-code).name if code < 0 else ""
    how = f"was killed by {killer}" if killer else f"ended the process (exit code {code})"
    why = WHY.get(killer, "")
    if stage == "start":
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
        return f"{found.shown}: the process could not be started ({last[:200]}); is this Python's torch in order?"
    return f"{found.shown}: it {how} {during}{_line(folder, found)}{why}; {found.name} has to return the module, and nothing else"


def _line(folder: Path, found: Target) -> str:
    """The last line of the user's own code that the process was seen in."""
    try:
        dump = (folder / "where").read_text(errors="replace")
    except OSError:
        return ""
    lines = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', dump)
    own = [(Path(file).name, line, name) for file, line, name in lines if Path(file).parent == found.path.parent]
    return f" ({own[0][0]}, line {own[0][1]}, in {own[0][2]})" if own else ""


def _diagnosis(answer: bytes, found: Target) -> Diagnosis:
    """The worker's answer. Anybody's file ran there, so it may be anything."""

    def number(value: float | None) -> float:
        return float("inf") if value is None else value

    try:
        told = json.loads(answer)
        if "error" not in told:
            first = told["first_divergence"]
            return Diagnosis(
                **{**told, "causes": tuple(Cause(**cause) for cause in told["causes"]), "notes": tuple(told["notes"]),
                   "first_divergence": first and Divergence(first["point"], first["layer"], number(first["error"])),
                   "logits_error": number(told["logits_error"])}
            )  # fmt: skip
        error = told["error"] + ""
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(
            f"{found.shown}: its process left no diagnosis that can be read; is the disk full, or does it write answer.json?"
        ) from None
    raise InputError(error)
