"""Draw training windows as a function of (seed, step, rank), so that a resumed run reads the same tokens."""

from functools import lru_cache

import numpy as np


def batch(
    ids: np.ndarray, context: int, size: int, *, seed: int, step: int, stride: int = 0, rank: int = 0, ranks: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return one step's windows: inputs, and targets shifted by one token; both (size // ranks, context), int64.

    Windows start at random places. With ``stride`` they start at its multiples, each once per epoch in a new random order; a
    stride of ``context`` reads each token once per epoch. All ranks draw the same ``size`` starts and take their own slice, so
    the global batch does not depend on ``ranks``.

    Raises ValueError: fewer than ``context + 1`` ids, a ``size`` that ``ranks`` does not divide, or a ``rank`` out of range.
    """
    if len(ids) < context + 1:
        raise ValueError(f"{len(ids)} tokens hold no window of {context} and its next token")
    if size % ranks:
        raise ValueError(f"a batch of {size} does not divide among {ranks} ranks")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not in 0 .. {ranks - 1}")
    if stride:
        windows = (len(ids) - context - 1) // stride + 1
        draws = range(step * size, (step + 1) * size)
        starts = np.array([_order(windows, seed, draw // windows)[draw % windows] for draw in draws]) * stride
    else:
        starts = np.random.default_rng((seed, step)).integers(0, len(ids) - context, size)
    own = starts[rank * (size // ranks) : (rank + 1) * (size // ranks)]
    tokens = np.asarray(ids[own[:, None] + np.arange(context + 1)], dtype=np.int64)
    return tokens[:, :-1], tokens[:, 1:]


@lru_cache(maxsize=2)  # a batch may belong to two epochs
def _order(windows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(windows)
