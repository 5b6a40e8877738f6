"""Run a command, and end its process group with it: a small process between the two, a script that imports none of our code.

The parent may be killed with no time to clean up, and the command may never release its interpreter. So this process ends the
group when the command has ended, when the parent writes a line to stdin, and when the parent is gone; then it also removes the
folder. A process that leaves the group goes on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress

SIGNALLED = 128  # added to the number of a signal, as shells do


def end(process: int) -> None:
    """End a process and its process group, or on Windows its children."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process, signal.SIGKILL)
        else:
            subprocess.call(("taskkill", "/F", "/T", "/PID", str(process)), stdout=subprocess.DEVNULL)


def main(folder: str, *command: str) -> None:
    """Run the command, which prints where this process does; exit with its code, or :data:`SIGNALLED` plus its signal."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def told() -> None:
        line = sys.stdin.readline()
        end(process.pid)
        if not line:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=told, daemon=True).start()
    code = process.wait()
    end(process.pid)
    os._exit(code if code >= 0 else SIGNALLED - code)


if __name__ == "__main__":
    main(*sys.argv[1:])
