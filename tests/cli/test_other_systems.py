"""Windows and macOS, imitated: the commands run without the modules, calls and signals of Linux.

We have not run them on real ones. The imitation covers known differences: no ``fcntl``, no process groups, fewer signals, no
links without privilege, folders that cannot be opened, ``fsync`` only for files open for writing, and no replacing of a file
that is open or mapped.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2.cli.main import main

# Python runs this at its start, in every process of the command: `site` finds it by its name.
ELSEWHERE = """
import errno, faulthandler, fcntl, os, shutil, signal, sys
import asyncio, subprocess  # theirs are other ones there; these need what is taken away below
try:
    import psutil
except ImportError:
    pass
modes = fcntl.fcntl, fcntl.F_GETFL
for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog", "readline"):
    sys.modules[name] = None
for name in ("killpg", "getpgid", "setpgid", "getsid", "setsid", "fork", "getuid", "geteuid", "getgid", "getppid", "sysconf",
             "sysconf_names", "sched_getaffinity", "mkfifo", "chown", "nice", "statvfs", "wait4"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGBUS", "alarm", "setitimer", "pthread_sigmask"):
    delattr(signal, name)
del faulthandler.register
shutil._use_fd_functions = False

def symlink(*args, **kwargs):
    raise OSError(errno.EPERM, "a required privilege is not held by the client")

def open_(path, *args, real=os.open, **kwargs):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    return real(path, *args, **kwargs)

def fsync(handle, real=os.fsync):
    handle = handle if isinstance(handle, int) else handle.fileno()
    if modes[0](handle, modes[1]) & 3 == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    real(handle)

def in_use(path):
    path = os.path.realpath(path)
    opened = []
    for handle in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink("/proc/self/fd/" + handle))
        except OSError:
            pass
    with open("/proc/self/maps") as maps:
        opened += [line.split(maxsplit=5)[-1].strip() for line in maps]
    return any(name == path or name.startswith(path + os.sep) for name in opened)

def moving(real):
    def move(source, target, **kwargs):
        for path in (source, target):
            if in_use(path):
                raise PermissionError(errno.EACCES, "in use by another process", str(path))
        return real(source, target, **kwargs)
    return move

os.symlink, os.open, os.fsync, os.replace, os.rename = symlink, open_, fsync, moving(os.replace), moving(os.rename)
"""
TRAINING = {
    **{"steps": 2, "eval_every": 1, "save_every": 1, "context": 16, "batch_size": 1, "sample_tokens": 4, "eval_tokens": 64},
    **{"data.path": "FOLDER/text.txt", "optim.warmup": 1},
}
SMALL = {"data.tokenizer": "chars", "model.n_layer": 1, "model.n_embd": 16, "model.n_head": 2, "model.n_positions": 16}
SETTINGS, FROM_SCRATCH = ([f"--set={key}={value}" for key, value in each.items()] for each in (TRAINING, TRAINING | SMALL))
PORT = """
import gpt2
def build():
    return gpt2.load("shakespeare-mini")
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process on another system."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "sitecustomize.py").write_text(ELSEWHERE)
    (folder / "port.py").write_text(PORT)
    (folder / "text.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[2]}", "FOLDER": str(folder)}


COMMANDS = [
    ["info"],
    ["generate", "--max-new-tokens", "3", "--prompt", "O"],
    *[["train", "shakespeare-mini", "--out", "FOLDER/run", *FROM_SCRATCH]] * 2,
]
OTHERS = [
    ["compare", "shakespeare-mini", "shakespeare-mini:bf16", "--tokens", "16"],
    ["diagnose", "FOLDER/port.py"],
    ["train", "finetune-lora", "--init", "shakespeare-mini", "--out", "FOLDER/lora", *SETTINGS],
    # A layout that transformers does not open: it is rewritten for transformers.
    ["export", "shakespeare-mini", "FOLDER/other", "--format", "gguf"],
    ["verify", "FOLDER/other", "--quick"],
]
RUN = """
import json, sys
from gpt2.cli.main import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""


@pytest.mark.parametrize("commands", [COMMANDS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["most", "others"])
def test_commands_run_on_another_system(commands: list[list[str]], elsewhere: dict[str, str]) -> None:
    """`import fcntl` kept `gpt2 train` from starting on Windows, and SIGUSR1 `gpt2 diagnose`.

    One process runs them all, since importing torch takes longer than most.
    """
    words = json.dumps(commands).replace("FOLDER", elsewhere["FOLDER"])
    done = subprocess.run([sys.executable, "-c", RUN, words], env=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


def test_text_that_the_output_cannot_hold_is_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe on Windows accepts the 256 characters of its code page only; other characters gave a traceback."""
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="cp1252"))
    assert main(["generate", "--max-new-tokens", "0", "--prompt", "naïve 文"]) == 0
    sys.stdout.flush()
    assert pipe.getvalue() == b"na\xefve \\u6587\n"


def test_the_imitation_is_in_force(elsewhere: dict[str, str]) -> None:
    """Negative control: the imitation must be active in the process."""
    script = (
        "import json, os, signal, tempfile\n"
        "lost = []\n"
        "try:\n    import fcntl\nexcept ImportError:\n    lost.append('fcntl')\n"
        "lost += [name for home, name in ((os, 'killpg'), (signal, 'SIGUSR1')) if not hasattr(home, name)]\n"
        "file = tempfile.NamedTemporaryFile()\n"
        "for call in (lambda: os.open('.', os.O_RDONLY), lambda: os.fsync(open(file.name, 'rb')), lambda: os.symlink('a', 'b'),\n"
        "             lambda: os.replace(file.name, 'x')):\n"
        "    try:\n        call()\n    except OSError as error:\n        lost.append(error.errno)\n"
        "print(json.dumps(lost))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=elsewhere, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["fcntl", "killpg", "SIGUSR1", 13, 9, 1, 13]
