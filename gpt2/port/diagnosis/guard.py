"""Run a user's program, and end all of it: a small process between the two, a script that imports none of our code.

The parent may be killed with no time to clean up, and the program's children may leave its session, or be orphans. So this
process is the program's parent, on Linux also of its orphans (PR_SET_CHILD_SUBREAPER). It ends them all when the program has
ended, when the parent writes a line to stdin, and when the parent is gone; then it also removes the folder. Without /proc, as on
macOS, it ends the program's process group: a child that has left the group goes on.
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

# Files in the folder: the program's exit code, and the number of the error that kept it from starting.
CODE, REFUSED = "code", "refused"
PR_SET_CHILD_SUBREAPER = 36
TRIES = 100  # a killed process may still be starting others, or writing


def end(process: int) -> None:
    """End a process and its process group, if the system has those; on Linux also all that descend from this process."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process, signal.SIGKILL)
        else:
            os.kill(process, signal.SIGTERM)  # TerminateProcess on Windows
    for _ in range(TRIES):
        if not (left := descendants(os.getpid())):
            break
        for each in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.01)


def descendants(root: int) -> set[int]:
    """Return the running descendants of a process, as /proc has them."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in b"ZX":
                parents[int(name)] = int(parent)
    family, size = {root}, 0
    while size < len(family):
        size = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return family - {root}


def main(folder: str, *command: str) -> None:
    """Start the command, which prints where this process does, and leave its exit code in the folder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        with open(os.path.join(folder, REFUSED), "w") as file:
            file.write(str(error.errno))
        return

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
    code = process.wait()
    with suppress(OSError), open(os.path.join(folder, CODE), "w") as file:
        file.write(str(code))
    end(process.pid)
    if ending.is_set():  # it removes the folder
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
