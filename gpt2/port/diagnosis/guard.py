"""Run a user's program, and end all of it: a small process between the two, a script that imports none of our code.

The parent may be killed with no time to clean up, and the program's children may leave its session, or be orphans. So this
process inherits them, on Linux also its orphans (PR_SET_CHILD_SUBREAPER); the program's own parent, which it may end or stop, is
a second one (:func:`run`). It ends them all when the program has ended, when the parent writes a line to stdin, and when the
parent is gone; then it also removes the folder. Without /proc, as on macOS, it ends the program's process group: a child that has
left the group goes on.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

CODE, REFUSED, RUN = "code", "refused", "--run"  # files in the folder, and the word that calls for :func:`run`
PR_SET_CHILD_SUBREAPER = 36
SECONDS, TRIES = 10.0, 100  # to end all; to remove the folder, in which one may still be writing


def end(process: int) -> None:
    """End a process and its process group, or on Windows its children; on Linux also all that descend from this process.

    A process whose parent ends becomes a child of this one. So it kills its children until it has none, also
    those that live for a millisecond, which a walk through /proc does not meet.
    """
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process, signal.SIGKILL)
        else:
            subprocess.call(("taskkill", "/F", "/T", "/PID", str(process)), stdout=subprocess.DEVNULL)
    limit = time.monotonic() + SECONDS * (sys.platform == "linux")
    with suppress(ChildProcessError):  # there is none
        while time.monotonic() < limit:
            for each in children():
                with suppress(OSError):
                    os.kill(each, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def children() -> list[int]:
    """Return the children of this process, which Linux lists by its threads."""
    found = list[int]()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/children", "rb") as file:
            found += map(int, file.read().split())
    return found


def run(folder: str, *command: str) -> None:
    """Run the command, and leave in the folder its exit code, or the number of the error that kept it from starting."""
    try:
        name, number = CODE, subprocess.call(command)
    except OSError as error:
        name, number = REFUSED, error.errno or 0
    with suppress(OSError), open(os.path.join(folder, name), "w") as file:
        file.write(str(number))


def main(folder: str, *command: str) -> None:
    """Start the command, which prints where this process does, and end all of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    between = [sys.executable, "-I", "-S", __file__, RUN, folder]
    process = subprocess.Popen([*between, *command], stdin=subprocess.DEVNULL, start_new_session=True)
    ending = threading.Event()

    def told() -> None:
        line = sys.stdin.readline()
        ending.set()
        end(process.pid)
        for _ in range(0 if line else TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.exists(folder):
                break
            time.sleep(0.02)
        os._exit(0)

    thread = threading.Thread(target=told, daemon=True)
    thread.start()
    process.wait()
    end(process.pid)
    if ending.is_set():  # it removes the folder
        thread.join()


if __name__ == "__main__":
    run(*sys.argv[2:]) if sys.argv[1] == RUN else main(*sys.argv[1:])
