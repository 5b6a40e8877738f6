"""Windows of a token stream, addressed by (seed, step, rank): what step 700 reads depends on nothing that came before it.

Resuming is then exact by construction, and so is a change of the number of ranks that share a batch.
"""

from __future__ import annotations

import numpy as np


def batch(
    ids: np.ndarray, context: int, size: int, *, seed: int, step: int, rank: int = 0, ranks: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Random windows for one step: inputs and the same shifted by one, both (size // ranks, context), int64.

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
    starts = np.random.default_rng((seed, step)).integers(0, len(ids) - context, size)
    mine = starts[rank * (size // ranks) : (rank + 1) * (size // ranks)]
    windows = mine[:, None] + np.arange(context + 1)
    taken = np.asarray(ids[windows], dtype=np.int64)
    return taken[:, :-1], taken[:, 1:]
