"""Read, check and write the files of a byte-level BPE.

They are `vocab.json` (token -> id) with `merges.txt` (one pair per line, in rank order), the same under OpenAI's names, or the
BPE model in `tokenizer.json` of the `tokenizers` library. All write a byte as one printable character.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gpt2.config import quoted
from gpt2.errors import InputError

END_OF_TEXT = "<|endoftext|>"
N_BYTES = 256

# Pairs of files with a byte-level BPE, in search order.
FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
ADDED = "added_tokens.json"  # special tokens (token -> id), beside the first pair

# Maximum bytes of one file. GPT-2's have up to 1.4 MB, the largest published vocabularies (256,000 tokens) 20 to 35 MB.
LIMIT = 40_000_000


class Source(NamedTuple):
    """The files' content, before :func:`check`."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    added: dict[str, int]  # tokens declared outside the model
    where: str
    matched: frozenset[str] = frozenset()  # those that are matched in every text, because they are not special


@cache
def byte_alphabet() -> str:
    """Return the 256 characters that stand for the bytes 0..255 in the files, in byte order.

    A byte that is printable in Latin-1 stands for itself. The other 68 become U+0100 and up, so that tokens have no whitespace
    or control characters (`bytes_to_unicode` in OpenAI's `encoder.py`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x100 + N_BYTES - len(printable)))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(N_BYTES))


def read_directory(path: Path) -> Source:
    """Read a directory's first BPE: a pair of :data:`FILES`, else `tokenizer.json`."""
    for vocab, merges in FILES:
        if (path / vocab).is_file() and (path / merges).is_file():
            matched = _matched(path / "tokenizer_config.json")
            source = read_files(path / vocab, path / merges)._replace(matched=matched)
            added = path / ADDED
            return source._replace(added=_table(read_json(added), added)) if added.is_file() else source
    if (path / "tokenizer.json").is_file():
        return _read_tokenizer_json(path / "tokenizer.json")
    there = [name for pair in FILES for name in pair if (path / name).is_file()]
    present = f"only {', '.join(there)}" if there else "none of them"
    wanted = ", ".join([*(" + ".join(pair) for pair in FILES), "tokenizer.json"])
    raise InputError(f"{path}: no byte-level BPE; looked for {wanted} and found {present}; copy the missing file there")


def read_files(vocab: Path, merges: Path) -> Source:
    table = _table(read_json(vocab), vocab)
    # Only "\n" ends a line: Python's other line ends may be part of a token. The last line may lack it.
    lines = [line.removesuffix("\r") for line in _read(merges).split("\n")]
    if lines[0].startswith("#version"):
        del lines[0]
    pairs = as_pairs([line for line in lines if line], merges)
    return Source(table, pairs, {}, f"{vocab} with {merges.name}")


def _read_tokenizer_json(path: Path) -> Source:
    content: Any = read_json(path)
    try:
        model = content["model"]
        strange = _differences(content)
        tokens = content.get("added_tokens") or ()
        added, matched = {token["content"]: token["id"] for token in tokens}, _not_special(tokens)
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is not a file of the `tokenizers` library; fetch it again") from None
    if strange:
        raise InputError(
            f"{path} is not GPT-2's byte-level BPE ({strange}): its ids would come out wrong; "
            "encode with the library that wrote it and pass the ids"
        )
    return Source(_table(model.get("vocab"), path), as_pairs(model.get("merges"), path), _table(added, path), f"{path}", matched)


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
    """Read a JSON file. Raises InputError with line and column if it is not JSON."""
    text = _read(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}"
        raise InputError(f"{path} is not JSON ({at}); it is damaged or cut off, fetch it again") from None
    except (RecursionError, ValueError) as error:
        reason = (
            "its JSON is nested too deep" if isinstance(error, RecursionError) else "it holds a number of thousands of digits"
        )
        raise InputError(f"{path} is not a vocabulary: {reason}; fetch it again") from None


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
    """Return merges as pairs, from lines "a b" or from pairs [a, b], as in newer `tokenizer.json`."""
    if not isinstance(merges, list):
        raise InputError(f"{where} holds no list of merges; fetch the file again")
    pairs = []
    for i, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(half, str) and half for half in pair):
            raise InputError(f"{where}: merge {i} is {quoted(merge)}, not two tokens; it is damaged, fetch it again")
        pairs.append((pair[0], pair[1]))
    return pairs


def _matched(path: Path) -> frozenset[str]:
    """Return the added tokens that `tokenizer_config.json` calls not special; refuse a space before every text."""
    config = read_json(path) if path.is_file() else {}
    if not isinstance(config, dict):
        return frozenset()
    if config.get("add_prefix_space"):
        raise InputError(
            f"{path} asks for a space before every text (add_prefix_space), which GPT-2 does not add; "
            "set it to false, and write the space in the text where you want one"
        )
    declared = config.get("added_tokens_decoder")
    try:
        return _not_special(declared.values() if isinstance(declared, dict) else ())
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{path}: added_tokens_decoder is damaged; fetch the file again") from None


def _not_special(tokens: Iterable[Any]) -> frozenset[str]:
    return frozenset(token["content"] for token in tokens if token.get("special") is False)


def _differences(content: dict[str, Any]) -> str:
    """List what in a `tokenizer.json` makes other ids than GPT-2's; '' if nothing does."""
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
    wrong = [(name, got.get("type") if isinstance(got, dict) else got, want) for name, got, want in expected if got != want]
    return ", ".join(f"{name} is {quoted(got)}, not {want}".replace("'", "") for name, got, want in wrong)


def _looks_special(token: str) -> bool:
    return token[:1] + token[-1:] in ("<>", "[]") and re.search(r"\w", token) is not None


def check(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], special: Collection[str], where: str) -> dict[str, int]:
    """Check that vocabulary and merges belong together; return the special tokens in id order.

    A token that no merge makes must be in `special` or look special: otherwise its merge is missing, and no text gets its id.
    Raises InputError: ids with a gap or used twice, missing byte tokens or merges, or a merge that cannot happen.
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
            "this is not a byte-level BPE like GPT-2's, or the file is cut off"
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
    """Return all tokens that are bytes or made by merges; check that each merge can happen. Takes linear time."""
    numbers = {char: i for i, char in enumerate(byte_alphabet())}  # token -> number; merge r makes number N_BYTES + r
    halves = [(-1, -1)] * N_BYTES  # number -> the numbers of its two halves; a byte has none
    joined: dict[tuple[int, int], int] = {}  # numbers of two halves -> number of the token that they make
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
        elif (other := _earlier_merge_across(halves, joined, *pair)) is not None:
            wrong = f"can never happen, because merge {other - N_BYTES} comes first"
        if wrong:
            halves_shown = " ".join(half if len(half) <= 60 else f"{half[:57]}..." for half in (a, b))
            raise InputError(f"{where}: merge {rank} ({halves_shown}) {wrong}; fetch both files again")
        numbers[token] = joined[pair] = len(halves)
        halves.append(pair)
    return set(numbers)


def _earlier_merge_across(halves: Sequence[tuple[int, int]], joined: Mapping[tuple[int, int], int], a: int, b: int) -> int | None:
    """Return the earlier merge that joins across the boundary of tokens ``a`` and ``b`` (numbers; larger is later), or None.

    BPE reaches the pair ``a``, ``b`` only if nothing joined across their boundary before. This goes back in time: each step
    replaces the later token by its half next to the boundary, until both are bytes. A merge counts if it precedes the one that
    ends its pair.
    """
    left, right, left_until, right_until = a, b, len(halves), len(halves)
    while True:
        other = joined.get((left, right))
        # If one merge applies at two places, the left one comes first.
        if other is not None and other < left_until and other <= right_until:
            return other
        if max(left, right) < N_BYTES:
            return None
        if left > right:
            left_until, left = left, halves[left][1]
        else:
            right_until, right = right, halves[right][0]


def file_texts(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    special: Mapping[str, int],
    n_positions: int,
    matched: Collection[str] = (),
) -> dict[str, str]:
    """Return file name -> content for a directory that transformers, CTranslate2 and llama.cpp's converter open.

    Tokens of ``special`` in ``matched`` are declared as not special: each is one id wherever it stands in a text. Merges in
    `tokenizer.json` are lines "a b", which every release of `tokenizers` reads.
    """
    lines = [f"{a} {b}" for a, b in merges]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps = {"pre_tokenizer": byte_level, "post_processor": byte_level | {"trim_offsets": False}, "decoder": byte_level}
    texts = {
        "vocab.json": json.dumps(vocab),
        "merges.txt": "".join(f"{line}\n" for line in ["#version: 0.2", *lines]),
        **tokenizer_texts(bpe_model(vocab, lines), steps, special, n_positions, matched),
    }
    if any(not _looks_special(token) for token in special):
        texts[ADDED] = json.dumps(special) + "\n"  # vocab.json does not say which tokens are special
    return texts


def bpe_model(vocab: Mapping[str, int], merges: Sequence[str]) -> dict[str, object]:
    """Return the `model` of a byte-level BPE's `tokenizer.json`; merges are lines "a b"."""
    affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return {"type": "BPE", "dropout": None, "unk_token": None, **affixes, "fuse_unk": False, "vocab": vocab, "merges": merges}


def tokenizer_texts(
    model: Mapping[str, object],
    steps: Mapping[str, object],
    special: Mapping[str, int],
    n_positions: int,
    matched: Collection[str] = (),
) -> dict[str, str]:
    """Return `tokenizer.json` and `tokenizer_config.json` for a model of the `tokenizers` library."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    added = [{"id": i, "content": token, **flags, "special": token not in matched} for token, i in special.items()]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
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
    if END_OF_TEXT in special:  # else GPT2Tokenizer adds one, with an id that the model lacks
        config["tokenizer_class"] = "GPT2Tokenizer"
        config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    if matched:  # vocab.json does not say which tokens are not special
        config["added_tokens_decoder"] = {str(token.pop("id")): token for token in map(dict, added)}
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def write(directory: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write each file aside, sync and rename it: no reader sees a partial file. A symlink is replaced, its target not changed."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        aside = directory / f".{name}.{os.getpid()}"
        try:
            with aside.open("wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            aside.replace(directory / name)
        finally:
            aside.unlink(missing_ok=True)
    return [directory / name for name in texts]
