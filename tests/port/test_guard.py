"""The guard of a port's process: whatever the port starts ends with it."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.checks import mostly_slow
from support.commands import alive

from gpt2.port.diagnosis.runner import watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

LEAVING = """
import os, subprocess, sys, time
sleep = "import os, time; open(os.sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(600)"
child = [sys.executable, "-c", sleep, sys.argv[1]]
subprocess.Popen(child, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    subprocess.Popen(child, env={}, start_new_session=True)
    os._exit(0)
while len(open(sys.argv[1], "a+").seek(0) or open(sys.argv[1]).read().split()) < 2:
    time.sleep(0.01)
"""


ENDINGS = ["sys.exit(3)", "os.kill(os.getppid(), 15)", "time.sleep(600)", "os.kill(os.getppid(), 19)", "os.kill(os.getppid(), 9)"]
ENDINGS += ["os.kill(os.getpid(), 19)"]


@pytest.mark.parametrize("ending", mostly_slow(ENDINGS, 2))
def test_children_that_have_left_its_session_end_too(ending: str, tmp_path: Path) -> None:
    """Bug: after setsid, and as orphans without our environment, they outlived a program that ended, hung or stopped itself,
    or its parent."""
    watch([sys.executable, "-S", "-c", LEAVING + ending, str(tmp_path / "pids")], tmp_path, 2.0)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_children_that_live_for_a_millisecond_end_too(tmp_path: Path) -> None:
    """Bug: each starts the next and ends, so that no walk through /proc met one: they went on."""
    file = tmp_path / "generations"
    comet = """
    if os.fork() == 0:
        os.setsid()
        while time.time() < end:
            open(sys.argv[1], "a").write("x")
            if os.fork():
                os._exit(0)
    time.sleep(0.3)
    """
    begin = "import os, sys, time; end = time.time() + 5"
    assert watch([sys.executable, "-S", "-c", begin + textwrap.dedent(comet), str(file)], tmp_path, 20.0) == 0
    generations = file.stat().st_size
    time.sleep(0.3)
    assert file.stat().st_size == generations > 5
