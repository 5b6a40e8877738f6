"""Windows of a token stream, addressed by (seed, step, rank): what step 700 reads depends on nothing that came before it.

Resuming is then exact by construction, and so is a change of the number of ranks that share a batch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def batch(
    ids: np.ndarray, context: int, size: int, *, seed: int, step: int, stride: int = 0, rank: int = 0, ranks: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Windows for one step: inputs and the same shifted by one, both (size // ranks, context), int64.

    They begin anywhere, at random. With ``stride`` they begin at its multiples, every one once before any comes again, in an
    order that the seed draws for each time through the text; a stride of ``context`` reads each token once a time.

    All ranks draw the same ``size`` starting points and each takes its own slice, so the global batch is the same however
    many share it.

    Raises:
        ValueError: fewer than ``context + 1`` ids, ``size`` not divisible by ``ranks``, or no such ``rank``.
    """
    if len(ids) < context + 1:
        raise ValueError(f"{len(ids)} tokens hold no window of {context} and its next token")
    if size % ranks:
        raise ValueError(f"a batch of {size} does not divide among {ranks} ranks")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is none of 0 .. {ranks - 1}")
    if stride:
        windows = (len(ids) - context - 1) // stride + 1
        turns = np.arange(step * size, (step + 1) * size)
        starts = np.array([_order(windows, seed, turn // windows)[turn % windows] for turn in turns.tolist()]) * stride
    else:
        starts = np.random.default_rng((seed, step)).integers(0, len(ids) - context, size)
    mine = starts[rank * (size // ranks) : (rank + 1) * (size // ranks)]
    taken = np.asarray(ids[mine[:, None] + np.arange(context + 1)], dtype=np.int64)
    return taken[:, :-1], taken[:, 1:]


@lru_cache(maxsize=2)  # a batch may end one time through the text and begin the next
def _order(windows: int, seed: int, time: int) -> np.ndarray:
    return np.random.default_rng((seed, time)).permutation(windows)
