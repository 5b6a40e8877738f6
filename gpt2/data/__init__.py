"""Text and tokens: tokenizers, token files, training windows, and Shakespeare's plays."""

import os
from pathlib import Path

from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import InputError

__all__ = ["Tokenizer", "from_directory", "holds_tokenizer"]

# Any of these means a tokenizer.
FILES = ("tokenizer.json", "vocab.json", "encoder.json", "vocab.txt", "spiece.model")


def from_directory(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a directory's tokenizer, and at which ids its model ends a text. Raises InputError: none, or damaged."""
    from gpt2.data.auto import open_folder
    from gpt2.data.chat import ChatFormat
    from gpt2.data.files import stated_ends

    path = Path(path)
    if not path.is_dir():
        raise InputError(f"{path} is not a directory; give the one that holds the tokenizer's files")
    tokenizer = open_folder(path)
    tokenizer.folder, tokenizer.chat, tokenizer.stated = path, ChatFormat.read(path), stated_ends(path)
    return tokenizer


def holds_tokenizer(directory: Path) -> bool:
    """Return whether a directory has any tokenizer file, complete or not."""
    return any(os.path.lexists(directory / name) for name in FILES)
