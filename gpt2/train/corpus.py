"""Read a recipe's text as training and validation token ids, with their tokenizer."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2.checkpoint.loading import load_tokenizer
from gpt2.data import Tokenizer, from_directory, holds_tokenizer, shakespeare, token_files
from gpt2.data.bpe import train_bpe
from gpt2.data.chars import Chars
from gpt2.data.words import Words
from gpt2.errors import InputError
from gpt2.train.recipe import Recipe


@dataclass(frozen=True)
class Corpus:
    """Training and validation ids (1-d integers), their tokenizer, and ``sha256`` (hex), which a resumed run must match."""

    tokenizer: Tokenizer
    train_ids: np.ndarray
    val_ids: np.ndarray
    sha256: str


def corpus(recipe: Recipe, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read the recipe's corpus as ids of ``tokenizer``, or of a new tokenizer made from the text as the recipe says."""
    if recipe.data.tokens:
        folder = Path(recipe.data.tokens)
        tokenizer = tokenizer or _tokenizer_of(folder, recipe.data.tokenizer)
        train_ids, val_ids = token_files.read(folder, tokenizer.n_vocab)
        sha256 = token_files.fingerprint(train_ids, val_ids)
        val_ids = np.array(val_ids[: recipe.eval_tokens or None], dtype=np.int32)
    else:
        train_text, val_text = texts(recipe)
        tokenizer = tokenizer or _new_tokenizer(recipe, train_text, val_text).with_tokens(recipe.data.add_tokens)
        train_ids, val_ids = (np.array(tokenizer.encode(text), dtype=np.int32) for text in (train_text, val_text))
        val_ids = val_ids[: recipe.eval_tokens or None]
        sha256 = hashlib.sha256(train_ids.tobytes() + b"|" + val_ids.tobytes()).hexdigest()
    if len(train_ids) < recipe.context + 1:
        remedy = f" or --set context={len(train_ids) - 1}" if len(train_ids) > 1 else ""
        raise InputError(
            f"the training text has {len(train_ids)} tokens, too few for a context of {recipe.context} and the token after it; "
            f"give a longer text{remedy}"
        )
    if len(val_ids) < 2:
        raise InputError(f"the validation text has {len(val_ids)} tokens, too few to score; give a longer text or data.held_out")
    return Corpus(tokenizer, train_ids, val_ids, sha256)


def _tokenizer_of(folder: Path, kind: str) -> Tokenizer:
    """Return the tokenizer in a folder of token files, or GPT-2's if the recipe says so."""
    if holds_tokenizer(folder):
        return from_directory(folder)
    if kind == "gpt2":
        return load_tokenizer("gpt2")
    raise InputError(
        f"{folder}: no tokenizer in it, and {kind!r} is made from a text; "
        "put the tokenizer's files there, or --set data.tokenizer=gpt2 if it is GPT-2's"
    )


def _new_tokenizer(recipe: Recipe, train_text: str, val_text: str) -> Tokenizer:
    """Make a tokenizer from the training text; characters also come from the validation text, which must be encodable."""
    if recipe.data.tokenizer == "chars":
        return Chars.from_text(train_text + val_text)
    if recipe.data.tokenizer == "words":
        return Words.from_text(train_text, recipe.data.vocab_size)
    return load_tokenizer("gpt2") if recipe.data.tokenizer == "gpt2" else train_bpe(train_text, recipe.data.vocab_size)


def texts(recipe: Recipe) -> tuple[str, str]:
    """Return the training and validation text of a recipe."""
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
