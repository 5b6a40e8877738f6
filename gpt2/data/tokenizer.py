"""The base class of all tokenizers: tokens by id, the ids that end a text, and decoding."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from gpt2.data import chat, files
from gpt2.data.chat import ChatFormat
from gpt2.errors import InputError

HIGHEST_ID = 10_000_000  # no file that is read has room for more


def require_id(highest: int) -> None:
    """Raise ValueError if the highest id of a vocabulary is so high that a list up to it would fill the memory."""
    if highest > HIGHEST_ID:
        raise ValueError(f"an id of {highest:,}, and no vocabulary is so large")


class Encoding(dict[str, Any]):
    """What a call of a tokenizer returns: a dictionary whose two entries are attributes too."""

    def __init__(self, input_ids: Any, attention_mask: Any) -> None:
        super().__init__(input_ids=input_ids, attention_mask=attention_mask)
        self.input_ids, self.attention_mask = input_ids, attention_mask


class Tokenizer(ABC):
    """Tokens by id; subclasses (the `tokenizers` library, SentencePiece, characters, words) add encoding.

    ``n_vocab`` is the highest id plus one, special tokens included; a model's vocabulary may be padded to more. ``eos`` is the
    tokenizer's own end-of-text id, or None; ``stated`` are the ids at which the model's own files say that a text ends, or None
    if they say nothing. ``special_tokens`` maps the tokens that are ordinary characters in a text, unless asked for, to ids.
    ``chat`` is the format of questions and answers that the model was trained on, or None.
    """

    eos: int | None = None
    stated: tuple[int, ...] | None = None
    special_tokens: Mapping[str, int] = {}
    added: Mapping[int, Any] = {}  # the ids of tokens that stand outside the model's own vocabulary
    exact = True  # the bytes of a text's ids, joined, are the text
    by_transformers = False  # AutoTokenizer itself made it
    folder: Path | None = None  # where it was read from
    kept: dict[str, bytes]  # the files that it was read from, by their names
    elsewhere: Mapping[str, str] = {}  # entries of the file by which the program that it is made for splits a text otherwise
    chat: ChatFormat | None = None

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        """Take the bytes of each id. Raises ValueError: an id is so high that a list up to it would fill the memory."""
        require_id(highest := max(tokens, default=-1))
        self._bytes = [tokens.get(i) for i in range(highest + 1)]  # None: an id that no token has
        self.n_vocab, self.kept = len(self._bytes), {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_vocab={self.n_vocab})"

    def __len__(self) -> int:
        return self.n_vocab

    @property
    def eos_token_id(self) -> int | None:
        """:attr:`eos`, under the name that transformers' tokenizers have."""
        return self.eos

    def __call__(self, text: str | Sequence[str], *, return_tensors: str | None = None, special: bool = False) -> Encoding:
        """Return ``input_ids`` and ``attention_mask`` of a text, or of each of a list, as a transformers tokenizer does.

        They are lists, with the ids of :meth:`encode_prompt`; with ``return_tensors="pt"`` int64 tensors (1, T) or (B, T),
        shorter texts padded on the left, as :func:`gpt2.generate` takes them.

        Raises InputError: something else than texts, or another ``return_tensors``.
        """
        texts = [text] if isinstance(text, str) else text
        if return_tensors not in (None, "pt"):
            raise InputError(f"return_tensors is {return_tensors!r}; give 'pt', or leave it out for lists")
        if not isinstance(texts, list | tuple) or not all(isinstance(each, str) for each in texts):
            raise InputError("a tokenizer encodes a text or a list of texts; to turn ids into text, use decode")
        rows = [self.encode_prompt(each, special=special) for each in texts]
        if return_tensors is None:
            masks = [[1] * len(row) for row in rows]
            return Encoding(rows, masks) if text is texts else Encoding(rows[0], masks[0])
        import torch

        width = max(map(len, rows), default=0)
        pad = self.eot or 0  # any id: the mask hides it
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], dtype=torch.long)
        masks = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return Encoding(ids, torch.tensor(masks, dtype=torch.long))

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids at which a text ends: those that the model's files state, else the tokenizer's own; perhaps none."""
        return self.stated if self.stated is not None else () if self.eos is None else (self.eos,)

    @property
    def eot(self) -> int | None:
        """The id that is put behind a text: the first of :attr:`ends` that has a token, else the tokenizer's own, else None."""
        return next(filter(self.holds, self.ends), self.eos)

    @property
    def parting(self) -> int:
        """The id that parts documents: :attr:`eot`, else a line end. Raises InputError: neither is there."""
        if self.eot is not None:
            return self.eot
        try:
            return self.encode("\n")[0]
        except InputError:
            why = "this tokenizer has neither an end-of-text token nor a line end to part documents"
            raise InputError(f"{why}; give a single text, or a model with another tokenizer") from None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Sha256 (hex); equal fingerprints mean equal ids for every text, from whatever files."""

    @abstractmethod
    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`, without a template. The text of a special token is ordinary characters, unless `special`.

        So no prompt or file can put a control token into a model's input by itself. Otherwise these are the ids of transformers'
        ``AutoTokenizer(...)(text, add_special_tokens=False)``. Raises InputError: a lone surrogate, or a character that the
        vocabulary lacks where it has no unknown token.
        """

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids that a model reads before it goes on: :meth:`encode` with the tokens that the template adds."""
        return self.encode(text, special=special)

    @abstractmethod
    def texts(self, n_positions: int) -> dict[str, str | bytes]:
        """Return file name -> content, without the chat format."""

    def save(self, directory: str | os.PathLike[str], *, n_positions: int = 1024) -> list[Path]:
        """Write the files that :func:`gpt2.data.from_directory` and transformers read; return their paths.

        Files that were read are written back unchanged. `n_positions` becomes the `model_max_length` of the others.
        """
        texts = self.texts(n_positions)
        for name in (*files.LEGACY, chat.FILE):
            if name not in texts:
                (Path(directory) / name).unlink(missing_ok=True)
        if self.chat is not None:
            config = json.loads(texts.get("tokenizer_config.json", "{}"))
            if config.get("chat_template") != self.chat.jinja():
                texts["tokenizer_config.json"] = json.dumps(config | {"chat_template": self.chat.jinja()}, indent=2) + "\n"
            texts[chat.FILE] = self.chat.text()
        return files.write(Path(directory), texts)

    def with_tokens(self, tokens: Sequence[str]) -> Self:
        """Return this tokenizer with ``tokens`` as further ids, in order after the last; those it has by this way are kept.

        :meth:`encode` then gives one id for each of them wherever it stands in a text, the longest first. Raises InputError:
        a token is empty or in the vocabulary already, or a tokenizer that the `tokenizers` library does not run.
        """
        if tokens:
            kind = type(self).__name__.lower()
            raise InputError(f"add_tokens: a vocabulary of {kind} takes no new tokens; use a byte-level BPE")
        return self

    def holds(self, token_id: int) -> bool:
        """Return whether a token has this id."""
        return 0 <= token_id < self.n_vocab and self._bytes[token_id] is not None

    def token(self, token_id: int) -> str:
        """Return the token of an id as a message names it."""
        return self.decode([token_id])

    def shown(self, token_id: int) -> str:
        """Return the text of one id for a report, also of an id without a token."""
        return self.decode([token_id]) if self.holds(token_id) else f"[{token_id}]"

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special tokens included; bytes that are not UTF-8 become U+FFFD (:meth:`decode_bytes`)."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids` (a list, or a 1-d array or tensor). Raises InputError: an id without a token."""
        return b"".join([self._bytes[i] or b"" for i in self._known(ids)])

    def _known(self, ids: Iterable[int]) -> list[int]:
        """Return a list of ids. Raises InputError: one of them has no token."""
        try:
            ids = list(ids.tolist() if hasattr(ids, "tolist") else ids)
            if ids and not (min(ids) >= 0 and max(ids) < self.n_vocab and None not in map(self._bytes.__getitem__, ids)):
                bad = next(i for i in ids if not 0 <= i < self.n_vocab or self._bytes[i] is None)
                raise InputError(f"id {bad} is not in this vocabulary of {self.n_vocab} tokens; decode with the model's own")
        except TypeError:
            raise InputError("a tokenizer decodes the ids of one text; of a batch give one row, as in ids[0]") from None
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one id adds to a text behind other tokens; they may be a part of a character.

        In a byte-level vocabulary these are the id's bytes anywhere. In others they depend on the neighbours: a word brings a
        space except at the beginning of a text, so the sum over a text may differ from :meth:`decode_bytes` there.
        """
        return self.decode_bytes([token_id])

    def bytes_by_id(self) -> list[int]:
        """Return the number of bytes of each id, as :meth:`token_bytes` gives them; 0 for an id without a token."""
        return [len(self.token_bytes(i)) if self.holds(i) else 0 for i in range(self.n_vocab)]

    def lengths(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text` that each id of :meth:`encode` stands for; what a normaliser drops counts too."""
        return [len(self.token_bytes(i)) for i in self.encode(text)]


def refuse_surrogates(text: str) -> None:
    """Raise InputError at the first lone surrogate, which tiktoken would silently replace by U+FFFD."""
    if not isinstance(text, str):
        raise InputError(f"a tokenizer encodes a text, and was given {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}: it has no UTF-8 form"
        remedy = "read the source as UTF-8, or repair it with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        raise InputError(f"{found}; {remedy}") from None
