"""Shared checks: a refusal in one short line, tensors of equal bits, and code in a process of its own."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt2.errors import CheckpointError, InputError
from support import forks
from support.forks import TESTS

PROC = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")


def refused(call: Callable[[], object], *words: str, error: type[InputError] = CheckpointError, limit: int = 700) -> str:
    """The message of the error that ``call`` raises: one short line with the fault and the remedy, which contains ``words``."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    message = str(caught.value)
    assert message.isprintable(), message
    assert len(message) < limit, message
    assert "; " in message, "what, then what to do"
    for word in words:
        assert word in message, message
    return message


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its elements."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def all_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether both have the same names, and each tensor the same dtype, shape and bits."""
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def random_bits(pick: random.Random, dtype: torch.dtype) -> Tensor:
    """A tensor of random bits and a random small shape, which may be empty or a scalar."""
    shape = [pick.choice([0, 1, 2, 3, 7]) for _ in range(pick.randint(0, 4))]
    raw = torch.tensor(list(pick.randbytes(torch.Size(shape).numel() * dtype.itemsize)), dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def content(directory: Path) -> dict[str, bytes]:
    """The bytes of each file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def python(
    *arguments: str | Path, environ: Mapping[str, str] = os.environ, status: int = 0, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python in a fresh process that can import this project and `support`; assert its exit status."""
    environ = {**environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    settings = {"capture_output": True, "text": True, "timeout": 120, "check": False} | settings
    done = subprocess.run([sys.executable, *map(str, arguments)], env=environ, **settings)
    assert done.returncode == status, (done.stdout or "")[-2000:] + (done.stderr or "")[-3000:]
    return done


def report_of(code: str, *arguments: str | Path, environ: Mapping[str, str] = os.environ) -> Any:
    """The JSON in the last output line of `code`, run in a fresh process where every warning is an error."""
    return json.loads(python("-W", "error", "-c", code, *arguments, environ=environ).stdout.splitlines()[-1])


def forked(code: str, cases: Sequence[Sequence[str | Path]], status: int = 0, timeout: float = 120) -> list[tuple[str, str]]:
    """Run ``code`` with each of these arguments in a fork, and assert its exit status: stdout and stderr of each."""
    done = [forks.run("-c", code, *case, timeout=timeout) for case in cases]
    assert [each.returncode for each in done] == [status] * len(cases), [each.stderr[-3000:] for each in done]
    return [(each.stdout, each.stderr) for each in done]


# Source for such a process: its memory in bytes.
MEMORY = """
import re
from pathlib import Path
def memory(field):  # VmRSS, VmHWM (the peak), RssAnon
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")
"""
