"""Text and tokens: tokenizers, token files, training windows, and Shakespeare's plays."""

import os
from pathlib import Path

from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import InputError

__all__ = ["Tokenizer", "from_directory", "holds_tokenizer"]

# Any of these means a tokenizer.
FILES = ("chars.json", "words.json", "tokenizer.json", "vocab.json", "encoder.json", "vocab.txt", "spiece.model")


def from_directory(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a directory's tokenizer, and at which ids its model ends a text. Raises InputError: none, several, or damaged."""
    from gpt2.data import auto, chars, words
    from gpt2.data.chat import ChatFormat
    from gpt2.data.files import stated_ends

    path = Path(path)
    if not path.is_dir():
        raise InputError(f"{path} is not a directory; give the one that holds the tokenizer's files")
    own: dict[str, type[chars.Chars] | type[words.Words]] = {chars.FILE: chars.Chars, words.FILE: words.Words}
    present = [name for name in (*own, *auto.BPE_FILES, *auto.OPENAI) if os.path.lexists(path / name)]
    tokenizer: Tokenizer
    if not present or present[0] not in own:
        tokenizer = auto.open_folder(path)
    elif len(present) > 1:
        both = f"{present[0]} and {present[1]}"
        raise InputError(f"{path} holds {both}, two tokenizers; remove the one that the model was not made with")
    else:
        tokenizer = own[present[0]].from_directory(path)
    tokenizer.chat, tokenizer.stated = ChatFormat.read(path), stated_ends(path)
    return tokenizer


def holds_tokenizer(directory: Path) -> bool:
    """Return whether a directory has any tokenizer file, complete or not."""
    return any(os.path.lexists(directory / name) for name in FILES)
