"""Text and tokens: tokenizers, token files, training windows, and Shakespeare's plays."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from gpt2.errors import InputError

__all__ = ["Tokenizer", "from_directory", "holds_tokenizer"]

FILES = ("chars.json", "words.json", "vocab.json", "encoder.json", "tokenizer.json")  # one of them means a tokenizer


class Tokenizer(Protocol):
    """The methods of every tokenizer: those of :mod:`gpt2.data.bpe`, :mod:`gpt2.data.chars` and :mod:`gpt2.data.words`."""

    @property
    def n_vocab(self) -> int:
        """Number of ids, which are 0..n_vocab-1."""

    @property
    def eot(self) -> int | None:
        """Id that ends a text, or None."""

    @property
    def fingerprint(self) -> str:
        """Sha256 (hex); equal fingerprints mean equal ids for every text."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in it are ordinary characters."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids`."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id."""

    def save(self, directory: str | os.PathLike[str], *, n_positions: int) -> list[Path]:
        """Write the files that :func:`from_directory` and transformers read; return their paths."""


def from_directory(path: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer of a directory: characters from `chars.json`, words from `words.json`, else a byte-level BPE.

    Raises:
        InputError: no tokenizer there, files of two tokenizers, or damaged files.
    """
    from gpt2.data import chars, words
    from gpt2.data.bpe import BPE
    from gpt2.data.bpe_files import FILES

    path = Path(path)
    if not path.is_dir():
        raise InputError(f"{path} is not a directory; give the one that holds the tokenizer's files")
    own: dict[str, type[chars.Chars] | type[words.Words]] = {chars.FILE: chars.Chars, words.FILE: words.Words}
    present = [name for name in (*own, *(name for pair in FILES for name in pair)) if (path / name).is_file()]
    if not present or present[0] not in own:
        return BPE.from_directory(path)
    if len(present) > 1:
        both = f"{present[0]} and {present[1]}"
        raise InputError(f"{path} holds {both}, two tokenizers; remove the one that the model was not made with")
    return own[present[0]].from_directory(path)


def holds_tokenizer(directory: Path) -> bool:
    """Whether a directory has a file of a tokenizer, complete or not."""
    return any((directory / name).is_file() for name in FILES)
