"""GPT-2's byte-level BPE, from a checkpoint's own files, at tiktoken's speed.

Text is cut by a pattern into pieces (words with their leading space, numbers, punctuation, whitespace), each piece becomes
UTF-8 bytes, and within a piece the adjacent pair with the lowest merge rank is joined until no pair has a rank. Nothing is
ever unknown, and nothing merges across pieces (Radford et al. 2019, section 2.2; OpenAI's `encoder.py`).

The files are `vocab.json` (token -> id) and `merges.txt` (one pair per line, in rank order), or OpenAI's names for the same
files, `encoder.json` and `vocab.bpe`. They spell each byte as one printable character: see :func:`byte_alphabet`.

The merging is done by tiktoken, with ranks built here. tiktoken ranks a pair by the bytes it joins to, transformers by the
pair; the two agree exactly when every merge is the one its own bytes lead to, as in any vocabulary that BPE training made.
:class:`BPE` checks that on loading. It also keeps long runs of whitespace from reaching tiktoken, which panics on them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

from gpt2.errors import InputError

END_OF_TEXT = "<|endoftext|>"
N_BYTES = 256

# OpenAI's pattern, in the possessive form that tiktoken ships: the same pieces, found without backtracking.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# The pairs of files that hold a byte-level BPE, in the order they are looked for.
FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))

# Unicode's White_Space, which is `\s` in the pattern above; Python's own `\s` has U+001C to U+001F besides.
_WHITE_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
_LONG_RUN = 16_384

# How a token that no merge makes has to look to be taken for a special one, as in <|endoftext|>, [PAD], </s>.
_SPECIAL = re.compile(r"<.*\w.*>|\[.*\w.*\]")


@cache
def byte_alphabet() -> str:
    """The 256 characters that stand for the bytes 0..255 in the files, at the index of their byte.

    A byte that prints in Latin-1 stands for itself; the other 68, space and newline among them, follow as U+0100 upward, so
    that the files hold neither whitespace nor control characters (`bytes_to_unicode` in OpenAI's `encoder.py`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x100 + N_BYTES - len(printable)))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(N_BYTES))


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
        specials = _checked(vocab, merges, special, where)
        self._vocab = dict(sorted(vocab.items(), key=lambda item: item[1]))
        self._merges = list(merges)
        self._special = {token: self._vocab[token] for token in specials}

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
        _refuse_surrogates(text)
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
        path = Path(path)
        added = _added_tokens(path / "added_tokens.json")
        for names in FILES:
            vocab, merges = (path / name for name in names)
            if vocab.is_file() and merges.is_file():
                _refuse_prefix_space(path / "tokenizer_config.json")
                return cls._from_texts(_read_json(vocab), _read(merges), added, vocab, merges)
        if (path / "tokenizer.json").is_file():
            return cls._from_tokenizer_json(path / "tokenizer.json")
        there = [name for pair in FILES for name in pair if (path / name).is_file()]
        found = f"only {', '.join(there)}" if there else "none of them"
        wanted = ", ".join([" + ".join(pair) for pair in FILES] + ["tokenizer.json"])
        raise InputError(f"{path}: no byte-level BPE; looked for {wanted} and found {found}; copy the missing file there")

    @classmethod
    def from_files(cls, vocab: str | os.PathLike[str], merges: str | os.PathLike[str]) -> BPE:
        """Read a vocabulary (JSON, token -> id) and its merges (text, one pair per line, under any names)."""
        return cls._from_texts(_read_json(Path(vocab)), _read(Path(merges)), {}, Path(vocab), Path(merges))

    @classmethod
    def _from_texts(cls, vocab: object, merges: str, added: dict[str, int], vocab_at: Path, merges_at: Path) -> BPE:
        table = _checked_table(vocab, f"{vocab_at}")
        # Lines end in "\n" only: other separators may be part of a token. The last line may lack it.
        lines = [line.removesuffix("\r") for line in merges.split("\n")]
        if lines and lines[0].startswith("#version"):
            del lines[0]
        pairs = _pairs([line for line in lines if line], f"{merges_at}")
        return cls(table | added, pairs, special=added, where=f"{vocab_at} with {merges_at.name}")

    @classmethod
    def _from_tokenizer_json(cls, path: Path) -> BPE:
        content = _read_json(path)
        try:
            model, split = content["model"], content["pre_tokenizer"]
            strange = _differences(content)
            added = _checked_table({t["content"]: t["id"] for t in content.get("added_tokens") or ()}, f"{path}")
        except (KeyError, TypeError, AttributeError):
            raise InputError(f"{path} is not a tokenizer file of the `tokenizers` library; fetch it again") from None
        if strange:
            raise InputError(
                f"{path} is not GPT-2's byte-level BPE ({strange}; pre-tokenizer {split and split.get('type')}); "
                "its ids would come out wrong, so tokenize with the library that wrote it"
            )
        table = _checked_table(model.get("vocab"), f"{path}")
        pairs = _pairs(model.get("merges"), f"{path}")
        return cls(table | added, pairs, special=added, where=f"{path}")

    def save(self, directory: str | os.PathLike[str], *, n_positions: int = 1024) -> list[Path]:
        """Write vocab.json, merges.txt, tokenizer.json and tokenizer_config.json; the paths written.

        The same vocabulary gives the same bytes every time, and for OpenAI's the bytes of OpenAI's own two files. Each file
        is replaced whole. `n_positions` becomes `model_max_length`, beyond which transformers warns.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        merges = [f"{a} {b}" for a, b in self._merges]
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [added_token(token, i) for token, i in self._special.items()],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": self._vocab,
                "merges": merges,
            },
        }
        config: dict[str, object] = {"add_prefix_space": False, "model_max_length": n_positions}
        config["clean_up_tokenization_spaces"] = False
        if self.eot is None:  # GPT2Tokenizer would add an <|endoftext|> of its own
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        else:
            config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
            config["tokenizer_class"] = "GPT2Tokenizer"
        texts = {
            "vocab.json": json.dumps(self._vocab),
            "merges.txt": "".join(f"{line}\n" for line in ["#version: 0.2", *merges]),
            "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n",
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        }
        return [write_whole(directory / name, text) for name, text in texts.items()]


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
    _refuse_surrogates(text)

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=N_BYTES + n_merges, initial_alphabet=list(byte_alphabet()), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    merges = _pairs(json.loads(tokenizer.to_str())["model"]["merges"], "the trained tokenizer")
    if len(merges) != n_merges:
        raise InputError(
            f"vocab_size {vocab_size} is too large for this text of {len(text):,} characters, which has only "
            f"{len(merges):,} merges; ask for at most {N_BYTES + len(merges) + 1}, or give more text"
        )
    tokens = [*openai_byte_order(), *(a + b for a, b in merges), END_OF_TEXT]
    return BPE({token: i for i, token in enumerate(tokens)}, merges, where="the trained vocabulary")


# -- pieces shared with gpt2.data.chars ------------------------------------------------------------------------------


def added_token(content: str, token_id: int) -> dict[str, object]:
    """A special token as `tokenizer.json` spells it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": True}
    return {"id": token_id, "content": content, **flags}


def write_whole(path: Path, text: str) -> Path:
    """Write UTF-8 beside `path`, flush it to disk, and rename: a reader sees the old file or the new, never a part.

    A symbolic link at `path`, as in the Hub's cache, is replaced and what it points to is left alone.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


# -- reading ---------------------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); it is damaged, fetch it again") from None


def _read_json(path: Path) -> object:
    try:
        return json.loads(_read(path))
    except (json.JSONDecodeError, RecursionError) as error:
        at = f"line {error.lineno} column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise InputError(f"{path} is not JSON ({at}); it is damaged or cut off, fetch it again") from None


def _checked_table(vocab: object, where: str) -> dict[str, int]:
    if not isinstance(vocab, dict):
        raise InputError(f"{where} holds no map from token to id; give the vocabulary that belongs to the merges")
    for token, i in vocab.items():
        if type(i) is not int:
            raise InputError(f"{where}: token {token!r} has id {i!r}, which is not a whole number; fetch the file again")
    return vocab


def _pairs(merges: object, where: str) -> list[tuple[str, str]]:
    """Merges as pairs, from lines "a b" or, as newer `tokenizer.json` have them, from pairs [a, b]."""
    if not isinstance(merges, list):
        raise InputError(f"{where} holds no list of merges; fetch the file again")
    pairs = [tuple(line.split(" ")) if isinstance(line, str) else line for line in merges]
    for i, pair in enumerate(pairs):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(p, str) and p for p in pair)):
            raise InputError(f"{where}: merge {i} is {merges[i]!r}, not two tokens; the file is damaged, fetch it again")
    return [(a, b) for a, b in pairs]


def _added_tokens(path: Path) -> dict[str, int]:
    if not path.is_file():
        return {}
    return _checked_table(_read_json(path), f"{path}")


def _refuse_prefix_space(path: Path) -> None:
    config = _read_json(path) if path.is_file() else {}
    if isinstance(config, dict) and config.get("add_prefix_space"):
        raise InputError(
            f"{path} asks for a space before every text (add_prefix_space), which GPT-2 has not; "
            "set it to false, and write the space into the text where it is meant"
        )


def _differences(content: dict) -> str:
    """What in a `tokenizer.json` would make other ids than GPT-2's way of cutting text; '' when nothing would."""
    model, split = content["model"], content["pre_tokenizer"] or {}
    expected = [
        ("model", model.get("type"), "BPE"),
        ("normalizer", content.get("normalizer"), None),
        ("pre-tokenizer", split.get("type"), "ByteLevel"),
        ("add_prefix_space", bool(split.get("add_prefix_space")), False),
        ("use_regex", split.get("use_regex", True), True),
        ("dropout", model.get("dropout") or None, None),
        ("continuing_subword_prefix", model.get("continuing_subword_prefix") or "", ""),
        ("end_of_word_suffix", model.get("end_of_word_suffix") or "", ""),
    ]
    return ", ".join(f"{name} is {_brief(got)}, not {want}" for name, got, want in expected if got != want)


def _brief(value: object) -> str:
    return str(value.get("type")) if isinstance(value, dict) else str(value)


# -- checking --------------------------------------------------------------------------------------------------------


def _checked(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], special: Collection[str], where: str) -> list:
    """The special tokens, in the order of their ids, once everything fits; InputError where it does not."""
    if sorted(vocab.values()) != list(range(len(vocab))):
        seen: dict[int, str] = {}
        for token, i in vocab.items():
            if i in seen:
                raise InputError(f"{where}: id {i} is given to both {seen[i]!r} and {token!r}; fetch the files again")
            seen[i] = token
        hole = next(i for i in range(len(vocab)) if i not in seen)
        raise InputError(f"{where}: no token has id {hole}, though {len(vocab)} tokens are there; fetch the files again")
    if missing := [char for char in byte_alphabet() if char not in vocab]:
        raise InputError(
            f"{where}: {len(missing)} of the 256 byte tokens are missing ({missing[0]!r} first), so not every text can be "
            "encoded; this is not a byte-level BPE such as GPT-2's, or the file is cut off"
        )
    parts = _ranked_parts(vocab, merges, where)
    left = [token for token in vocab if token not in parts]
    lost = [token for token in left if token not in special and not _SPECIAL.fullmatch(token)]
    if lost:
        raise InputError(
            f"{where}: {len(lost)} tokens are made by none of the {len(merges)} merges ({lost[0]!r} first); "
            "the merges are cut off or belong to another vocabulary, fetch both files again"
        )
    return sorted(left, key=vocab.__getitem__)


def _ranked_parts(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], where: str) -> dict[str, tuple[int, str, str]]:
    """Token -> (rank, left part, right part), a byte being its own part at rank -1, once every merge can happen.

    A merge can happen when its parts exist before it does and when BPE, given just its bytes, arrives at those two parts. The
    boundary between them has to survive every earlier merge. While it does, the tokens beside it are, on the left, some last
    part of a last part ... of the left token, and on the right some first part of the right one; so it falls if two such
    neighbours have a merge that comes before both are absorbed on their own side.
    """
    parts = {char: (-1, char, char) for char in byte_alphabet()}
    for rank, (a, b) in enumerate(merges):
        for part in (a, b):
            if part not in parts:
                why = "comes from no earlier merge" if part in vocab else "is not in the vocabulary"
                raise InputError(f"{where}: merge {rank} ({a} {b}) joins {part!r}, which {why}; fetch both files again")
        token = a + b
        if token not in vocab:
            raise InputError(f"{where}: merge {rank} makes {token!r}, which is not in the vocabulary; fetch both files again")
        if token in parts:
            raise InputError(f"{where}: merge {rank} ({a} {b}) makes {token!r} a second time; fetch the merges again")

        left, left_until = a, rank
        while True:
            right, right_until = b, rank
            while True:
                other = parts.get(left + right)
                # Of two merges of the same rank the left one happens first.
                if other and other[0] < left_until and other[0] <= right_until:
                    raise InputError(
                        f"{where}: merge {rank} ({a} {b}) can never happen, merge {other[0]} splits it; "
                        "the merges are out of order, fetch them again"
                    )
                until, first, _ = parts[right]
                if until < 0:
                    break
                right, right_until = first, until
            until, _, last = parts[left]
            if until < 0:
                break
            left, left_until = last, until
        parts[token] = (rank, a, b)
    return parts


# -- text ------------------------------------------------------------------------------------------------------------


def _to_bytes(tokens: Sequence[str]) -> list[bytes]:
    """Tokens spelt in the byte alphabet, as bytes; all at once, since there are fifty thousand."""
    table = {ord(char): byte for byte, char in enumerate(byte_alphabet())}
    joined = "".join(tokens).translate(table).encode("latin-1")
    ends, end = [0], 0
    for token in tokens:
        end += len(token)
        ends.append(end)
    return [joined[a:b] for a, b in pairwise(ends)]


def _refuse_surrogates(text: str) -> None:
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
