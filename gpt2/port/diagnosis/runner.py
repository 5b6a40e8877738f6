"""Run ``gpt2 diagnose FILE.py:build``: somebody's file in a process of its own, whatever it does there.

It may hang, crash, print, exit, or ask for a GPU. The process is watched from outside, its output is not read, and its answer
comes back in a file. Any failure is one line that names the user's own line of code. When this process ends, in whatever way,
the other ends too (:mod:`gpt2.port.diagnosis.guard`).
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

TIMEOUT = 60.0  # seconds for the file's own code: import, build, one forward
DIAGNOSIS_FACTOR = 20  # the diagnosis may take so many times as long
MAX_PRINTED = 4000  # bytes kept of what it prints
MAX_ANSWER = 64_000_000  # bytes read of its answer; usually there are a few thousand
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


def run(text: str, model: str, *, timeout: float = TIMEOUT, revision: str | None = None, offline: bool = False) -> Diagnosis:
    """Build the model in a process of its own, and diagnose it there.

    Args:
        text: ``FILE.py:build``, where ``build(checkpoint_dir)`` or ``build()`` returns the module.
        timeout: seconds for the file's own code; the diagnosis itself may take longer.

    Raises:
        InputError: no such file, function or model; anything that keeps the module from being built and run.
    """
    port = target(text)
    _fetch(model, revision, offline)
    with tempfile.TemporaryDirectory(prefix="gpt2-diagnose-", ignore_cleanup_errors=True) as folder:
        limits = {"short": timeout, "whole": timeout * DIAGNOSIS_FACTOR}
        order = {"file": str(port.path), "name": port.name, "model": model, "revision": revision, "offline": offline, **limits}
        (Path(folder) / "order.json").write_text(json.dumps(order))
        code, printed = _watch(Path(folder), port, timeout)
        answer = Path(folder) / "answer.json"
        if not answer.exists():
            raise InputError(_died(Path(folder), port, code, printed))
        with open(answer, "rb") as file:
            return _diagnosis(file.read(MAX_ANSWER), port)


def _fetch(model: str, revision: str | None, offline: bool) -> None:
    """Download the checkpoint before the timeout begins."""
    from gpt2.checkpoint.checkpoint import open_checkpoint
    from gpt2.checkpoint.names import VERIFIES, ModelName

    open_checkpoint(ModelName.parse(model, VERIFIES, revision=revision), offline=offline)


def _watch(folder: Path, port: Target, timeout: float) -> tuple[int, str]:
    """Run the worker to its end or its timeout: its exit code, and the end of what it printed."""
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
            limit = timeout * DIAGNOSIS_FACTOR if stage == "diagnosis" else timeout
            if stage == "start":  # our own code: it imports torch
                since, limit = start, timeout * DIAGNOSIS_FACTOR
            if time.monotonic() - since > limit and not (folder / "answer.json").exists():
                raise InputError(_hung(folder, port, stage, limit))
            if stage == "done":
                break
            time.sleep(0.02)
    finally:
        end(process.pid)
        process.wait()
        guard.kill()
        guard.communicate()
        reader.join(1)
        if not reader.is_alive():  # a process that left the group may still hold the other end
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
        printed[0] = (printed[0] + chunk)[-MAX_PRINTED:]


REASONS = {"SIGKILL": ": out of memory?", "SIGBUS": ": was the model's weight file cut short meanwhile?"}
STAGES = {"import": "being imported", "build": "its {name}()", "forward": "its forward, called on 2 x 8 ids,", "diagnosis": "it"}


def _hung(folder: Path, port: Target, stage: str, limit: float) -> str:
    time.sleep(0.3)  # meanwhile the worker writes where it is
    what = STAGES.get(stage, "it").format(name=port.name)
    return f"{port.shown}: {what} did not end in {limit:g} s{_line(folder, port)}; find out why, or give it longer with --timeout"


def _died(folder: Path, port: Target, code: int, printed: str) -> str:
    stage, _ = _stage(folder)
    during = {"import": "while it was imported", "build": f"in {port.name}()", "forward": "in its forward"}.get(stage, "")
    killer = signal.Signals(-code).name if code < 0 else ""
    how = f"was killed by {killer}" if killer else f"ended the process (exit code {code})"
    why = REASONS.get(killer, "")
    if stage == "start":
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
        return f"{port.shown}: the process could not be started ({last[:200]}); is this Python's torch in order?"
    return f"{port.shown}: it {how} {during}{_line(folder, port)}{why}; {port.name} has to return the module, and nothing else"


def _line(folder: Path, port: Target) -> str:
    """The last line of the user's own code that the process was seen in."""
    try:
        dump = (folder / "where").read_text(errors="replace")
    except OSError:
        return ""
    lines = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', dump)
    own = [(Path(file).name, line, name) for file, line, name in lines if Path(file).parent == port.path.parent]
    return f" ({own[0][0]}, line {own[0][1]}, in {own[0][2]})" if own else ""


def _diagnosis(answer: bytes, port: Target) -> Diagnosis:
    """Parse the worker's answer. The file that ran there may have written anything."""

    def number(value: float | None) -> float:
        return float("inf") if value is None else value

    try:
        answered = json.loads(answer)
        if "error" not in answered:
            first = answered["first_divergence"]
            return Diagnosis(
                **{**answered, "causes": tuple(Cause(**cause) for cause in answered["causes"]), "notes": tuple(answered["notes"]),
                   "first_divergence": first and Divergence(first["point"], first["layer"], number(first["error"])),
                   "logits_error": number(answered["logits_error"])}
            )  # fmt: skip
        error = answered["error"] + ""
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(
            f"{port.shown}: its process left no diagnosis that can be read; is the disk full, or does it write answer.json?"
        ) from None
    raise InputError(error)
