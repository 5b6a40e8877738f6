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

from gpt2.errors import InputError

END_OF_TEXT = "<|endoftext|>"
N_BYTES = 256

# The pairs of files that hold a byte-level BPE, in the order they are looked for.
FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
ADDED = "added_tokens.json"  # token -> id, beside the first pair, of special tokens

# How a token that no merge makes has to look to be taken for a special one, as in <|endoftext|>, [PAD], </s>.
_SPECIAL = re.compile(r"<.*\w.*>|\[.*\w.*\]")


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
        return path.read_bytes().decode()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); it is damaged, fetch it again") from None


def read_json(path: Path) -> object:
    """The content of a JSON file; InputError with line and column where it is none."""
    try:
        return json.loads(_read(path))
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}"
        raise InputError(f"{path} is not JSON ({at}); it is damaged or cut off, fetch it again") from None
    except RecursionError:
        raise InputError(f"{path} is not a vocabulary: its JSON is nested too deep; fetch it again") from None


def _table(vocab: object, where: Path) -> dict[str, int]:
    if not isinstance(vocab, dict):
        raise InputError(f"{where} holds no map from token to id; give the vocabulary that belongs to the merges")
    for token, i in vocab.items():
        if type(i) is not int or not isinstance(token, str):
            raise InputError(f"{where}: token {token!r} has id {i!r}, which is not a whole number; fetch the file again")
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
            raise InputError(f"{where}: merge {i} is {merge!r}, not two tokens; it is damaged, fetch it again")
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
    return str(value.get("type")) if isinstance(value, dict) else str(value)


def check(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], special: Collection[str], where: str) -> dict[str, int]:
    """The special tokens with their ids, in that order, once vocabulary and merges fit; InputError where they do not.

    A token that is neither a byte nor made by a merge must be in `special` or look special, `<|so|>` or `[SO]`: else it has
    lost its merge, and would never be made.
    """
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
            f"{where}: {len(missing)} of the 256 byte tokens are missing ({missing[0]!r} first), so some text has no ids; "
            "this is not a byte-level BPE as GPT-2's is, or the file is cut off"
        )
    parts = _ranked_parts(vocab, merges, where)
    others = sorted((token for token in vocab if token not in parts), key=vocab.__getitem__)
    if lost := [token for token in others if not (token in special or _SPECIAL.fullmatch(token))]:
        raise InputError(
            f"{where}: {len(lost)} tokens are made by none of the {len(merges)} merges ({lost[0]!r} first); "
            "the merges are cut off or belong to another vocabulary, fetch both files again"
        )
    return {token: vocab[token] for token in others}


# Token -> (rank, left part, right part); a byte has rank -1 and no parts.
_Parts = dict[str, tuple[int, str, str]]


def _ranked_parts(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], where: str) -> _Parts:
    """The parts of every token that is a byte or made by a merge, once each merge is seen to be one that can happen."""
    parts: _Parts = {char: (-1, "", "") for char in byte_alphabet()}
    for rank, (a, b) in enumerate(merges):
        token, wrong = a + b, ""
        if a not in parts or b not in parts:
            part = b if a in parts else a
            wrong = f"joins {part!r}, which {'no earlier merge makes' if part in vocab else 'is not in the vocabulary'}"
        elif token not in vocab:
            wrong = f"makes {token!r}, which is not in the vocabulary"
        elif token in parts:
            wrong = f"makes {token!r}, as merge {parts[token][0]} does"
        elif (other := _forestalled_by(parts, a, b, rank)) is not None:
            wrong = f"can never happen, for merge {other} comes first"
        if wrong:
            raise InputError(f"{where}: merge {rank} ({a} {b}) {wrong}; fetch both files again")
        parts[token] = (rank, a, b)
    return parts


def _forestalled_by(parts: _Parts, a: str, b: str, rank: int) -> int | None:
    """The earlier merge that, in the bytes of `a + b`, joins across the boundary of the two; None where none does.

    BPE arrives at `a`, `b` only if no merge has joined across before. What stands left of the boundary meanwhile is some last
    part of a last part ... of `a`, and right of it some first part of `b`; each until its rank, when it is absorbed
    on its own side. Two such neighbours are joined if their merge comes before that.
    """
    left, left_until = a, rank
    while left:
        made, _, last = parts[left]
        right, right_until = b, rank
        while right:
            other = parts.get(left + right)
            # Of two merges of one rank the left one happens first.
            if other and other[0] < left_until and other[0] <= right_until:
                return other[0]
            right_until, right, _ = parts[right]
        left, left_until = last, made
    return None


# -- writing ---------------------------------------------------------------------------------------------------------


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
    if any(not _SPECIAL.fullmatch(token) for token in special):
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
