"""Split documents into training and validation, and lay their tokens out in one stream: packed, or one document a row."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from gpt2.data.batches import FILLER, READ, SCORED
from gpt2.data.documents import Document

HASHED = 1 << 16  # characters of a document that decide where it goes


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
