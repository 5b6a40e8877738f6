"""Make a byte-level BPE with GPT-2's own settings: from its vocabulary and merges, trained on a text, or of a text's words.

Also a vocabulary of a text's characters.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer as Pipeline, decoders, models, pre_tokenizers, processors, trainers

from gpt2.config import quoted
from gpt2.data.byte_level import LETTER, N_BYTES, PATTERN, Merges, byte_alphabet, openai_byte_order
from gpt2.data.files import END_OF_TEXT
from gpt2.data.library import LibraryTokenizer, library
from gpt2.data.tokenizer import refuse_surrogates
from gpt2.errors import InputError


def as_pairs(merges: Any, where: str) -> list[tuple[str, str]]:
    """Return merges as pairs, from lines "a b" or from pairs [a, b], as in newer `tokenizer.json`."""
    found = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges or ()]
    if not {*map(len, found)} <= {2} or any(not a or not b for a, b in found):
        number, wrong = next((i, merge) for i, merge in enumerate(merges) if len(found[i]) != 2 or "" in found[i])
        raise InputError(f"{where}: merge {number} is {quoted(wrong)}, not two tokens; it is damaged, fetch it again")
    return found


def byte_level_pipeline(vocab: Mapping[str, int], merges: Merges, **model: Any) -> Pipeline:
    """Return a byte-level BPE in the library's parts."""
    pipeline = Pipeline(models.BPE(dict(vocab), list(merges), continuing_subword_prefix="", end_of_word_suffix="", **model))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def ends(token: str | None) -> dict[str, str]:
    """Return the roles of a GPT-2's one special token."""
    return {} if token is None else dict.fromkeys(("bos_token", "eos_token", "unk_token"), token)


def made_bpe(
    vocab: Mapping[str, int],
    merges: Merges,
    special: Sequence[str] = (),
    matched: Sequence[str] = (),
    *,
    roles: Mapping[str, str] = MappingProxyType({}),
    around: tuple[str | None, str | None] = (None, None),
    where: str = "the vocabulary",
    **model: Any,
) -> LibraryTokenizer:
    """Return a byte-level BPE with GPT-2's own settings. ``matched`` tokens are one id in every text, ``special`` if asked for.

    ``around`` are the tokens that its template puts before and behind a prompt. Raises InputError: what the library refuses.
    """
    with library(where):
        backend = byte_level_pipeline(vocab, merges, **model)
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        backend.add_tokens([AddedToken(token, normalized=True, special=True) for token in special])
        backend.add_tokens([AddedToken(token, normalized=True) for token in matched])
        if any(around):
            before, behind = around
            single = " ".join(f"{part}:0" for part in (before, "$A", behind) if part)
            added = [(token, backend.token_to_id(token)) for token in dict.fromkeys(filter(None, around))]
            backend.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=added)
        return LibraryTokenizer(backend, roles=roles, merges=merges)


def _entries_wanted(vocab_size: int, text: str) -> int:
    """Return the entries beside the bytes and the end of text. Raises InputError: below 0, or a lone surrogate in the text."""
    if vocab_size <= N_BYTES:
        raise InputError(f"vocab_size {vocab_size} is too small: 256 bytes and {END_OF_TEXT} need 257")
    refuse_surrogates(text)
    return vocab_size - N_BYTES - 1


def _too_few(vocab_size: int, text: str, there: int, what: str) -> InputError:
    """Return the error of a text that has only so many merges or words."""
    given = f"vocab_size {vocab_size} is too large for this text of {len(text):,} characters, which has only {there:,} {what}"
    return InputError(f"{given}; ask for at most {N_BYTES + there + 1}, or give more text")


def train_bpe(text: str, vocab_size: int) -> LibraryTokenizer:
    """Train a byte-level BPE of `vocab_size` tokens on `text`; deterministic. Raises InputError: below 257, or too few merges."""
    n_merges = _entries_wanted(vocab_size, text)
    tokenizer = byte_level_pipeline({}, [])
    trainer = trainers.BpeTrainer(vocab_size=N_BYTES + n_merges, initial_alphabet=list(byte_alphabet()), show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    merges = [(a, b) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]
    if len(merges) != n_merges:
        raise _too_few(vocab_size, text, len(merges), "merges")
    tokens = [*openai_byte_order(), *(a + b for a, b in merges), END_OF_TEXT]
    return made_bpe({token: i for i, token in enumerate(tokens)}, merges, [END_OF_TEXT], roles=ends(END_OF_TEXT))


def words_of(text: str, vocab_size: int) -> LibraryTokenizer:
    """Return a tokenizer of the 256 bytes, the most frequent words of two bytes or more, and the end of text.

    Words have the space before them, ties are in text order. Other words are bytes, so bits per byte compare with other models'.
    For the library it is a byte-level BPE without merges that accepts whole pieces. Raises InputError: `vocab_size` below 257, or
    too few words.
    """
    import regex  # also a dependency of tiktoken; `re` does not know \p{L}

    wanted, alphabet = _entries_wanted(vocab_size, text), byte_alphabet()
    counts = Counter(piece for piece in regex.findall(PATTERN, text) if len(piece.encode()) > 1)
    if len(counts) < wanted:
        raise _too_few(vocab_size, text, len(counts), "different words")
    words = ("".join(alphabet[byte] for byte in word.encode()) for word, _ in counts.most_common(wanted))
    tokens = [*openai_byte_order(), *words, END_OF_TEXT]
    vocab = {token: i for i, token in enumerate(tokens)}
    return made_bpe(vocab, [], [END_OF_TEXT], roles=ends(END_OF_TEXT), ignore_merges=True)


def chars_of(text: str) -> LibraryTokenizer:
    """Return a tokenizer whose ids are the text's characters, in code point order. Raises InputError: none, or a surrogate.

    So it is in nanoGPT's `shakespeare_char` and most from-scratch tutorials (65 ids for tiny Shakespeare). A text has about three
    times as many tokens as with GPT-2's BPE.
    """
    refuse_surrogates(text)
    if not text:
        raise InputError("no characters to make a vocabulary of; give a text that is not empty")
    table = {char: i for i, char in enumerate(sorted(set(text)))}
    pipeline = Pipeline(models.WordLevel(table, unk_token="<unk>"))  # not in vocab: transformers then raises too
    pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(LETTER), "isolated")
    pipeline.decoder = decoders.Fuse()
    return LibraryTokenizer(pipeline)
