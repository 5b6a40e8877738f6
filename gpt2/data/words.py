"""A word tokenizer: its vocabulary is the most frequent words of a text, each with the space before it.

Other words are encoded as bytes, so any text can be decoded, and bits per byte compare with other models'. For the `tokenizers`
library this is a byte-level BPE without merges that accepts whole pieces (`ignore_merges`).
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

from gpt2.config import quoted
from gpt2.data import files
from gpt2.data.bpe import byte_level_pipeline, entries_wanted, too_few
from gpt2.data.byte_level import N_BYTES, PATTERN, byte_alphabet, openai_byte_order
from gpt2.data.files import END_OF_TEXT
from gpt2.data.library import LibraryTokenizer
from gpt2.data.tokenizer import Tokenizer, refuse_surrogates
from gpt2.errors import InputError

FILE = "words.json"


class Words(Tokenizer):
    """A vocabulary of the 256 bytes, then `words` in their order, then `<|endoftext|>`.

    `words` are pieces of text as :data:`gpt2.data.byte_level.PATTERN` splits it, of two bytes or more. Raises InputError, which
    names ``where``: a word that is no such piece, so that no text would get its id; or a repeated word.
    """

    def __init__(self, words: Sequence[str], *, where: str = "the vocabulary") -> None:
        singles = [bytes([byte_alphabet().index(char)]) for char in openai_byte_order()]
        self._byte_ids = {token[0]: i for i, token in enumerate(singles)}
        self._words = list(words)
        self._ids = {word: N_BYTES + i for i, word in enumerate(self._words)}
        for i, word in enumerate(self._words):
            if self._ids[word] != N_BYTES + i:
                twice = f"listed twice, as words {i} and {self._ids[word] - N_BYTES}"
                raise InputError(f"{where}: {quoted(word)} is {twice}; remove one")
            refuse_surrogates(word)
            if len(word.encode()) < 2 or _pieces(word) != [word]:
                raise InputError(f"{where}: {quoted(word)} is not one word of two bytes or more; make the vocabulary from a text")
        super().__init__([*singles, *(word.encode() for word in self._words), END_OF_TEXT.encode()])
        self.eos = self.n_vocab - 1
        self.special_tokens = {END_OF_TEXT: self.eos}

    @classmethod
    def from_text(cls, text: str, vocab_size: int) -> Self:
        """Take the most frequent words, ties in text order. Raises InputError: `vocab_size` below 257, or too few words."""
        wanted = entries_wanted(vocab_size, text)
        counts = Counter(piece for piece in _pieces(text) if len(piece.encode()) > 1)
        if len(counts) < wanted:
            raise too_few(vocab_size, text, len(counts), "different words")
        return cls([word for word, _ in counts.most_common(wanted)], where="the text")

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(["words", self._words]).encode()).hexdigest()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return one id for each known word, and one for each byte of other words. Raises InputError: a lone surrogate."""
        refuse_surrogates(text)
        ids: list[int] = []
        if special and END_OF_TEXT in text:
            first, *rest = text.split(END_OF_TEXT)
            return self.encode(first) + [i for part in rest for i in (self.n_vocab - 1, *self.encode(part))]
        for piece in _pieces(text):
            ids += [self._ids[piece]] if piece in self._ids else [self._byte_ids[byte] for byte in piece.encode()]
        return ids

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        (words,) = files.read_fields(file := Path(path) / FILE, words=["..."])
        return cls(words, where=f"{file}")

    def texts(self, n_positions: int) -> dict[str, str | bytes]:
        from tokenizers import AddedToken

        alphabet = byte_alphabet()
        tokens = ["".join(alphabet[byte] for byte in token or b"") for token in self._bytes[:-1]] + [END_OF_TEXT]
        pipeline = byte_level_pipeline({token: i for i, token in enumerate(tokens)}, [], ignore_merges=True)
        pipeline.add_tokens([AddedToken(END_OF_TEXT, special=True)])
        roles = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        own = {FILE: json.dumps({"words": self._words}, ensure_ascii=False) + "\n"}
        return {**own, **LibraryTokenizer(pipeline, roles=roles).texts(n_positions)}


def _pieces(text: str) -> list[str]:
    import regex  # also a dependency of tiktoken; `re` does not know \p{L}

    pieces: list[str] = regex.findall(PATTERN, text)
    return pieces
