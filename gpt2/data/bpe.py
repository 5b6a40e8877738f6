"""GPT-2's byte-level BPE, from a checkpoint's own files, at tiktoken's speed.

Text is cut by a pattern into pieces (words with their leading space, numbers, punctuation, whitespace), each piece becomes
UTF-8 bytes, and within a piece the adjacent pair with the lowest merge rank is joined until no pair has a rank. Nothing is
ever unknown, and nothing merges across pieces (Radford et al. 2019, section 2.2; OpenAI's `encoder.py`).

The files are `vocab.json` (token -> id) and `merges.txt` (one pair per line, in rank order), or OpenAI's names for the same
files, `encoder.json` and `vocab.bpe`: see :mod:`gpt2.data.bpe_files`, which reads and checks them.

The merging is done by tiktoken, with ranks built here. tiktoken ranks a pair by the bytes it joins to, transformers by the
pair; the two agree exactly when every merge is the one its own bytes lead to, as in any vocabulary that BPE training made.
That is checked on loading. :class:`BPE` also keeps long runs of whitespace from reaching tiktoken, which panics on them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

from gpt2.data import bpe_files
from gpt2.data.bpe_files import END_OF_TEXT, N_BYTES, byte_alphabet
from gpt2.errors import InputError

# OpenAI's pattern, in the possessive form that tiktoken ships: the same pieces, found without backtracking.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# Unicode's White_Space, which is `\s` in the pattern above; Python's own `\s` has U+001C to U+001F besides.
_WHITE_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
_LONG_RUN = 16_384


def openai_byte_order() -> list[str]:
    """The 256 byte characters in the order of their ids 0..255: by code point, so '!' is 0 and the space 'Ġ' is 220."""
    return sorted(byte_alphabet())


class BPE:
    """A byte-level BPE vocabulary: text to ids and back.

    Args:
        vocab: token, spelt in :func:`byte_alphabet`, to id; the ids are 0..n-1 in any order.
        merges: the pairs in rank order.
        special: tokens known to be special. Others that no merge makes are special if they look it, as `<|pad|>` does.
        where: what to call the source in an error.

    Raises:
        InputError: when the two do not make one byte-level BPE.

    The file's ids need not follow the merge ranks, which is what tiktoken takes for ids. They do in OpenAI's own vocabulary;
    where they do not, one table lookup per id maps between the two.
    """

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Sequence[tuple[str, str]],
        *,
        special: Collection[str] = (),
        where: str = "the vocabulary",
    ) -> None:
        self._special = bpe_files.check(vocab, merges, special, where)
        self._vocab = dict(sorted(vocab.items(), key=lambda item: item[1]))
        self._merges = list(merges)

        # Ranks: the bytes in the order of their ids, then the merges; a special token has none.
        ranked = sorted(byte_alphabet(), key=self._vocab.__getitem__) + [a + b for a, b in merges]
        as_bytes = _to_bytes(ranked)
        ids = [self._vocab[token] for token in ranked]
        self._ids = None if ids == list(range(len(ids))) else ids  # by rank; None: the same
        self._bytes = [token.encode() for token in self._vocab]  # by id; right for special tokens
        for i, token in zip(ids, as_bytes, strict=True):
            self._bytes[i] = token

        import tiktoken

        self._core = tiktoken.Encoding(
            "byte-level BPE",
            pat_str=PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(as_bytes)},
            special_tokens={},
        )

    def __repr__(self) -> str:
        return f"BPE(n_vocab={self.n_vocab}, special={self._special})"

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def n_vocab(self) -> int:
        """Number of ids, special ones included. A model's own vocabulary may be padded beyond it."""
        return len(self._vocab)

    @property
    def eot(self) -> int | None:
        """Id of `<|endoftext|>`, or None where the vocabulary has none."""
        return self._special.get(END_OF_TEXT)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens and their ids: those that no merge makes."""
        return dict(self._special)

    @property
    def vocab(self) -> dict[str, int]:
        """Every token, spelt in the byte alphabet, and its id, in the order of the ids."""
        return dict(self._vocab)

    @property
    def merges(self) -> list[tuple[str, str]]:
        """The pairs in rank order."""
        return list(self._merges)

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 (hex) of the tokens in id order, the merges in rank order, and the special ids.

        Equal fingerprints mean the same ids for every text, whatever files the two were read from.
        """
        content = [list(self._vocab), self._merges, sorted(self._special.values())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    # -- text to ids -------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, allowed_special: Literal["all"] | Collection[str] = ()) -> list[int]:
        """Ids of `text`. Text is data: `<|endoftext|>` written in it is 13 ordinary characters.

        So nothing in a prompt or a file can put a control token into a model's input. A caller who means the token names it
        in `allowed_special` (or says "all"), or appends :attr:`eot`. transformers does the opposite: its default equals
        `allowed_special="all"` here, and its `split_special_tokens=True` equals the default here. tiktoken's default is to
        raise. No token is ever added at the start or the end.

        Raises:
            InputError: a lone surrogate, which has no UTF-8 form; a name in `allowed_special` that is no special token.
        """
        refuse_surrogates(text)
        names = self._special if allowed_special == "all" else allowed_special
        if not names:
            return self._encode_ordinary(text)
        if isinstance(names, str) or not all(name in self._special for name in names):
            raise InputError(
                f"allowed_special={names!r} names a token that is not special here; "
                f'pass a set out of {sorted(self._special)}, or "all"'
            )
        # The longest name first, so that of two that start alike the longer is found.
        special = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        ids: list[int] = []
        for i, part in enumerate(re.split(f"({special})", text)):
            ids += [self._special[part]] if i % 2 else self._encode_ordinary(part)
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        parts = _parts(text)
        ranks = self._core.encode_ordinary(parts[0])
        for part in parts[1:]:
            ranks += self._core.encode_ordinary(part)
        return ranks if self._ids is None else [self._ids[rank] for rank in ranks]

    # -- ids to text -------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens as they are spelt. Bytes that are not UTF-8 become U+FFFD.

        A model may stop inside a character, so the bytes of a prefix need not decode; :meth:`decode_bytes` is exact.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids` (a list, or a 1-d array or tensor), exactly.

        Raises:
            InputError: an id outside 0..n_vocab-1, as a model with a padded vocabulary may sample.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if ids and not (min(ids) >= 0 and max(ids) < self.n_vocab):
            bad = next(i for i in ids if not 0 <= i < self.n_vocab)
            raise InputError(f"id {bad} is not in this vocabulary of {self.n_vocab} tokens; decode with the model's own")
        return b"".join([self._bytes[i] for i in ids])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id: often a part of a character, so not always UTF-8."""
        return self.decode_bytes([token_id])

    # -- files -------------------------------------------------------------------------------------------------------

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> BPE:
        """Read `vocab.json` + `merges.txt`, else `encoder.json` + `vocab.bpe`, else the BPE inside `tokenizer.json`.

        Raises:
            InputError: none of them is there, one is damaged, or they describe a tokenizer that cuts text differently.
        """
        return cls._from(bpe_files.read_directory(Path(path)))

    @classmethod
    def from_files(cls, vocab: str | os.PathLike[str], merges: str | os.PathLike[str]) -> BPE:
        """Read a vocabulary (JSON, token -> id) and its merges (text, a pair a line), under any names."""
        return cls._from(bpe_files.read_files(Path(vocab), Path(merges)))

    @classmethod
    def _from(cls, source: bpe_files.Source) -> BPE:
        return cls(source.vocab | source.added, source.merges, special=source.added, where=source.where)

    def save(self, directory: str | os.PathLike[str], *, n_positions: int = 1024) -> list[Path]:
        """Write vocab.json, merges.txt, tokenizer.json and tokenizer_config.json; returns the paths written.

        With them added_tokens.json, where a special token does not look it. The same vocabulary gives the same bytes every
        time. `n_positions` becomes `model_max_length`, beyond which transformers warns.
        """
        texts = bpe_files.file_texts(self._vocab, self._merges, self._special, n_positions)
        paths = bpe_files.write(Path(directory), texts)
        if bpe_files.ADDED not in texts:  # one left from another vocabulary would be read as part of this one
            (Path(directory) / bpe_files.ADDED).unlink(missing_ok=True)
        return paths


def train_bpe(text: str, vocab_size: int) -> BPE:
    """Train a byte-level BPE on `text`: exactly `vocab_size` tokens, numbered as OpenAI numbers them.

    256 bytes, then the merges in rank order, then `<|endoftext|>` as id `vocab_size - 1`. Deterministic: pairs of equal
    count are taken in the order of their ids. The counting is the `tokenizers` library's.

    Raises:
        InputError: `vocab_size` below 257, or more than the text has merges for.
    """
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
    """Tokens spelt in the byte alphabet, as bytes; all at once, since there are fifty thousand."""
    table = {ord(char): byte for byte, char in enumerate(byte_alphabet())}
    joined = "".join(tokens).translate(table).encode("latin-1")
    ends, end = [0], 0
    for token in tokens:
        end += len(token)
        ends.append(end)
    return [joined[a:b] for a, b in pairwise(ends)]


def refuse_surrogates(text: str) -> None:
    """InputError at the first lone surrogate of `text`, which tiktoken would silently make U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}: it has no UTF-8 "
            "form; read the source as UTF-8, or mend it with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None


def _parts(text: str) -> list[str]:
    """`text`, cut inside very long runs of whitespace so that the ids of the parts are the ids of the whole.

    tiktoken's regex engine overflows its stack on `\\s+(?!\\S)` somewhere above 100,000 characters, and the process panics.
    That alternative takes a run but for its last character, which then goes with what follows; a run that ends the text is
    taken whole. So a cut before the last character leaves every piece as it was. A run of 32,768 or more is certain to
    be met at one of the places looked at.
    """
    parts, start = [], 0
    for at in range(0, len(text), _LONG_RUN):
        run = _WHITE_SPACE.match(text, at) if at > start else None
        if run and run.end() < len(text) and run.end() - at >= _LONG_RUN:
            parts.append(text[start : run.end() - 1])
            start = run.end() - 1
    parts.append(text[start:])
    return parts
