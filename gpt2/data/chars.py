"""A character tokenizer: its vocabulary is the set of characters of a text, as in nanoGPT's `shakespeare_char` and most
from-scratch tutorials (65 ids for tiny Shakespeare). A text has about three times as many tokens as with GPT-2's BPE.
"""

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Self

from gpt2.data import files
from gpt2.data.library import LibraryTokenizer
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import InputError

FILE = "chars.json"


class Chars(Tokenizer):
    """A vocabulary of characters; an id is the index in `characters`. Raises InputError: none, a repeated one, or a surrogate."""

    def __init__(self, characters: str, *, where: str = "the vocabulary") -> None:
        if not characters:
            raise InputError(f"{where}: no characters; give a text that is not empty")
        self._ids = {char: i for i, char in enumerate(characters)}
        for i, char in enumerate(characters):
            if self._ids[char] != i:
                raise InputError(f"{where}: {_name(char)} is listed twice, with ids {i} and {self._ids[char]}; remove one")
            if "\ud800" <= char <= "\udfff":
                raise InputError(f"{where}: {_name(char)} is a lone surrogate, no character; read the source as UTF-8")
        self._characters = characters
        super().__init__([char.encode() for char in characters])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Make a vocabulary of the text's characters, in code point order."""
        return cls("".join(sorted(set(text))), where="the text")

    def __repr__(self) -> str:
        return f"Chars({self._characters!r})"

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._characters.encode()).hexdigest()

    def knows(self, character: str) -> bool:
        return character in self._ids

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return one id per character; there are no special tokens. Raises InputError: an unknown character."""
        try:
            return list(map(self._ids.__getitem__, text))
        except KeyError:
            at = next(i for i, char in enumerate(text) if char not in self._ids)
            unknown = f"{_name(text[at])} at position {at} of the text is not among the {self.n_vocab} characters"
            remedy = "leave it out, or use a vocabulary made from a text that has it"
            raise InputError(f"{unknown} of this vocabulary; {remedy}") from None

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        (characters,) = files.read_fields(file := Path(path) / FILE, characters="...")
        return cls(characters, where=f"{file}")

    def texts(self, n_positions: int) -> dict[str, str | bytes]:
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Pipeline

        pipeline = Pipeline(models.WordLevel(self._ids, unk_token="<unk>"))  # not in vocab: transformers then raises too
        pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        pipeline.decoder = decoders.Fuse()
        own = {FILE: json.dumps({"characters": self._characters}, ensure_ascii=False) + "\n"}
        return {**own, **LibraryTokenizer(pipeline).texts(n_positions)}


def _name(char: str) -> str:
    return f"{char!r} (U+{ord(char):04X})"
