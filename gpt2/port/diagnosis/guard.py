"""Ends a diagnosis whose parent is gone: a small process beside the worker, run as a script that imports nothing of ours.

The parent may be ended in a way that leaves it no time to clean up (SIGTERM, SIGKILL, a closed terminal), and the worker may be
in code that gives its interpreter no turn to notice. So a third process waits for the end of a pipe that the parent alone holds
open, then ends the worker with all that it has started, and removes its folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress


def end(process: int) -> None:
    """End a process, and where the system has process groups, the group that it leads."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process, signal.SIGKILL)
        else:
            os.kill(process, signal.SIGTERM)  # on Windows this is TerminateProcess


def main(folder: str) -> None:
    """Wait until stdin, whose first line is the worker's process id, comes to its end."""
    worker = sys.stdin.readline()
    sys.stdin.read()
    if worker:
        end(int(worker))
    for _ in range(100):  # what was just killed may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1])
