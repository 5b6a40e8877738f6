"""transformers' `AutoTokenizer` behind our interface, for every folder that :mod:`gpt2.data.auto` does not read itself.

Beside gpt2/parity/reference.py, the only place that imports transformers, and only when called.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from gpt2.data.client import check_environment
from gpt2.data.library import BYTE, LibraryTokenizer, library
from gpt2.data.tokenizer import Tokenizer, refuse_surrogates
from gpt2.errors import InputError
from gpt2.garbage import uncollected


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' warnings."""
    with uncollected():
        import transformers  # noqa: F401 (its import sets the level)

    log = logging.getLogger("transformers")
    if (before := log.level) == logging.ERROR:  # inside another one, perhaps of another thread, which sets it back
        yield
        return
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def auto_tokenizer(folder: Path, model_type: str | None = None) -> Any:
    """Return what AutoTokenizer gives for the folder, or the class of ``model_type``. Raises InputError: it does not read it.

    Nothing is fetched, and no code of the folder runs.
    """
    alone = find_spec("sentencepiece") is None and not (folder / "tokenizer.json").is_file()
    for file in folder.glob("*.model") if alone else ():
        raise InputError(f"{file}: reading it takes sentencepiece and protobuf; pip install 'gpt2-toolkit[sentencepiece]'")
    check_environment()
    remedy = "repair the files (in config.json an epsilon is 0.0, not 0), or save tokenizer.json with the program that made it"
    with library(str(folder), "transformers cannot read its tokenizer or config", remedy), quiet():
        with uncollected():
            from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(folder, tokenizer_type=model_type, local_files_only=True, trust_remote_code=False)
        if not len(found):
            raise ValueError("a tokenizer without tokens")
    return found


def auto_ids(tokenizer: Any, text: str, *, special: bool = False, template: bool = False) -> list[int]:
    """Encode ``text`` with transformers' tokenizer: without ``special`` the text of a special token is ordinary characters."""
    tokenizer.split_special_tokens = not special
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.encode_special_tokens = not special
    with quiet():
        ids: list[int] = tokenizer(text, add_special_tokens=template)["input_ids"]
    return ids


def open_folder(folder: Path, model_type: str | None = None) -> tuple[Tokenizer, str]:
    """Return the folder's tokenizer as transformers runs it, and the name of its class. Raises InputError: it does not."""
    found = auto_tokenizer(folder, model_type)
    if (backend := getattr(found, "backend_tokenizer", None)) is None:
        return AutoTokenizer(found), type(found).__name__
    roles = {role: token for role, token in found.special_tokens_map.items() if isinstance(token, str)}
    merges = json.loads(backend.to_str())["model"].get("merges")
    pairs = None if merges is None else [(a, b) for a, b in merges]
    made = LibraryTokenizer(backend, roles=roles, merges=pairs)
    made.by_transformers = True
    return made, type(found).__name__


class AutoTokenizer(Tokenizer):
    """A tokenizer that only transformers' Python runs, such as GPT-SW3's on SentencePiece; ``kept`` are its files."""

    exact, by_transformers = False, True

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab: dict[str, int] = tokenizer.get_vocab()
        super().__init__({i: token.encode() for token, i in self.vocab.items()})
        self.added, self.eos = tokenizer.added_tokens_decoder, tokenizer.eos_token_id
        self.special_tokens = {token.content: i for i, token in self.added.items() if token.special}

    @cached_property
    def fingerprint(self) -> str:
        files = [self.kept[name] for name in sorted(self.kept) if name.endswith((".model", ".txt"))]
        added = [(i, str(token)) for i, token in sorted(self.added.items())]
        return hashlib.sha256(repr((files, sorted(self.vocab.items()), added)).encode()).hexdigest()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        refuse_surrogates(text)
        return auto_ids(self.tokenizer, text, special=special)

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        refuse_surrogates(text)
        return auto_ids(self.tokenizer, text, special=special, template=True)

    def lengths(self, text: str) -> list[int]:
        total = len(text.encode())
        ends = [min(end, total) for end in accumulate(super().lengths(text))]
        return [end - start for start, end in pairwise([0, *ends[:-1], total])] if ends else []

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(self._known(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def token(self, token_id: int) -> str:
        return (self._bytes[token_id] or b"").decode()

    def token_bytes(self, token_id: int) -> bytes:
        byte = BYTE.fullmatch(piece := self.token(token_id))
        return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()

    def texts(self, n_positions: int) -> dict[str, str | bytes]:
        return dict(self.kept)
