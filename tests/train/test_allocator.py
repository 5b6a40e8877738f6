"""Freed memory that stays with the process."""

import ctypes
import subprocess
import sys

import pytest

from gpt2.train.allocator import keep_freed_memory

STEP = """
import resource, sys
import torch
from gpt2.train.allocator import keep_freed_memory

def faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def step():
    [torch.zeros(10_000_000) for _ in range(3)]

if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(6):  # until the pool has the shape that the steps ask for
    step()
print(faults(lambda: [step() for _ in range(6)]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_steps_after_the_first_touch_hardly_a_new_page():
    """A parameter of mallopt under another's number is accepted in silence, and changes nothing."""
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", STEP, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "given back")
    )
    assert given_back > 50_000
    assert kept < given_back / 4  # now and then a block begins elsewhere


def test_a_c_library_without_the_switch_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
