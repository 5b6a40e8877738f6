"""Draw training windows as a function of (seed, step, rank), so that a resumed run reads the same tokens."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

UNSCORED = -100  # the target of a token that is read and not scored, as in PyTorch's cross-entropy
BLOCK = 1 << 24  # tokens that are looked at at a time
FILLER, READ, SCORED = 0, 1, 2  # marks of tokens: behind the end of a document in its row; of a prompt; trained on


def batch(
    ids: np.ndarray,
    context: int,
    size: int,
    *,
    seed: int,
    step: int,
    stride: int = 0,
    rank: int = 0,
    ranks: int = 1,
    marks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return one step's windows: inputs, and targets shifted by one token; both (size // ranks, context), int64.

    Windows start at random places, or, with ``stride``, at its multiples, each once per epoch in a new random order. All ranks
    draw the same ``size`` starts and take their own slice, so the global batch does not depend on ``ranks``. Where the ``marks``
    (of each id, uint8) are not SCORED, the target is :data:`UNSCORED`.

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
    places = own[:, None] + np.arange(context + 1)
    tokens = np.asarray(ids[places], dtype=np.int64)
    targets = tokens[:, 1:]
    return tokens[:, :-1], targets if marks is None else np.where(marks[places[:, 1:]] == SCORED, targets, UNSCORED)


def slices(ids: np.ndarray) -> Iterator[slice]:
    """Yield the parts in which a stream larger than memory is looked at."""
    return (slice(at, at + BLOCK) for at in range(0, len(ids), BLOCK))


def documents(ids: np.ndarray, end: int) -> np.ndarray | None:
    """Return each token's document in its row (..., T), counted from 0; None if no row has two. A document ends with ``end``."""
    ends = ids == end
    return ends.cumsum(-1) - ends if ends[..., :-1].any() else None


@lru_cache(maxsize=2)  # a batch may belong to two epochs
def _order(windows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(windows)
