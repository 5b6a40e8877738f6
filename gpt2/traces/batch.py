"""Choose the token ids of a trace: from a file, from a text, or random ones for a model without a tokenizer."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpt2.checkpoint.checkpoint import Checkpoint
from gpt2.config import quoted
from gpt2.data.files import decoded, read_all, reading
from gpt2.errors import InputError
from gpt2.measure.dumps import read_npy
from gpt2.measure.texts import OWN_FILE, open_text

ROWS, TOKENS = 4, 64  # batch and sequence length by default, those of llm.c's debug state
NO_TARGET = -100  # a token without a next one: torch's default ignore_index
MAX_BYTES = 1 << 26  # limit of a file of ids
SEPARATORS = re.compile(r"[\s,;\[\]()]+")
SEED = 0


@dataclass(frozen=True)
class TokenRows:
    """Token ids and next ids, each (B, T) int64, and where they came from; a token without a next one has NO_TARGET."""

    ids: Tensor
    targets: Tensor
    source: str


def read_ids(path: str | Path) -> np.ndarray:
    """Read a file of ids: an ``.npy`` of any integers, or a text of whole numbers, one line a row. Raises InputError."""
    path = Path(path)
    if path.suffix == ".npy":
        return read_npy(path, MAX_BYTES)
    with reading(path, "give a file of ids"):
        text = decoded(read_all(path, MAX_BYTES), path)
    rows: list[list[int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = [word for word in SEPARATORS.split(line) if word]
        for word in words:
            if not re.fullmatch(r"[0-9]{1,9}", word, re.ASCII):
                raise InputError(f"{path}: line {number} has {quoted(word)}, not a token id; give whole numbers")
        rows += [[int(word) for word in words]] if words else []
    if not rows:
        raise InputError(f"{path}: holds no ids; give whole numbers, one line a row")
    if all(len(row) == 1 for row in rows):
        return np.array(rows, dtype=np.int64).T  # one id a line
    if uneven := next((row for row in rows if len(row) != len(rows[0])), None):
        raise InputError(f"{path}: a line has {len(uneven)} ids and the first {len(rows[0])}; give rows of one length")
    return np.array(rows, dtype=np.int64)


def default_batch(checkpoint: Checkpoint, text: str | Path | None, tokens: int | None, *, offline: bool = False) -> TokenRows:
    """Return four rows of ``tokens`` ids each (fewer of a short ``text``, a name or a file as for
    :func:`gpt2.measure.texts.open_text`).

    Without a text, a model that has no tokenizer gets random ids. Raises InputError: no such text, one that is too short, or more
    tokens than the model has positions.
    """
    config = checkpoint.config
    length = min(TOKENS, config.n_positions) if tokens is None else tokens
    if not 1 <= length <= config.n_positions:
        raise InputError(f"{length} tokens in a row; {checkpoint.name} takes 1 to {config.n_positions:,}, choose so many")
    tokenizer = checkpoint.own_tokenizer()
    if tokenizer is None:
        if text is not None:
            raise InputError(f"{checkpoint.name}: has no tokenizer to read a text with; give ids in a file, --ids")
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(config.vocab_size, (ROWS * length + 1,), generator=generator)
        return _cut(ids, ROWS, length, f"random ids, seed {SEED}: the model has no tokenizer")
    try:
        opened = open_text(text, offline=offline)
    except InputError as error:
        raise type(error)(str(error).replace(OWN_FILE, "--text FILE")) from None
    ids = torch.tensor(opened.encode(tokenizer)[: ROWS * length + 1], dtype=torch.int64)
    if len(ids) < 2 or (tokens is not None and len(ids) <= length):
        raise InputError(f"{opened.name}: {len(ids):,} tokens are too few for a row of {length:,} and a next one; give more text")
    known = len(ids) - 1  # tokens with a next one
    rows = known // length
    if tokens is None and rows < 2:
        rows = min(2, known)  # in a single row, the batch cannot be told from a dimension of one
    length, told = min(length, known // rows), f"; {read}" if (read := opened.reading(tokenizer)) else ""
    return _cut(ids, rows, length, f"{opened.name} ({opened.source}), sha256 {opened.sha256[:16]}{told}")


def _cut(ids: Tensor, rows: int, length: int, source: str) -> TokenRows:
    count = rows * length
    return TokenRows(ids[:count].view(rows, length), ids[1 : count + 1].view(rows, length), source)
