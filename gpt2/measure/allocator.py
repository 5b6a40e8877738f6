"""Keep freed memory in the process, so that the next step need not request it from the kernel again."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, from glibc's malloc.h


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory from now on; return whether it can (glibc can).

    glibc returns each large freed block to the system, and gets it back as new pages that the kernel fills with zeros. With
    hundreds of megabytes per step this takes a tenth of a training step at gpt2's shape and 256 tokens, and a fifth of verifying
    distilgpt2. The cost: 7 % more memory for that step, 14 % for comparing two gpt2.
    """
    if os.name != "posix":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, -1))
