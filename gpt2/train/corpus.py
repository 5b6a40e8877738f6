"""Read a recipe's text: training and validation token ids, and their tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2.checkpoint.loading import load_tokenizer
from gpt2.data import Tokenizer, from_directory, holds_tokenizer, shakespeare, token_files
from gpt2.errors import InputError
from gpt2.train.recipe import Recipe


@dataclass(frozen=True)
class Corpus:
    """Training and validation ids (one-dimensional integers) and their tokenizer.

    ``sha256`` (hex) identifies the corpus: a run resumes only with the same one.
    """

    tokenizer: Tokenizer
    train_ids: np.ndarray
    val_ids: np.ndarray
    sha256: str


def corpus(recipe: Recipe, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read the recipe's corpus as ids of ``tokenizer``, or of a new tokenizer that is made from the text as the recipe says.

    Raises:
        InputError: no such text, a text too short for a window, or characters that the tokenizer does not have.
    """
    if recipe.data.tokens:
        return _from_token_files(recipe, tokenizer)
    train_text, val_text = texts(recipe)
    tokenizer = tokenizer or _new_tokenizer(recipe, train_text, val_text)
    train_ids, val_ids = (np.array(tokenizer.encode(text), dtype=np.int32) for text in (train_text, val_text))
    val_ids = val_ids[: recipe.eval_tokens or None]
    _long_enough(train_ids, val_ids, recipe)
    return Corpus(tokenizer, train_ids, val_ids, hashlib.sha256(train_ids.tobytes() + b"|" + val_ids.tobytes()).hexdigest())


def _from_token_files(recipe: Recipe, tokenizer: Tokenizer | None) -> Corpus:
    """Read existing token files, made with ``tokenizer``, the one in their folder, or GPT-2's if the recipe says so."""
    folder = Path(recipe.data.tokens)
    if tokenizer is None and holds_tokenizer(folder):
        tokenizer = from_directory(folder)
    if tokenizer is None and recipe.data.tokenizer != "gpt2":
        raise InputError(
            f"{folder}: no tokenizer in it, and {recipe.data.tokenizer!r} is made from a text; "
            "put the tokenizer's files there, or --set data.tokenizer=gpt2 if it is GPT-2's"
        )
    tokenizer = tokenizer or load_tokenizer("gpt2")
    train_ids, val_ids = token_files.read(folder, tokenizer.n_vocab)
    sha256 = token_files.fingerprint(train_ids, val_ids)
    val_ids = np.array(val_ids[: recipe.eval_tokens or None], dtype=np.int32)
    _long_enough(train_ids, val_ids, recipe)
    return Corpus(tokenizer, train_ids, val_ids, sha256)


def texts(recipe: Recipe) -> tuple[str, str]:
    """Training and validation text of a recipe."""
    data = recipe.data
    if data.path:
        text = shakespeare.read_text(data.path)
    elif data.source == "plays":
        return shakespeare.training_text(), shakespeare.held_out_text()
    elif data.source == "all-plays":
        text = "\n".join(shakespeare.plays().values())
    elif data.source.startswith("play:"):
        text = shakespeare.play(data.source.removeprefix("play:"))
    elif data.source == "tinyshakespeare":
        text = shakespeare.tiny_shakespeare()
    else:
        raise InputError(
            f"recipe: data.source is {data.source!r}; give plays, all-plays, play:NAME or tinyshakespeare, "
            "or set data.path to a text file"
        )
    return shakespeare.split(text, 1 - data.held_out)


def _new_tokenizer(recipe: Recipe, train_text: str, val_text: str) -> Tokenizer:
    """Make a tokenizer from the training text. Characters also come from the validation text, which must be encodable."""
    if recipe.data.tokenizer == "chars":
        from gpt2.data.chars import Chars

        return Chars.from_text(train_text + val_text)
    if recipe.data.tokenizer == "words":
        from gpt2.data.words import Words

        return Words.from_text(train_text, recipe.data.vocab_size)
    if recipe.data.tokenizer == "gpt2":
        return load_tokenizer("gpt2")
    from gpt2.data.bpe import train_bpe

    return train_bpe(train_text, recipe.data.vocab_size)


def _long_enough(train_ids: np.ndarray, val_ids: np.ndarray, recipe: Recipe) -> None:
    """Refuse a training text shorter than one window, and a validation text that cannot be scored."""
    if len(train_ids) < recipe.context + 1:
        remedy = f" or --set context={len(train_ids) - 1}" if len(train_ids) > 1 else ""
        raise InputError(
            f"the training text has {len(train_ids)} tokens, too few for a context of {recipe.context} and the token after it; "
            f"give a longer text{remedy}"
        )
    if len(val_ids) < 2:
        raise InputError(f"the validation text has {len(val_ids)} tokens, too few to score; give a longer text or data.held_out")
