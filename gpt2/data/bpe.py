"""Tokenize text with GPT-2's byte-level BPE, read from a checkpoint's files, at tiktoken's speed.

A pattern splits text into pieces: words with their leading space, numbers, punctuation, whitespace. Within a piece's UTF-8
bytes, the adjacent pair with the lowest merge rank is joined until no pair has a rank (Radford et al. 2019, section 2.2;
OpenAI's `encoder.py`). tiktoken ranks a pair by the joined bytes, transformers by the pair; the ids are equal if every merge is
the one that its own bytes lead to, which :mod:`gpt2.data.bpe_files` checks on loading.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, Self

from gpt2.config import quoted
from gpt2.data import bpe_files
from gpt2.data.bpe_files import END_OF_TEXT, N_BYTES, byte_alphabet
from gpt2.data.tokenizer import Tokenizer, refuse_surrogates
from gpt2.errors import InputError

# OpenAI's pattern in tiktoken's possessive form: the same pieces without backtracking.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# Unicode's White_Space: `\s` in the pattern above. Python's `\s` adds U+001C to U+001F.
_WHITE_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
_LONG_RUN = 16_384


def openai_byte_order() -> list[str]:
    """Return the 256 byte characters in the order of their ids in OpenAI's vocabulary: '!' is 0, the space 'Ġ' is 220."""
    return sorted(byte_alphabet())


class BPE(Tokenizer):
    """A byte-level BPE vocabulary. Raises InputError: vocabulary and merges do not make one.

    Args:
        vocab: token, written in :func:`byte_alphabet`, to id; the ids are 0..n-1 in any order.
        merges: the pairs in rank order.
        special: special tokens. Other tokens that no merge makes are special if they look like `<|pad|>`.
        matched: those of them that are matched in every text, as the tokens that a fine-tune adds (:meth:`with_tokens`).
        where: the source's name in an error.
    """

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        *,
        special: Collection[str] = (),
        matched: Collection[str] = (),
        where: str = "the vocabulary",
    ) -> None:
        self.special_tokens = bpe_files.check(vocab, merges, special, where)
        self.matched = frozenset(matched) & self.special_tokens.keys()
        self.vocab = dict(sorted(vocab.items(), key=lambda item: item[1]))
        self.merges = list(merges)
        self.eot = self.special_tokens.get(END_OF_TEXT)

        # Ranks: the bytes in id order, then the merges; special tokens have none. tiktoken uses ranks as ids, so other ids need
        # a table.
        ranked = sorted(byte_alphabet(), key=self.vocab.__getitem__) + [a + b for a, b in merges]
        as_bytes = _to_bytes(ranked)
        ids = [self.vocab[token] for token in ranked]
        self._ids = None if ids == list(range(len(ids))) else ids  # rank -> id; None if they are equal
        by_id = [token.encode() for token in self.vocab]  # right for special tokens
        for i, token in zip(ids, as_bytes, strict=True):
            by_id[i] = token
        super().__init__(by_id)

        import tiktoken

        table = {token: rank for rank, token in enumerate(as_bytes)}
        self._core = tiktoken.Encoding("byte-level BPE", pat_str=PATTERN, mergeable_ranks=table, special_tokens={})

    @cached_property
    def fingerprint(self) -> str:
        content: list[object] = [list(self.vocab), self.merges, sorted(self.special_tokens.values())]
        content += [sorted(self.matched)] if self.matched else []
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def encode(self, text: str, *, allowed_special: Literal["all"] | Collection[str] = ()) -> list[int]:
        """Return the ids of `text`. `<|endoftext|>` in it is 13 ordinary characters; tokens in :attr:`matched` are one id.

        So no prompt or file can put a control token into a model's input. To get the token, list it in `allowed_special` (or
        pass "all"), or append :attr:`eot`. Other defaults differ: transformers' equals `allowed_special="all"`
        (`split_special_tokens=True` equals ours), tiktoken's raises. No token is added at the start or end.

        Raises InputError: a lone surrogate, which has no UTF-8 form; a name in `allowed_special` that is not a special token.
        """
        refuse_surrogates(text)
        allowed = self.special_tokens if allowed_special == "all" else allowed_special
        if isinstance(allowed, str) or not all(name in self.special_tokens for name in allowed):
            raise InputError(
                f"allowed_special={allowed!r} names a token that is not special here; "
                f'pass a set out of {sorted(self.special_tokens)}, or "all"'
            )
        names = self.matched.union(allowed)
        if not names:
            return self._encode_ordinary(text)
        # Longest first: a name may be the beginning of a longer one.
        special = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        ids: list[int] = []
        for i, part in enumerate(re.split(f"({special})", text)):
            ids += [self.special_tokens[part]] if i % 2 else self._encode_ordinary(part)
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        parts = _parts(text)
        ranks = self._core.encode_ordinary(parts[0])
        for part in parts[1:]:
            ranks += self._core.encode_ordinary(part)
        return ranks if self._ids is None else [self._ids[rank] for rank in ranks]

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Read a BPE from a layout of :mod:`gpt2.data.bpe_files`. Raises InputError: none, damaged, or not GPT-2's kind."""
        source = bpe_files.read_directory(Path(path))
        return cls(source.vocab | source.added, source.merges, special=source.added, matched=source.matched, where=source.where)

    def with_tokens(self, tokens: Sequence[str]) -> Self:
        added = [token for token in dict.fromkeys(tokens) if token not in self.matched]
        for token in added:
            refuse_surrogates(token)
            if not token or token in self.vocab:
                why = "is in the vocabulary already" if token else "is empty"
                raise InputError(f"add_tokens: {quoted(token)} {why}; give texts that are no token yet")
        if not added:
            return self
        vocab = self.vocab | {token: self.n_vocab + i for i, token in enumerate(added)}
        grown = type(self)(vocab, self.merges, special=[*self.special_tokens, *added], matched=[*self.matched, *added])
        grown.chat = self.chat
        return grown

    def save(self, directory: str | os.PathLike[str], *, n_positions: int = 1024) -> list[Path]:
        """Write the files that transformers reads; return their paths. Equal vocabularies give equal files."""
        texts = bpe_files.file_texts(self.vocab, self.merges, self.special_tokens, n_positions, self.matched)
        paths = self._write(Path(directory), texts)
        if bpe_files.ADDED not in texts:  # an old one would be read as part of this vocabulary
            (Path(directory) / bpe_files.ADDED).unlink(missing_ok=True)
        return paths


def train_bpe(text: str, vocab_size: int) -> BPE:
    """Train a byte-level BPE of `vocab_size` tokens on `text`; deterministic. Raises InputError: below 257, or too few merges."""
    n_merges = vocab_size - N_BYTES - 1
    if n_merges < 0:
        raise InputError(f"vocab_size {vocab_size} is too small: 256 bytes and {END_OF_TEXT} need 257")
    refuse_surrogates(text)

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=N_BYTES + n_merges, initial_alphabet=list(byte_alphabet()), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    merges = bpe_files.as_pairs(json.loads(tokenizer.to_str())["model"]["merges"], "the trained tokenizer")
    if len(merges) != n_merges:
        raise InputError(
            f"vocab_size {vocab_size} is too large for this text of {len(text):,} characters, which has only "
            f"{len(merges):,} merges; ask for at most {N_BYTES + len(merges) + 1}, or give more text"
        )
    tokens = [*openai_byte_order(), *(a + b for a, b in merges), END_OF_TEXT]
    return BPE({token: i for i, token in enumerate(tokens)}, merges, where="the trained vocabulary")


def _to_bytes(tokens: Sequence[str]) -> list[bytes]:
    """Convert tokens from the byte alphabet to bytes, in one pass: there are fifty thousand."""
    table = {ord(char): byte for byte, char in enumerate(byte_alphabet())}
    joined = "".join(tokens).translate(table).encode("latin-1")
    ends = accumulate(map(len, tokens), initial=0)
    return [joined[a:b] for a, b in pairwise(ends)]


def _parts(text: str) -> list[str]:
    """Split `text` inside very long runs of whitespace without changing its ids.

    tiktoken's regex engine overflows its stack on `\\s+(?!\\S)` above some 100,000 characters, and the process panics. That
    pattern matches a run without its last character, except at the end of the text, so a cut before the last character changes
    no piece. Checking every 16,384th character finds every run of 32,768.
    """
    parts, start = [], 0
    for at in range(0, len(text), _LONG_RUN):
        run = _WHITE_SPACE.match(text, at) if at > start else None
        if run and run.end() < len(text) and run.end() - at >= _LONG_RUN:
            parts.append(text[start : run.end() - 1])
            start = run.end() - 1
    parts.append(text[start:])
    return parts
