"""The files of a byte-level BPE: read, checked, written.

`vocab.json` (token -> id) with `merges.txt` (a pair a line, in rank order), the same two under OpenAI's names, or the BPE model
inside the `tokenizer.json` of the `tokenizers` library. All of them spell a byte as one printable character.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gpt2.config import quoted
from gpt2.errors import InputError

END_OF_TEXT = "<|endoftext|>"
N_BYTES = 256

# The pairs of files that hold a byte-level BPE, in the order they are looked for.
FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
ADDED = "added_tokens.json"  # token -> id, beside the first pair, of special tokens

# Bytes of one file. GPT-2's own have 1.4 MB at most, and the largest vocabularies published (256,000 tokens) some 20 to 35 MB.
LIMIT = 40_000_000


class Source(NamedTuple):
    """What the files say, not yet checked: see :func:`check`."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    added: dict[str, int]  # tokens declared beside the model: special ones
    where: str


@cache
def byte_alphabet() -> str:
    """The 256 characters that stand for the bytes 0..255 in the files, at the index of their byte.

    A byte that prints in Latin-1 stands for itself; the other 68, space and newline among them, follow as U+0100 upward, so
    that the files hold neither whitespace nor control characters (`bytes_to_unicode` in OpenAI's `encoder.py`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x100 + N_BYTES - len(printable)))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(N_BYTES))


def read_directory(path: Path) -> Source:
    """The first BPE found in a directory: of :data:`FILES`, else inside `tokenizer.json`."""
    for vocab, merges in FILES:
        if (path / vocab).is_file() and (path / merges).is_file():
            _refuse_prefix_space(path / "tokenizer_config.json")
            source = read_files(path / vocab, path / merges)
            added = path / ADDED
            return source._replace(added=_table(read_json(added), added)) if added.is_file() else source
    if (path / "tokenizer.json").is_file():
        return _read_tokenizer_json(path / "tokenizer.json")
    there = [name for pair in FILES for name in pair if (path / name).is_file()]
    found = f"only {', '.join(there)}" if there else "none of them"
    wanted = ", ".join([*(" + ".join(pair) for pair in FILES), "tokenizer.json"])
    raise InputError(f"{path}: no byte-level BPE; looked for {wanted} and found {found}; copy the missing file there")


def read_files(vocab: Path, merges: Path) -> Source:
    """A vocabulary and its merges, under any names."""
    table = _table(read_json(vocab), vocab)
    # Lines end in "\n" only: what else Python takes for a line's end may be part of a token. The last may lack it.
    lines = [line.removesuffix("\r") for line in _read(merges).split("\n")]
    if lines[0].startswith("#version"):
        del lines[0]
    pairs = as_pairs([line for line in lines if line], merges)
    return Source(table, pairs, {}, f"{vocab} with {merges.name}")


def _read_tokenizer_json(path: Path) -> Source:
    content = read_json(path)
    try:
        model = content["model"]
        strange = _differences(content)
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is not a file of the `tokenizers` library; fetch it again") from None
    if strange:
        raise InputError(
            f"{path} is not GPT-2's byte-level BPE ({strange}): its ids would come out wrong; "
            "encode with the library that wrote it and pass the ids"
        )
    return Source(_table(model.get("vocab"), path), as_pairs(model.get("merges"), path), _table(added, path), f"{path}")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT + 1)
        if len(content) > LIMIT:
            raise InputError(f"{path} has more than {LIMIT:,} bytes, which no tokenizer's file has; fetch it again")
        return content.decode()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); it is damaged, fetch it again") from None


def read_json(path: Path) -> object:
    """The content of a JSON file; InputError with line and column where it is none."""
    text = _read(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}"
        raise InputError(f"{path} is not JSON ({at}); it is damaged or cut off, fetch it again") from None
    except RecursionError:
        raise InputError(f"{path} is not a vocabulary: its JSON is nested too deep; fetch it again") from None
    except ValueError:  # more digits than Python converts
        raise InputError(f"{path} is not a vocabulary: it holds a number of thousands of digits; fetch it again") from None


def _table(vocab: object, where: Path) -> dict[str, int]:
    if not isinstance(vocab, dict):
        raise InputError(f"{where} holds no map from token to id; give the vocabulary that belongs to the merges")
    for token, i in vocab.items():
        if type(i) is not int or not isinstance(token, str):
            raise InputError(
                f"{where}: token {quoted(token)} has id {quoted(i)}, which is not a whole number; fetch the file again"
            )
    return vocab


def as_pairs(merges: object, where: Path | str) -> list[tuple[str, str]]:
    """Merges as pairs, from lines "a b" or, as newer `tokenizer.json` have them, from pairs [a, b]."""
    if not isinstance(merges, list):
        raise InputError(f"{where} holds no list of merges; fetch the file again")
    pairs = []
    for i, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        try:
            a, b = pair
            bad = not (isinstance(a, str) and isinstance(b, str) and a and b)
        except (TypeError, ValueError):
            bad = True
        if bad:
            raise InputError(f"{where}: merge {i} is {quoted(merge)}, not two tokens; it is damaged, fetch it again")
        pairs.append((a, b))
    return pairs


def _refuse_prefix_space(path: Path) -> None:
    config = read_json(path) if path.is_file() else {}
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
    return quoted(value.get("type") if isinstance(value, dict) else value).strip("'")


def _looks_special(token: str) -> bool:
    """Whether a token that no merge makes has the looks of a special one, as <|endoftext|>, [PAD] and </s> have."""
    return token[:1] + token[-1:] in ("<>", "[]") and re.search(r"\w", token) is not None


def check(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], special: Collection[str], where: str) -> dict[str, int]:
    """The special tokens with their ids, in that order, once vocabulary and merges fit; InputError where they do not.

    A token that is neither a byte nor made by a merge must be in `special` or look special, `<|so|>` or `[SO]`: else it has
    lost its merge, and would never be made.
    """
    if sorted(vocab.values()) != list(range(len(vocab))):
        seen: dict[int, str] = {}
        for token, i in vocab.items():
            if i in seen:
                raise InputError(f"{where}: id {i} is given to both {quoted(seen[i])} and {quoted(token)}; fetch the files again")
            seen[i] = token
        hole = next(i for i in range(len(vocab)) if i not in seen)
        raise InputError(f"{where}: no token has id {hole}, though {len(vocab)} tokens are there; fetch the files again")
    if missing := [char for char in byte_alphabet() if char not in vocab]:
        raise InputError(
            f"{where}: {len(missing)} of the 256 byte tokens are missing ({missing[0]!r} first), so some text has no ids; "
            "this is not a byte-level BPE as GPT-2's is, or the file is cut off"
        )
    made = _made(vocab, merges, where)
    others = sorted((token for token in vocab if token not in made), key=vocab.__getitem__)
    if lost := [token for token in others if not (token in special or _looks_special(token))]:
        raise InputError(
            f"{where}: {len(lost)} tokens are made by none of the {len(merges)} merges ({quoted(lost[0])} first); "
            "the merges are cut off or belong to another vocabulary, fetch both files again"
        )
    return {token: vocab[token] for token in others}


def _made(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], where: str) -> set[str]:
    """Every token that is a byte or made by a merge, once each merge is seen to be one that can happen. In linear time."""
    numbers = {char: i for i, char in enumerate(byte_alphabet())}  # token -> its number; that of merge r is N_BYTES + r
    halves = [(-1, -1)] * N_BYTES  # by number; a byte has none
    joined: dict[tuple[int, int], int] = {}  # the numbers of two halves -> the number of what they make
    for rank, (a, b) in enumerate(merges):
        token, wrong = a + b, ""
        pair = numbers.get(a, -1), numbers.get(b, -1)
        if -1 in pair:
            part = b if a in numbers else a
            wrong = f"joins {quoted(part)}, which {'no earlier merge makes' if part in vocab else 'is not in the vocabulary'}"
        elif token not in vocab:
            wrong = f"makes {quoted(token)}, which is not in the vocabulary"
        elif token in numbers:
            wrong = f"makes {quoted(token)}, as merge {numbers[token] - N_BYTES} does"
        elif (other := _forestalled_by(halves, joined, *pair)) is not None:
            wrong = f"can never happen, for merge {other - N_BYTES} comes first"
        if wrong:
            raise InputError(f"{where}: merge {rank} ({_cut(a)} {_cut(b)}) {wrong}; fetch both files again")
        numbers[token] = joined[pair] = len(halves)
        halves.append(pair)
    return set(numbers)


def _forestalled_by(halves: Sequence[tuple[int, int]], joined: Mapping[tuple[int, int], int], a: int, b: int) -> int | None:
    """The earlier merge that, in the bytes of token ``a`` and token ``b``, joins across their boundary; None where none does.

    BPE arrives at ``a``, ``b`` only if no merge has joined across before. Look at the boundary backwards in time: `a` and `b`
    stand there last; before that, in place of whichever of the two was made later, its half next to the boundary; and so on
    down to two bytes. Each two that stand there at one time are joined if there is a merge for them that comes before the
    merge that ends their time. At most as many steps as the two have characters.

    Tokens are numbers: the later made, the greater.
    """
    left, right, left_until, right_until = a, b, len(halves), len(halves)
    while True:
        other = joined.get((left, right))
        # Of two merges of one rank the left one happens first.
        if other is not None and other < left_until and other <= right_until:
            return other
        if max(left, right) < N_BYTES:
            return None
        if left > right:
            left_until, left = left, halves[left][1]
        else:
            right_until, right = right, halves[right][0]


def _cut(token: str) -> str:
    return token if len(token) <= 60 else f"{token[:57]}..."


def file_texts(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], special: Mapping[str, int], n_positions: int
) -> dict[str, str]:
    """File name -> content, of a directory that transformers, CTranslate2 and llama.cpp's converter open.

    For OpenAI's vocabulary the first two are OpenAI's own files, byte for byte. `tokenizer.json` keeps merges as lines "a b",
    which every release of `tokenizers` reads.
    """
    lines = [f"{a} {b}" for a, b in merges]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "vocab": vocab,
        "merges": lines,
    }
    steps = {"pre_tokenizer": byte_level, "post_processor": byte_level | {"trim_offsets": False}, "decoder": byte_level}
    texts = {
        "vocab.json": json.dumps(vocab),
        "merges.txt": "".join(f"{line}\n" for line in ["#version: 0.2", *lines]),
        **tokenizer_texts(model, steps, special, n_positions),
    }
    if any(not _looks_special(token) for token in special):
        texts[ADDED] = json.dumps(special) + "\n"  # else vocab.json alone would not tell
    return texts


def tokenizer_texts(
    model: Mapping[str, object], steps: Mapping[str, object], special: Mapping[str, int], n_positions: int
) -> dict[str, str]:
    """`tokenizer.json` and `tokenizer_config.json` of any model of the `tokenizers` library."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in special.items()],
        "normalizer": None,
        **steps,
        "model": model,
    }
    config: dict[str, object] = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": n_positions,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if END_OF_TEXT in special:  # without it GPT2Tokenizer would add one, as an id that the model has not
        config["tokenizer_class"] = "GPT2Tokenizer"
        config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def write(directory: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write each file beside its place, flush it to disk, and rename: a reader sees the old one or the new, never a part.

    A symbolic link, as in the Hub's cache, is replaced, and what it points to is left alone.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts.items():
        beside = directory / f".{name}.{os.getpid()}"
        try:
            with beside.open("wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            beside.replace(directory / name)
        finally:
            beside.unlink(missing_ok=True)
        paths.append(directory / name)
    return paths
