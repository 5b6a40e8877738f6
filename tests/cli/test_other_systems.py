"""Other systems, imitated: the commands run without the modules, calls and signals that Windows lacks."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
from support import forks
from support.random_models import write_checkpoint

from gpt2.cli.main import main

# A fork runs this before our modules; every process of the command at its start: `site` finds it by its name.
ELSEWHERE = """
import asyncio, faulthandler, os, shutil, signal, subprocess, sys  # theirs are other ones there; these need what goes below
try:
    import psutil
except ImportError:
    pass
for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog", "readline"):
    sys.modules[name] = None
calls = "killpg getpgid setpgid getsid setsid fork getuid geteuid getppid sysconf sysconf_names sched_getaffinity chown statvfs"
signals = "SIGUSR1 SIGUSR2 SIGHUP SIGALRM SIGCHLD SIGBUS alarm setitimer pthread_sigmask"
for home, names in ((os, calls), (signal, signals)):
    for name in names.split():
        delattr(home, name)
del faulthandler.register
shutil._use_fd_functions = False
"""
SETTINGS = "steps=2 eval_every=1 save_every=1 context=16 batch_size=1 sample_tokens=4 eval_tokens=64 optim.warmup=1"
SETTINGS += " data.path=text.txt data.tokenizer=chars model.n_layer=1 model.n_embd=16 model.n_head=2 model.n_positions=16"
TRAIN = ["train", "shakespeare-mini", "--out", "run", *(f"--set={each}" for each in SETTINGS.split())]
COMMANDS = [["info"], ["generate", "--max-new-tokens", "3", "--prompt", "O"], TRAIN, TRAIN]
COMPARE = ["compare", "shakespeare-mini", "shakespeare-mini:bf16", "--tokens", "16"]
OTHERS = [COMPARE, ["diagnose", "port.py", "--model", "model"], ["verify", "model", "--quick"]]
RUN = """
import json
for name in [name for name in sys.modules if name.partition(".")[0] == "gpt2"]:
    del sys.modules[name]
from gpt2.cli.main import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
assert "fcntl" in sys.modules and sys.modules["fcntl"] is None, "the imitation is in force"
"""


@pytest.mark.parametrize("commands", [COMMANDS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["most", "others"])
def test_commands_run_on_another_system(commands: list[list[str]], tmp_path: Path) -> None:
    """`import fcntl` kept `gpt2 train` from starting on Windows, and SIGUSR1 `gpt2 diagnose`. One process runs all."""
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    (tmp_path / "port.py").write_text("import gpt2\ndef build():\n    return gpt2.load('model')\n")
    write_checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    done = forks.run("-c", ELSEWHERE + RUN, json.dumps(commands), environ=environ, cwd=tmp_path)
    assert "Traceback" not in done.stderr


def test_text_that_the_output_cannot_hold_is_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe on Windows accepts the 256 characters of its code page only; other characters gave a traceback."""
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, encoding="cp1252"))
    assert main(["generate", "--max-new-tokens", "0", "--prompt", "naïve 文"]) == 0
    sys.stdout.flush()
    assert pipe.getvalue() == b"na\xefve \\u6587\n"
