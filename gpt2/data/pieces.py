"""GPT-SW3's tokenizer: SentencePiece itself, behind a clean-up of the text; not in the `tokenizers` library.

Source: huggingface/transformers, models/gpt_sw3/tokenization_gpt_sw3.py and tokenization_python.py (added tokens).
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt2.data.files import END_OF_TEXT, read
from gpt2.data.library import BYTE, ROLES, text_of
from gpt2.data.tokenizer import Tokenizer, refuse_surrogates
from gpt2.errors import InputError

DEFAULTS = {"bos_token": "<s>", "eos_token": END_OF_TEXT, "unk_token": "<unk>", "pad_token": "<pad>"}
SPACES = dict.fromkeys(map(ord, "\u2002\u2003\u2005\u2008\u2009\u200a\u202f\u3000\ufffc"), " ")
DROPPED = dict.fromkeys([*range(9), *range(11, 32), *range(127, 161), 173, 8203])


def pieces_of(path: Path) -> Any:
    """Return the content of a SentencePiece model. Raises InputError: damaged, or the package is missing."""
    content = read(path)
    try:
        from sentencepiece import sentencepiece_model_pb2 as layout
    except ImportError as error:
        remedy = "pip install 'gpt2-toolkit[sentencepiece]'"
        raise InputError(f"{path}: reading it takes sentencepiece and protobuf ({error}); {remedy}") from None
    try:
        return layout.ModelProto.FromString(content)  # type: ignore[attr-defined]  # made when it is imported
    except Exception as error:
        raise InputError(f"{path} is not a SentencePiece model ({type(error).__name__}); fetch it again") from None


class PiecesTokenizer(Tokenizer):
    """A SentencePiece model and its added tokens; ``kept`` are the files that it was read from."""

    def __init__(
        self, path: Path, roles: Mapping[str, Any], declared: Mapping[int, Any], extra: Iterable[Any], kept: dict[str, bytes]
    ) -> None:
        import sentencepiece

        pieces_of(path)  # raises for a damaged file
        self.kept, self.model = kept, sentencepiece.SentencePieceProcessor(model_proto=kept[path.name])
        vocab = {self.model.id_to_piece(i): i for i in range(self.model.get_piece_size())}
        named = {**DEFAULTS, **roles}
        self.numbers = {text_of(token): i for i, token in declared.items()}
        flags: dict[str, Any] = {text_of(token): token for token in declared.values()}
        for token in [*(named[role] for role in ROLES if role in named), *extra]:
            text = text_of(token)
            vocab.setdefault(text, max(len(vocab), len({**vocab, **self.numbers})))
            self.numbers.setdefault(text, vocab[text])
            flags.setdefault(text, token)
        self.eos = self.numbers[text_of(named["eos_token"])]
        self._control = {text for text, token in flags.items() if getattr(token, "special", True)}
        self.special_tokens = {text: i for text, i in self.numbers.items() if text in self._control}
        self._flags, self.exact = flags, False
        by_id: list[bytes | None] = [None] * (1 + max([*vocab.values(), *self.numbers.values()]))
        for text, i in {**vocab, **self.numbers}.items():
            by_id[i] = text.encode()
        super().__init__(by_id)
        self.added = {i: text for text, i in self.numbers.items()}

    @cached_property
    def fingerprint(self) -> str:
        content = self.model.serialized_model_proto() + repr(sorted(self.numbers.items())).encode()
        return hashlib.sha256(content).hexdigest()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        refuse_surrogates(text)
        return [i for part, i in self._parts(text, special) for i in ([i] if i is not None else self.model.encode(_clean(part)))]

    def _parts(self, text: str, special: bool) -> list[tuple[str, int | None]]:
        """Split a text at its added tokens, which take the spaces beside them that their flags say."""
        names = [name for name in self.numbers if special or name not in self._control]
        pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text) if names else [text]
        for at in range(1, len(parts), 2):
            token = self._flags[parts[at]]
            parts[at - 1] = parts[at - 1].rstrip() if getattr(token, "lstrip", False) else parts[at - 1]
            parts[at + 1] = parts[at + 1].lstrip() if getattr(token, "rstrip", False) else parts[at + 1]
        return [(part, self.numbers[part] if at % 2 else None) for at, part in enumerate(parts) if part]

    def lengths(self, text: str) -> list[int]:
        found: list[int] = []
        for part, i in self._parts(text, False):
            own = [len(_bytes_of(piece)) for piece in self.model.encode(_clean(part), out_type=str)] if i is None else [0]
            own[:1] = [own[0] + len(part.encode()) - sum(own)] if own else []  # the space that the model puts in front, and drops
            found += own
        return found

    def decode(self, ids: Iterable[int]) -> str:
        text, plain, after = "", list[str](), False
        for i in self._known(ids):
            token = self.token(i)
            if token in self._control:
                text += ("" if after else " ") + self.model.decode(plain) + token
                plain, after = [], True
            else:
                plain.append(token)
                after = False
        return text + str(self.model.decode(plain))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def token_bytes(self, token_id: int) -> bytes:
        return _bytes_of(self.token(token_id))

    def token(self, token_id: int) -> str:
        return (self._bytes[token_id] or b"").decode()

    def texts(self, n_positions: int) -> dict[str, str | bytes]:
        return dict(self.kept)


def _clean(text: str) -> str:
    return unicodedata.normalize("NFC", text.translate(DROPPED).translate(SPACES))


def _bytes_of(piece: str) -> bytes:
    byte = BYTE.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()
