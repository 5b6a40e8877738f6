"""Shared checks: a refusal in one short line, tensors of equal bits, and code in a process of its own."""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt2.errors import CheckpointError, InputError
from support import forks

PROC = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")


def refused(call: Callable[[], object], *words: str, error: type[InputError] = CheckpointError) -> str:
    """The message of the error that ``call`` raises: one short line with the fault and the remedy, which contains ``words``."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    message = str(caught.value)
    assert message.isprintable(), message
    assert len(message) < 700, message
    assert "; " in message, "what, then what to do"
    for word in words:
        assert word in message, message
    return message


def mostly_slow(cases: Iterable[Any], quick: int = 3) -> list[Any]:
    """Test parameters, of which all but every ``quick``-th are slow; a compiled port is: the compiler takes seconds to import."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    slow = [number % quick > 0 or str(case[0]).startswith("compiled") for number, case in enumerate(values)]
    return [pytest.param(*case, marks=[pytest.mark.slow] * mark) for case, mark in zip(values, slow, strict=True)]


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


def mapped(path: Path) -> list[tuple[range, str]]:
    """The address ranges where a file is mapped in this process, and their rights. Linux."""
    rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return [(range(*(int(end, 16) for end in row[0].split("-"))), row[1]) for row in rows]


def content(directory: Path) -> dict[str, bytes]:
    """The bytes of each file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def report_of(code: str, *arguments: str | Path) -> Any:
    """The JSON in the last output line of `code`, run in a process of its own where every warning is an error."""
    return json.loads(forks.run("-c", code, *arguments, strict=True).stdout.splitlines()[-1])
