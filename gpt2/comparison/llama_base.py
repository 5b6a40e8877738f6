"""Read what llama.cpp's ``llama-perplexity --kl-divergence-base`` wrote: a text's ids, and a model's log-probabilities of it.

The layout, all little-endian (llama.cpp, tools/perplexity/perplexity.cpp): the bytes ``_logits_``; int32 tokens in a chunk,
vocabulary, chunks; the int32 ids of all chunks; then a row of uint16 for each scored token. A row begins with two float32, the
step and the lowest log-probability, and log-probability i is lowest + step * row[4 + i]; an odd vocabulary has one number more.
Only the second half of a chunk is scored. Its writer ignores errors: a full disk leaves a file that is cut short.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpt2.data.files import opened
from gpt2.errors import InputError
from gpt2.measure.windows import RowWindows

MAGIC = b"_logits_"
HEAD = len(MAGIC) + 3 * 4  # bytes
SCALES = 4  # uint16 at the beginning of each row, which hold two float32
CUT = 16  # nats: a smaller probability than the largest times e^-16 is raised to that


@dataclass(frozen=True)
class LlamaBase:
    """The file at ``path``: ids (N,), and how they were cut; log-probabilities are read when they are asked for."""

    path: Path
    ids: Tensor
    windows: RowWindows
    vocab: int
    rows: np.ndarray  # (M, 4 + V or one more) uint16, of the mapped file

    def logits(self, scored: slice) -> Tensor:
        """Return the log-probabilities (R, V) of some scored tokens, in the order of the windows; float32.

        Raises InputError: a row that no model can have written.
        """
        rows = np.array(self.rows[scored])
        scales = torch.from_numpy(rows[:, :SCALES].copy().view("<f4"))  # (R, 2): the step, the lowest
        step, lowest = scales[:, :1], scales[:, 1:]
        bad = ~(scales.isfinite().all(1) & (step[:, 0] >= 0) & (lowest[:, 0] <= 0))
        if bool(bad.any()):
            row = (scored.start or 0) + int(bad.nonzero()[0])
            raise InputError(f"{self.path}: its row {row:,} holds no log-probabilities; the file is damaged, write it again")
        steps = torch.from_numpy(rows[:, SCALES : SCALES + self.vocab].astype(np.float32))
        return steps.mul_(step).add_(lowest)


def is_llama_base(path: Path) -> bool:
    """Return whether a file begins as llama.cpp's do."""
    try:
        with opened(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_llama_base(path: Path) -> LlamaBase:
    """Open the file. Raises InputError: it cannot be read, or its size contradicts its header."""
    try:
        size = path.stat().st_size
        with opened(path) as file:
            head = file.read(HEAD)
        if len(head) < HEAD or not head.startswith(MAGIC):
            raise InputError(f"{path}: is not a file of llama.cpp's --kl-divergence-base; write it again")
        context, vocab, chunks = (int(n) for n in np.frombuffer(head, "<i4", offset=len(MAGIC)))
        if min(context - 2, vocab, chunks) < 1:
            what = f"states {chunks:,} chunks of {context:,} tokens, {vocab:,} in the vocabulary"
            raise InputError(f"{path}: {what}; it is damaged, write it again")
        width, scored = SCALES + vocab + vocab % 2, context - 1 - context // 2
        ids_end = HEAD + 4 * chunks * context
        needed = ids_end + 2 * chunks * scored * width
        if size != needed:
            why = "llama.cpp does not notice a full disk" if size < needed else "it is damaged"
            raise InputError(f"{path}: has {size:,} bytes where its header says {needed:,} ({why}); write it again")
        ids = torch.from_numpy(np.fromfile(path, "<i4", chunks * context, offset=HEAD).astype(np.int64))
        rows = np.memmap(path, "<u2", "r", offset=ids_end, shape=(chunks * scored, width))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check that it is there, and yours to read") from None
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise InputError(f"{path}: holds an id outside its vocabulary of {vocab:,}; it is damaged, write it again")
    return LlamaBase(path, ids, RowWindows(context - 1, skipped=context // 2), vocab, rows)
