"""A tokenizer of single characters: the vocabulary is the set of characters of a text.

What nanoGPT's `shakespeare_char` and most from-scratch tutorials train on: 65 ids for tiny Shakespeare. The embedding is
small and nothing has to be learnt about spelling, but a text is about three times as many tokens as with GPT-2's BPE.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from gpt2.data import bpe_files
from gpt2.errors import InputError

FILE = "chars.json"


class Chars:
    """A vocabulary of characters (code points), an id being its index in `characters`.

    Raises:
        InputError: no character at all, one twice, or a surrogate, which is half of one.
    """

    eot: int | None = None  # characters have no control token

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

    @classmethod
    def from_text(cls, text: str) -> Chars:
        """The characters of `text`, in the order of their code points."""
        return cls("".join(sorted(set(text))), where="the text")

    def __repr__(self) -> str:
        return f"Chars({self._characters!r})"

    @property
    def n_vocab(self) -> int:
        """Number of ids."""
        return len(self._characters)

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 (hex) of the characters in id order: equal ones give the same ids for every text."""
        return hashlib.sha256(self._characters.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, one per character.

        Raises:
            InputError: a character that is not in the vocabulary; there is no id for the unknown.
        """
        try:
            return list(map(self._ids.__getitem__, text))
        except KeyError:
            at = next(i for i, char in enumerate(text) if char not in self._ids)
            raise InputError(
                f"{_name(text[at])} at position {at} of the text is not among the {self.n_vocab} characters of this "
                "vocabulary; leave it out, or use a vocabulary made from a text that has it"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` (a list, or a 1-d array or tensor).

        Raises:
            InputError: an id outside 0..n_vocab-1.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if ids and not (min(ids) >= 0 and max(ids) < self.n_vocab):
            bad = next(i for i in ids if not 0 <= i < self.n_vocab)
            raise InputError(f"id {bad} is not in this vocabulary of {self.n_vocab} characters; decode with the model's own")
        return "".join([self._characters[i] for i in ids])

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """`decode(ids)` as UTF-8."""
        return self.decode(ids).encode()

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one id."""
        return self.decode_bytes([token_id])

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Chars:
        """Read `chars.json`."""
        file = Path(path) / FILE
        content = bpe_files.read_json(file)
        characters = content.get("characters") if isinstance(content, dict) else None
        if not isinstance(characters, str):
            raise InputError(f'{file} holds no {{"characters": "..."}}; it is damaged, save the tokenizer again')
        return cls(characters, where=f"{file}")

    def save(self, directory: str | os.PathLike[str], *, n_positions: int = 1024) -> list[Path]:
        """Write chars.json, and the tokenizer.json and tokenizer_config.json that transformers opens; returns the paths.

        Through transformers an unknown character is an error too.
        """
        model = {"type": "WordLevel", "vocab": self._ids, "unk_token": "<unk>"}  # not in vocab: so it raises
        steps = {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"[\s\S]"},
                "behavior": "Isolated",
                "invert": False,
            },
            "post_processor": None,
            "decoder": {"type": "Fuse"},
        }
        texts = {FILE: json.dumps({"characters": self._characters}, ensure_ascii=False) + "\n"}
        return bpe_files.write(Path(directory), texts | bpe_files.tokenizer_texts(model, steps, {}, n_positions))


def _name(char: str) -> str:
    return f"{char!r} (U+{ord(char):04X})"
