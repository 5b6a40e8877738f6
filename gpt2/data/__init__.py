"""Text and tokens. Knows no model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from gpt2.errors import InputError

__all__ = ["Tokenizer", "from_directory", "holds_tokenizer"]

FILES = ("chars.json", "words.json", "vocab.json", "encoder.json", "tokenizer.json")  # each tells of a tokenizer


class Tokenizer(Protocol):
    """What every tokenizer here can do: those of :mod:`gpt2.data.bpe`, :mod:`gpt2.data.chars` and :mod:`gpt2.data.words`."""

    @property
    def n_vocab(self) -> int:
        """Number of ids, 0..n_vocab-1."""

    @property
    def eot(self) -> int | None:
        """Id that ends a text, or None."""

    @property
    def fingerprint(self) -> str:
        """Sha256 (hex): equal for two tokenizers that give every text the same ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, all of which is data."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, exactly."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id."""

    def save(self, directory: str | os.PathLike[str], *, n_positions: int) -> list[Path]:
        """Write the files that :func:`from_directory` and transformers read."""


def from_directory(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer whose files lie in a directory: characters by `chars.json`, words by `words.json`, else byte-level BPE.

    Raises:
        InputError: no such files, those of two tokenizers, or damaged ones.
    """
    from gpt2.data import chars, words
    from gpt2.data.bpe import BPE
    from gpt2.data.bpe_files import FILES

    path = Path(path)
    if not path.is_dir():
        raise InputError(f"{path} is not a directory; give the one that holds the tokenizer's files")
    own: dict[str, type[chars.Chars] | type[words.Words]] = {chars.FILE: chars.Chars, words.FILE: words.Words}
    there = [name for name in (*own, *(name for pair in FILES for name in pair)) if (path / name).is_file()]
    if not there or there[0] not in own:
        return BPE.from_directory(path)
    if len(there) > 1:
        raise InputError(
            f"{path} holds {there[0]} and {there[1]}, two tokenizers; remove the one that the model was not made with"
        )
    return own[there[0]].from_directory(path)


def holds_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer's files lie in a directory, whole or not."""
    return any((directory / name).is_file() for name in FILES)
