"""Processes that begin in milliseconds: forks of one process that has imported torch, which alone takes 1.7 s of CPU.

All workers of `-n 2` share this process.

    done = run("-m", "gpt2", "info", "org/name", environ=hub.environ(home))
    process = start("-c", code, argument)  # then `wait`, `communicate`, `kill`, as of subprocess.Popen

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
import time
import traceback
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
# Imported before the forks: heavy modules, and ours. Never `huggingface_hub`, which reads the environment when it is imported.
TORCH = "torch gpt2.model gpt2.config"
MODULES = f"{TORCH} safetensors.torch numpy httpx2 httpcore2 truststore yaml filelock._soft tqdm.auto rich.console tiktoken"
MODULES += " tokenizers torch._dynamo torch.distributed.fsdp gpt2.cli.main gpt2.checkpoint.hub gpt2.train.loop"
MODULES += " gpt2.comparison.run"
HOST = "support.forks"
CALL = """
import pickle, sys
target, arguments = pickle.loads(bytes.fromhex(sys.argv[1]))
print(pickle.dumps(target(*arguments)).hex())
"""


class Fork:
    """A running process; a part of the interface of subprocess.Popen, without pipes."""

    stdin = stdout = stderr = None

    def __init__(self, words: tuple[str, ...], environ: Mapping[str, str], cwd: Path | None, strict: bool, modules: str) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (closed at the end)
        status, theirs = os.pipe()
        order = {"words": words, "environ": dict(environ), "cwd": str(cwd or Path.cwd()), "strict": strict}
        handles = [int(words[-1])] if words[1] == HOST else []
        socket.send_fds(_host(modules), [b" "], [*(file.fileno() for file in self._files), theirs, *handles])
        _host(modules).sendall(json.dumps(order).encode() + b"\n")
        os.close(theirs)
        self._status = os.fdopen(status)
        self.pid, self.returncode = int(self._status.readline()), None
        self._told = 0  # bytes of stderr that were read

    def poll(self, seconds: float | None = 0) -> int | None:
        """Return the exit status, or None if the process has not ended in so many seconds."""
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            self.returncode = int(self._status.readline())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if (status := self.poll(timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return stdout and stderr."""
        self.wait(timeout)
        for file, start in zip(self._files, (0, self._told), strict=True):
            file.seek(start)
        out, err = (file.read().decode() for file in self._files)
        return out, err

    def error_line(self) -> str:
        """Wait for the next line on stderr, and return it."""
        while b"\n" not in (text := os.pread(self._files[1].fileno(), 10_000, self._told)) and self.poll() is None:
            time.sleep(0.01)
        line = text[: text.find(b"\n") + 1]
        self._told += len(line)
        return line.decode()

    def __del__(self) -> None:
        for file in (*self._files, self._status):
            file.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process and those that it has started, also if it has ended itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def start(
    *words: str | Path,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    strict: bool = False,
    modules: str = MODULES,
) -> Fork:
    """Start ``python WORDS``, which begin with ``-c CODE`` or ``-m MODULE``; ``strict`` makes warnings errors."""
    return Fork(tuple(map(str, words)), environ, cwd, strict, modules)


def finished(process: Fork, status: int = 0, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Wait for the end, and assert the exit status."""
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    assert process.returncode == status, out[-2000:] + err[-3000:]
    return subprocess.CompletedProcess((), status, out, err)


def run(*words: str | Path, status: int = 0, timeout: float = 120, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Do what :func:`start` does, wait for the end, and assert the exit status."""
    return finished(start(*words, **settings), status, timeout)


def call(target: Callable[..., object], *arguments: object) -> Fork:
    """Start a process that calls ``target``; :func:`returned` waits for what it returns."""
    return start("-c", CALL, pickle.dumps((target, arguments)).hex())


def returned(process: Fork) -> Any:
    return pickle.loads(bytes.fromhex(finished(process).stdout.splitlines()[-1]))


@functools.cache
def _host(modules: str) -> socket.socket:
    """Connect to the process that imports these modules and forks; the first worker to ask starts it, it ends with the last."""
    import fcntl

    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    place = f"{tempfile.gettempdir()}/forks-{zlib.crc32(f'{run} {modules}'.encode()):x}"
    if base := next((each for each in (MODULES, TORCH) if modules.startswith(f"{each} ")), None):
        _host(base)  # before the lock is taken
    ours = socket.socket(socket.AF_UNIX)
    atexit.register(ours.close)
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(place):
            ours.connect(place)
            return ours
        theirs = socket.socket(socket.AF_UNIX)
        theirs.bind(place)
        theirs.listen()
        environ = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
        words = ["-m", HOST, modules, str(theirs.fileno())]
        if base:
            start(*words, environ=environ, modules=base)
        else:
            words, quiet = [sys.executable, *words], subprocess.DEVNULL
            process = subprocess.Popen(words, env=environ, pass_fds=[theirs.fileno()], stdin=quiet)
            process.returncode = 0  # nobody waits: the other worker may need it for longer
        theirs.close()
        ours.connect(place)
    return ours


def _serve(asked: socket.socket, modules: str) -> list[str]:
    """Fork for each order, until the tests close their sockets. Return in the forks alone, with the words of the order."""
    for name in modules.split():
        importlib.import_module(name)
    if modules == MODULES:
        from gpt2.pages.drawing import matplotlib_of_our_own

        with matplotlib_of_our_own():  # looks for fonts when it is imported; a run of training draws its losses
            pass
    assert "huggingface_hub" not in sys.modules
    atexit._clear()  # each fork would take torch apart at its end, one operator after another
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    gc.collect()
    gc.freeze()  # a fork that looked for garbage here would copy all these pages
    ended, ends = socket.socketpair()  # a byte for each fork that has ended
    ended.setblocking(False), ends.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends.fileno())
    tests, running = [], {}  # sockets of the tests; where to write a process's exit status
    while True:
        for ready in select.select([asked, ended, *tests], [], [])[0]:
            if ready is asked:
                tests.append(asked.accept()[0])
            elif ready is ended:
                ended.recv(1000)
                while running and (found := os.waitpid(-1, os.WNOHANG))[0]:
                    status = running.pop(found[0])
                    with contextlib.suppress(BrokenPipeError):  # of a process that nobody waits for
                        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(found[1]))
                    os.close(status)
            elif not (received := socket.recv_fds(ready, 1, 4))[0]:
                tests.remove(ready)
                if not tests:
                    os.unlink(asked.getsockname())
                    sys.exit()
            else:
                order, (out, err, status, *handles) = received[:2]
                while not order.endswith(b"\n"):
                    order += ready.recv(1 << 16)
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (asked, ended, ends, *tests):
                        each.close()  # a socket that is let go is a warning, an error where they are strict
                    return _begin(json.loads(order), out, err, *handles)
                os.setpgid(pid, pid)  # a signal to its group is for it alone
                os.write(status, b"%d\n" % pid)
                running[pid] = status
                for handle in (out, err, *handles):
                    os.close(handle)


def _begin(order: dict, out: int, err: int, asked: int | None = None) -> list[str]:
    """Take a place in the world: the output, signals, environment and folder of the order. Return its words."""
    for handle, place in ((out, 1), (err, 2)):
        os.dup2(handle, place)
        os.close(handle)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a script inherit that it is ignored
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["cwd"])
    sys.path[0], tempfile.tempdir = "", None
    faulthandler.enable()
    if order["strict"]:
        warnings.simplefilter("error")
    return order["words"] if asked is None else [*order["words"][:-1], str(asked)]


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
    status = _run(*_serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[1]))
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)  # to take torch apart would copy all of its pages
