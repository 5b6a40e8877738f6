"""Keep freed memory for the next step, or give it back to the system."""

import ctypes
import os
from typing import Any

TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # parameters of mallopt, from glibc's malloc.h
WORTH = 16e6  # bytes; for fewer, looking through the whole heap takes longer than a small model's stage


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory from now on; return whether it can (glibc can).

    glibc returns each large freed block to the system, and gets it back as new pages that the kernel fills with zeros: a tenth of
    a training step at gpt2's shape and 256 tokens, a fifth of verifying distilgpt2. The cost: 7 % more memory for that step, 14 %
    for comparing two gpt2. All threads share one heap.
    """
    mallopt = _of_libc("mallopt")
    return mallopt is not None and all(mallopt(name, to) for name, to in ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (ARENA_MAX, 1)))


def give_back_freed_memory(freed: float = WORTH) -> bool:
    """Return freed memory to the system, also that between blocks in use, if it may be much; return whether it was done.

    Where each step frees its gradients one by one, glibc keeps them as holes of the heap that the next step does not fit into:
    1 GB more for each step at gpt2's shape in float64. ``freed``: about how many bytes, as the call looks through the whole heap.
    """
    trim = _of_libc("malloc_trim") if freed >= WORTH else None
    if trim is not None:
        trim(0)
    return trim is not None


def _of_libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
