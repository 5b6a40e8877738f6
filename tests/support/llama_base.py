"""Write the file of llama.cpp's --kl-divergence-base, in our own words, by the layout that its writer has."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def rounded_row(logits: np.ndarray) -> bytes:
    """One scored token: the step and the lowest log-probability as float32, and every logit in steps above the lowest."""
    logits = logits.astype(np.float32)
    high = logits.max()
    low = max(logits.min(), high - 16)
    log_sum = np.float32(np.log(np.exp((logits - high).astype(np.float64)).sum()))
    step = np.float32((high - low) / 65535)
    steps = np.zeros(len(logits) + len(logits) % 2, np.uint16)
    if step:
        steps[: len(logits)] = np.where(logits > low, np.rint((logits - low) / step), 0)
    return struct.pack("<2f", step, low - high - log_sum) + steps.astype("<u2").tobytes()


def write_llama_base(path: Path, ids: np.ndarray, logits: np.ndarray) -> Path:
    """Write chunks of ids (C, T) and all their logits (C, T, V); the second half of each chunk is kept, without its last."""
    chunks, context = ids.shape
    head = b"_logits_" + struct.pack("<3i", context, logits.shape[-1], chunks) + ids.astype("<i4").tobytes()
    rows = (rounded_row(logits[c, t]) for c in range(chunks) for t in range(context // 2, context - 1))
    path.write_bytes(head + b"".join(rows))
    return path
