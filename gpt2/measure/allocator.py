"""Keep freed memory for the next step, or give it back to the system."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # parameters of mallopt, from glibc's malloc.h


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory from now on; return whether it can (glibc can).

    glibc returns each large freed block to the system, and gets it back as new pages that the kernel fills with zeros. With
    hundreds of megabytes per step this takes a tenth of a training step at gpt2's shape and 256 tokens, and a fifth of verifying
    distilgpt2. The cost: 7 % more memory for that step, 14 % for comparing two gpt2. All threads share one heap: verifying two
    blocks of gpt2's shape takes 0.3 GB and 2.7 s of the kernel's time less than with a heap for each thread.
    """
    if os.name != "posix":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, to) for name, to in ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (ARENA_MAX, 1)))


def give_back_freed_memory() -> bool:
    """Return freed memory to the system, also that between blocks in use; return whether the C library can (glibc can).

    Where each step frees its gradients one by one, glibc keeps them as holes of the heap that the next step does not fit into:
    1 GB more for each step at gpt2's shape in float64.
    """
    if os.name != "posix":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True
