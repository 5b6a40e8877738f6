"""GPT-2's own kind of BPE: its alphabet and pattern, and tiktoken's speed for a tokenizer that is seen to be one.

A pattern splits text into pieces: words with their leading space, numbers, punctuation, whitespace. Within a piece's UTF-8
bytes, the adjacent pair with the lowest merge rank is joined until no pair has a rank (Radford et al. 2019, section 2.2;
OpenAI's `encoder.py`). tiktoken ranks a pair by the joined bytes, `tokenizers` by the pair; the ids are equal if every merge is
the one that its own bytes lead to (:func:`core`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from tokenizers import Tokenizer as Backend, models

from gpt2.errors import InputError

# OpenAI's pattern in tiktoken's possessive form: the same pieces without backtracking.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
OWN_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
LETTER = r"[\s\S]"  # the pattern of a split into characters
N_BYTES = 256
KEPT = 2  # encoders that a process keeps: of GPT-2's vocabulary, one takes 0.15 s to make
Merges = Sequence[tuple[str, str]]

# Unicode's White_Space: `\s` in the pattern above. Python's `\s` adds U+001C to U+001F.
_WHITE_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
_LONG_RUN = 16_384


@cache
def byte_alphabet() -> str:
    """Return the 256 characters that stand for the bytes 0..255 in the files, in byte order.

    A byte that is printable in Latin-1 stands for itself. The other 68 become U+0100 and up, so that tokens have no whitespace
    or control characters (`bytes_to_unicode` in OpenAI's `encoder.py`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x100 + N_BYTES - len(printable)))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(N_BYTES))


def openai_byte_order() -> list[str]:
    """Return the 256 byte characters in the order of their ids in OpenAI's vocabulary: '!' is 0, the space 'Ġ' is 220."""
    return sorted(byte_alphabet())


def to_bytes(tokens: Sequence[str]) -> list[bytes]:
    """Convert tokens from the byte alphabet to bytes, in one pass: there are fifty thousand. Others become their UTF-8."""
    table = {ord(char): byte for byte, char in enumerate(byte_alphabet())}
    try:
        joined = "".join(tokens).translate(table).encode("latin-1")
    except UnicodeEncodeError:
        alphabet = set(byte_alphabet())
        return [to_bytes([token])[0] if alphabet.issuperset(token) else token.encode() for token in tokens]
    return [joined[a:b] for a, b in pairwise(accumulate(map(len, tokens), initial=0))]


class Core:
    """Encode with tiktoken what `tokenizers` would encode with a model of GPT-2's own kind; :func:`core` sees that it is one."""

    def __init__(self, vocab: Mapping[str, int], merges: Merges) -> None:
        import tiktoken

        # Ranks: the bytes in id order, then the merges; other tokens have none. tiktoken's ids are ranks; others need a table.
        ranked = sorted(byte_alphabet(), key=vocab.__getitem__) + [a + b for a, b in merges]
        ids = [vocab[token] for token in ranked]
        self._ids = None if ids == list(range(len(ids))) else ids  # rank -> id; None if they are equal
        table = {token: rank for rank, token in enumerate(to_bytes(ranked))}
        self._encoding = tiktoken.Encoding("byte-level BPE", pat_str=PATTERN, mergeable_ranks=table, special_tokens={})

    def encode(self, text: str) -> list[int]:
        """Return the ids; of a text without a long run of whitespace (:func:`has_long_run`)."""
        ranks = self._encoding.encode_ordinary(text)
        return ranks if self._ids is None else [self._ids[rank] for rank in ranks]


class Letters:
    """Encode what `tokenizers` would encode with a table of single characters, one id each; :func:`core` sees that it is one."""

    def __init__(self, vocab: Mapping[str, int]) -> None:
        self.vocab = vocab

    def encode(self, text: str) -> list[int]:
        """Return one id per character. Raises InputError: an unknown one."""
        try:
            return list(map(self.vocab.__getitem__, text))
        except KeyError as error:
            char = error.args[0]
            where = f"{char!r} (U+{ord(char):04X}) at position {text.index(char)} of the text"
            remedy = "leave it out, or use a vocabulary made from a text that has it"
            raise InputError(f"{where} is not among the {len(self.vocab)} characters of this vocabulary; {remedy}") from None


# The last few, with the vocabulary and merges that each is of: models that are compared have the same ones.
_CORES: list[tuple[Mapping[str, int], Merges, Core]] = []


def lossless(backend: Backend, vocab: Mapping[str, int]) -> bool:
    """Return whether the library splits a text as GPT-2 does, changes nothing, and has all bytes: its ids' bytes are the text."""
    model, split = backend.model, state(backend.pre_tokenizer)
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix or model.dropout:
        return False
    as_own = {key: split.get(key) for key in OWN_SPLIT} == OWN_SPLIT
    return as_own and backend.normalizer is None and vocab.keys() >= set(byte_alphabet())


def core(backend: Backend, vocab: Mapping[str, int], merges: Merges | None) -> Core | Letters | None:
    """Return a fast encoder if what the library built is GPT-2's own kind of BPE, or single characters, from whatever files."""
    model = backend.model
    if isinstance(model, models.WordLevel) and model.unk_token not in vocab and backend.normalizer is None:
        split = state(backend.pre_tokenizer)
        single = split.get("pattern") == {"Regex": LETTER} and split.get("behavior") == "Isolated" and not split.get("invert")
        return Letters(vocab) if single else None
    if merges is None or not isinstance(model, models.BPE) or model.ignore_merges or not lossless(backend, vocab):
        return None
    if (known := next((each for each in _CORES if each[:2] == (vocab, merges)), None)) is None:
        # By pairs, a token's own bytes must lead to it: then no other pair of tokens with the same bytes ever stands in a text.
        tokens = [a + b for a, b in merges]
        if len({*tokens}) < len(tokens) or any(len(model.tokenize(token)) != 1 for token in tokens):
            return None
        known = vocab, merges, Core(vocab, merges)
    _CORES[:] = [*[each for each in _CORES if each is not known][1 - KEPT :], known]
    return known[2]


def state(part: Any) -> dict[str, Any]:
    """Return a part of a `tokenizers` pipeline as its JSON says it; {} for none."""
    return {} if part is None else json.loads(part.__getstate__())


def has_long_run(text: str) -> bool:
    """Return whether so much whitespace stands together, 32,768 characters or sometimes 16,384, that tiktoken might not take it.

    Its regex engine overflows its stack on `\\s+(?!\\S)` above some 100,000 characters, and the process panics. Looking at every
    16,384th character finds every run of 32,768.
    """
    runs = (_WHITE_SPACE.match(text, at) for at in range(0, len(text), _LONG_RUN))
    return any(run and run.end() - run.start() >= _LONG_RUN for run in runs)
