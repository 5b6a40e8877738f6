"""Text and tokens: tokenizers, token files, training windows, and Shakespeare's plays."""

import os
from pathlib import Path

from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import InputError

__all__ = ["Tokenizer", "from_directory", "holds_tokenizer"]

FILES = ("chars.json", "words.json", "vocab.json", "encoder.json", "tokenizer.json")  # any of these means a tokenizer


def from_directory(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a directory's tokenizer: characters, words, or a byte-level BPE. Raises InputError: none, several, or damaged."""
    from gpt2.data import bpe, bpe_files, chars, words
    from gpt2.data.chat import ChatFormat

    path = Path(path)
    if not path.is_dir():
        raise InputError(f"{path} is not a directory; give the one that holds the tokenizer's files")
    own: dict[str, type[chars.Chars] | type[words.Words]] = {chars.FILE: chars.Chars, words.FILE: words.Words}
    names = (*own, *(name for pair in bpe_files.FILES for name in pair))
    present = [name for name in names if (path / name).is_file()]
    tokenizer: Tokenizer
    if not present or present[0] not in own:
        tokenizer = bpe.BPE.from_directory(path)
    elif len(present) > 1:
        both = f"{present[0]} and {present[1]}"
        raise InputError(f"{path} holds {both}, two tokenizers; remove the one that the model was not made with")
    else:
        tokenizer = own[present[0]].from_directory(path)
    tokenizer.chat = ChatFormat.read(path)
    return tokenizer


def holds_tokenizer(directory: Path) -> bool:
    """Return whether a directory has any tokenizer file, complete or not."""
    return any((directory / name).is_file() for name in FILES)
