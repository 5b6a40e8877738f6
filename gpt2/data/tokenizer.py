"""The base class of all tokenizers: tokens as bytes, and decoding."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from gpt2.data import bpe_files, chat
from gpt2.data.chat import ChatFormat
from gpt2.errors import InputError


class Tokenizer(ABC):
    """Tokens by id, as bytes; subclasses (BPE, characters, words) add encoding.

    ``n_vocab`` is the number of ids, special tokens included; a model's vocabulary may be padded to more. ``eot`` is the id
    that ends a text, or None. ``chat`` is the format of questions and answers that the model was trained on, or None.
    """

    eot: int | None = None
    chat: ChatFormat | None = None

    def __init__(self, tokens: list[bytes]) -> None:
        self._bytes = tokens
        self.n_vocab = len(tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_vocab={self.n_vocab})"

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Sha256 (hex); equal fingerprints mean equal ids for every text, from whatever files."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in it are ordinary characters."""

    @abstractmethod
    def save(self, directory: str | os.PathLike[str], *, n_positions: int = 1024) -> list[Path]:
        """Write the files that :func:`gpt2.data.from_directory` and transformers read; return their paths.

        `n_positions` becomes `model_max_length`, above which transformers warns.
        """

    def _write(self, directory: Path, texts: dict[str, str]) -> list[Path]:
        """Write a tokenizer's files and the chat format, of which there is a second form for other programs."""
        if self.chat is None:
            (directory / chat.FILE).unlink(missing_ok=True)
        else:
            config = json.loads(texts["tokenizer_config.json"]) | {"chat_template": self.chat.jinja()}
            texts |= {"tokenizer_config.json": json.dumps(config, indent=2) + "\n", chat.FILE: self.chat.text()}
        return bpe_files.write(directory, texts)

    def with_tokens(self, tokens: Sequence[str]) -> Self:
        """Return this tokenizer with ``tokens`` as further ids, in order after the last; those it has by this way are kept.

        :meth:`encode` then gives one id for each of them wherever it stands in a text, the longest first. Raises InputError:
        a token is empty or in the vocabulary already, or a tokenizer that is not a byte-level BPE.
        """
        if tokens:
            raise InputError(
                f"add_tokens: a vocabulary of {type(self).__name__.lower()} takes no new tokens; use a byte-level BPE"
            )
        return self

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special tokens included. Bytes that are not UTF-8 become U+FFFD.

        A model may stop inside a character; :meth:`decode_bytes` is exact.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids` (a list, or a 1-d array or tensor).

        Raises InputError: an id outside 0..n_vocab-1, which a model with a padded vocabulary may sample.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if ids and not (min(ids) >= 0 and max(ids) < self.n_vocab):
            bad = next(i for i in ids if not 0 <= i < self.n_vocab)
            raise InputError(f"id {bad} is not in this vocabulary of {self.n_vocab} tokens; decode with the model's own")
        return b"".join([self._bytes[i] for i in ids])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id, which may be a part of a character."""
        return self.decode_bytes([token_id])


def refuse_surrogates(text: str) -> None:
    """Raise InputError at the first lone surrogate, which tiktoken would silently replace by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}: it has no UTF-8 form; "
            "read the source as UTF-8, or repair it with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None
