"""End a diagnosis after its parent has ended: a small process beside the worker, a script that imports none of our code.

The parent may be killed with no time to clean up, and the worker may hold its interpreter. So this third process waits for the
end of a pipe that only the parent holds open, then ends the worker's process group and removes its folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress


def end(process: int) -> None:
    """End a process, and its process group if the system has those."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process, signal.SIGKILL)
        else:
            os.kill(process, signal.SIGTERM)  # TerminateProcess on Windows


def main(folder: str) -> None:
    """Wait for the end of stdin (its first line is the worker's process id), then clean up."""
    worker = sys.stdin.readline()
    sys.stdin.read()
    if worker:
        end(int(worker))
    for _ in range(100):  # a killed process may still be writing
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1])
