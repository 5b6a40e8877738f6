"""Processes that begin in milliseconds: forks of one process that has imported torch, which alone takes 1.7 s of CPU.

    done = run("-m", "gpt2", "info", "org/name", environ=hub.environ(home))
    process = Fork("-c", code, argument)  # then `wait`, `communicate`, `kill`, as of subprocess.Popen

Each has its own environment, working folder, output and exit, and the modules that it imports itself, such as
`huggingface_hub`, read that environment. What torch, OpenMP or the interpreter read when they begin is that of the tests, and
the interpreter is not taken down at the end, where threads may still crash it: to test those use subprocess.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
# Imported before the forks: heavy modules, and ours. Never `huggingface_hub`, which reads the environment when it is imported.
TORCH = "torch gpt2.model"
MODULES = f"{TORCH} httpx2 httpcore2 truststore yaml filelock._soft tqdm.auto rich.console"
MODULES += " tiktoken gpt2.cli.main gpt2.train.loop gpt2.comparison.run"
RANKS = f"{MODULES} torch._dynamo torch.distributed.fsdp"  # 1.3 s more: for processes that exchange gradients
# 3 s more; it imports the Hub's client: for processes whose environment says of the Hub what that of the tests says.
WITH_TRANSFORMERS = f"{MODULES} transformers.models.gpt2.modeling_gpt2"
CALL = "import pickle, sys; f, x = pickle.loads(bytes.fromhex(sys.argv[1])); print(pickle.dumps(f(*x)).hex())"


class Fork:
    """A running process; a part of the interface of subprocess.Popen, without pipes."""

    stdin = stdout = stderr = None

    def __init__(self, *words: str | Path, modules: str = MODULES, orders: Sequence[socket.socket] = (), **order: Any) -> None:
        """Start ``python WORDS``, which begin with ``-c CODE`` or ``-m MODULE``; ``strict=True`` makes warnings errors."""
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (closed at the end)
        host, (status, theirs) = _host(modules), os.pipe()
        handles = [theirs, *(file.fileno() for file in (*self._files, *orders))]
        self._files.append(os.fdopen(status, "rb", 0))  # without a buffer, in which `select` would not see the exit status
        socket.send_fds(host, [b" "], handles)
        os.close(theirs)
        order = {"words": [*map(str, words)], "environ": dict(os.environ), "cwd": Path.cwd(), "strict": False} | order
        host.sendall(json.dumps(order, default=str).encode() + b"\n")
        self.pid, self.returncode = int(self._files[2].readline()), None
        self._told = 0  # bytes of stderr that were read

    def poll(self, seconds: float | None = 0) -> int | None:
        """Return the exit status, or None if the process has not ended in so many seconds."""
        if self.returncode is None and select.select([self._files[2]], [], [], seconds)[0]:
            self.returncode = int(self._files[2].readline())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if (status := self.poll(timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return stdout and stderr."""
        self.wait(timeout)
        for file, start in zip(self._files, (0, self._told), strict=False):
            file.seek(start)
        out, err = (file.read().decode() for file in self._files[:2])
        return out, err

    def error_line(self) -> str:
        """Wait for the next line on stderr, and return it."""
        while b"\n" not in (text := os.pread(self._files[1].fileno(), 10_000, self._told)) and self.poll(0.01) is None:
            pass
        line = text[: text.find(b"\n") + 1]
        self._told += len(line)
        return line.decode()

    def __del__(self) -> None:
        for file in self._files:
            file.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process and those that it has started, also if it has ended itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def finished(process: Fork, status: int = 0, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Wait for the end, and assert the exit status."""
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    assert process.returncode == status, out[-2000:] + err[-3000:]
    return subprocess.CompletedProcess((), status, out, err)


def run(*words: str | Path, status: int = 0, timeout: float = 120, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Start a process, wait for the end, and assert the exit status."""
    return finished(Fork(*words, **settings), status, timeout)


def call(target: Callable[..., object], *arguments: object, modules: str = MODULES) -> Fork:
    """Start a process that calls ``target``; :func:`returned` waits for what it returns."""
    return Fork("-c", CALL, pickle.dumps((target, arguments)).hex(), modules=modules)


def returned(process: Fork) -> Any:
    return pickle.loads(bytes.fromhex(finished(process).stdout.splitlines()[-1]))


@functools.cache
def _host(modules: str) -> socket.socket:
    """Start the process that imports these modules and forks; it ends with this one."""
    ours, theirs = socket.socketpair()
    environ = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    words = [sys.executable, "-m", "support.forks", modules]
    if base := next((each for each in (WITH_TRANSFORMERS, MODULES, TORCH) if modules.startswith(f"{each} ")), None):
        process = Fork(*words[1:], environ=environ, modules=base, orders=[theirs])
    else:
        process = subprocess.Popen(words, env=environ, stdin=theirs)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # before it waits
    return ours


def _serve(modules: str) -> list[str]:
    """Fork for each order that comes by stdin, until the tests close it. Return in the forks alone, with the order's words."""
    orders = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, which close the socket
    for name in modules.split():
        importlib.import_module(name)
    if modules == MODULES:  # matplotlib looks for fonts when it is imported; a run of training draws its losses
        with importlib.import_module("gpt2.pages.drawing").matplotlib_of_our_own():
            pass
    assert "huggingface_hub" not in sys.modules or modules.startswith(WITH_TRANSFORMERS)
    atexit._clear()  # each fork would take torch apart at its end, one operator after another
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    gc.collect()
    gc.freeze()  # a fork that looked for garbage here would copy all these pages
    ended, ends = os.pipe()  # a byte for each fork that has ended
    os.set_blocking(ends, False)
    signal.set_wakeup_fd(ends)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}  # where to write a process's exit status
    while True:
        while ended in select.select([orders, ended], [], [])[0]:
            os.read(ended, 1000)
            for pid in [*running]:
                if (found := os.waitpid(pid, os.WNOHANG))[0]:
                    with contextlib.suppress(BrokenPipeError):  # of a process that nobody waits for
                        os.write(running[pid], b"%d\n" % os.waitstatus_to_exitcode(found[1]))
                    os.close(running.pop(pid))
        order, handles, _, _ = socket.recv_fds(orders, 1, 4)
        while order and not order.endswith(b"\n"):
            order = (more := orders.recv(1 << 16)) and order + more
        if not order:  # the tests have ended, perhaps in the middle of an order
            for pid in running:
                with contextlib.suppress(ProcessLookupError):  # those that fork have no group, and end in this way too
                    os.killpg(pid, signal.SIGKILL)
            sys.exit()
        if (pid := os.fork()) == 0:
            break
        running[pid] = handles[0]
        for handle in handles[1:]:
            os.close(handle)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for handle, place in zip(handles[1:], (1, 2, 0), strict=False):
        os.dup2(handle, place)
    if len(handles) == 3:  # not one that forks
        os.setpgid(0, 0)  # a signal to its group is for it alone
    os.write(handles[0], b"%d\n" % os.getpid())
    for handle in (orders.detach(), ended, ends, *running.values(), *handles):
        os.close(handle)
    asked = json.loads(order)
    os.environ.clear(), os.environ.update(asked["environ"])
    os.chdir(asked["cwd"])
    sys.path[0], tempfile.tempdir = "", None
    faulthandler.enable()
    if asked["strict"]:
        warnings.simplefilter("error")
    return asked["words"]


def _run(flag: str, what: str, *arguments: str) -> int:
    """Run a module or code as Python does, and return the exit status."""
    sys.argv[:] = [flag, *arguments]
    try:
        if flag == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = _run(*_serve(sys.argv[1]))
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)  # to take torch apart would copy all of its pages
