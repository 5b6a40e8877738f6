"""Memory that a step frees is kept for the next step."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, from glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed, for the rest of the process; say whether it could be told.

    glibc gives every large block back to the system when it is freed, and a step frees gradients and activations by the hundred
    megabytes. The next step gets them again as empty pages, which the kernel fills with zeros one by one as they are touched: of
    a step at gpt2's shape and 256 tokens, a tenth. Kept, they are used again as they are. A process never holds more for it than
    at its highest point, give or take what lies between blocks. Other C libraries have no such switch.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, -1))
