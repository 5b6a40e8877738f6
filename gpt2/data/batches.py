"""Split documents, lay their tokens out in one stream (packed, or one document a row), and draw training windows from it.

The windows are a function of (seed, step, rank), so that a resumed run reads the same tokens.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from gpt2.data.documents import Document
from gpt2.errors import require_memory

UNSCORED = -100  # the target of a token that is read and not scored, as in PyTorch's cross-entropy
BLOCK = 1 << 24  # tokens that are looked at at a time
HASHED = 1 << 16  # characters of a document that decide where it goes
FILLER, READ, SCORED = 0, 1, 2  # marks of tokens: behind the end of a document in its row; of a prompt; trained on


def held_out(documents: Sequence[Document], fraction: float, seed: int) -> np.ndarray:
    """Return which documents are held out (bool): each with probability ``fraction``, by a hash of its text and ``seed``.

    So equal documents stay together, and new ones move no other. Of two or more, at least one is held out and one is not.
    """
    draws = np.array([draw(document, seed) for document in documents])
    chosen = draws < fraction
    if len(draws) > 1 and not chosen.any():
        chosen = draws == draws.min()
    if len(draws) > 1 and chosen.all():
        chosen = draws < draws.max()
    return chosen


def draw(document: Document, seed: int) -> float:
    """Return the document's number between 0 and 1, or that of its conversation."""
    content = (document.conversation or document.prompt + document.text)[:HASHED].encode("utf-8", errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=seed.to_bytes(8)).digest()) / 2**64


def lay_out(
    prompt: Sequence[int], text: Sequence[int], end: int | None, context: int, *, padded: bool, tally: Counter[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return one document's ids (int32), with ``end`` behind them (None: it goes on), and their marks (uint8).

    ``padded`` cuts it off or fills it up to ``context`` tokens; its first token is then never scored, because nothing is before
    it. ``tally`` counts "documents", "tokens", "long" (more than ``context`` tokens) and "lost" (of these, all of the text).
    """
    ids = np.array([*prompt, *text, *([] if end is None else [end])], dtype=np.int32)
    marks = np.full(len(ids), SCORED, dtype=np.uint8)
    marks[: len(prompt)] = READ
    tally.update(documents=end is not None, tokens=len(ids), long=len(ids) > context, lost=len(prompt) >= context)
    if not padded or end is None:
        return ids, marks
    row, row_marks = np.full(context, end, dtype=np.int32), np.full(context, FILLER, dtype=np.uint8)
    row[: len(ids)], row_marks[: len(ids)] = ids[:context], marks[:context]
    row_marks[0] = FILLER
    return row, row_marks


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

    Raises ValueError: fewer than ``context + 1`` ids. ``ranks`` divide ``size``, as :meth:`gpt2.train.parallel.Ranks.part` asks.
    """
    if len(ids) < context + 1:
        raise ValueError(f"{len(ids)} tokens hold no window of {context} and its next token")
    require_memory(24 * size * (context + 1), f"{size:,} windows of {context:,} tokens", "lower batch_size or context")
    if stride:
        windows = (len(ids) - context - 1) // stride + 1
        draws = range(step * size, (step + 1) * size)
        starts = np.array([_order(windows, seed, draw // windows)[draw % windows] for draw in draws]) * stride
    else:
        starts = np.random.default_rng((seed, step)).integers(0, len(ids) - context, size)
    places = starts[rank * (size // ranks) : (rank + 1) * (size // ranks)][:, None] + np.arange(context + 1)
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
