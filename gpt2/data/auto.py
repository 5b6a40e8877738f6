"""Open a folder's tokenizer, with the ids that transformers' `AutoTokenizer` gives for that folder.

gpt2/checkpoint/README.md says what runs which files; importing AutoTokenizer itself (:mod:`gpt2.data.adapter`) takes a second.

Source: huggingface/transformers 5.24, models/auto/tokenization_auto.py, tokenization_utils_base.py (`_from_pretrained`),
tokenization_utils_tokenizers.py (`TokenizersBackend`), models/gpt2/tokenization_gpt2.py.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from os.path import lexists
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Pipeline

from gpt2.config import TOKENIZER_FILES, quoted
from gpt2.data import adapter
from gpt2.data.bpe import as_pairs, ends, made_bpe
from gpt2.data.files import END_OF_TEXT, read, read_json, read_text, warn_once
from gpt2.data.library import ROLES, LibraryTokenizer, library
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import InputError

WHOLE, CONFIG, ADDED, MAP = "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # transformers' names of the two, and OpenAI's
TYPES = {"vocab.txt": "bert", "spiece.model": "t5"}  # the model type whose class reads such a file, where no class is named
GPT2, GENERAL = "GPT2Tokenizer", ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")  # these run tokenizer.json as is
PLACING, DECODER = ("single_word", "lstrip", "rstrip"), "added_tokens_decoder"
FLAGS = (*PLACING, "normalized", "special")
Token = dict[str, Any]  # what a file says of a token: its content; perhaps its role, its id, its flags


def open_folder(folder: Path) -> Tokenizer:
    """Return the folder's tokenizer. Raises InputError: its files are missing or damaged, or transformers does not read them."""
    with library(str(folder / WHOLE if lexists(folder / WHOLE) else folder)):  # any value may stand in a file
        kept = {file: read(folder / file) for file in TOKENIZER_FILES if lexists(folder / file)}
        config, whole, named = _object(folder / CONFIG), _object(folder / WHOLE), class_name(folder)
        files = next((pair for pair in BPE_FILES if all(lexists(folder / file) for file in pair)), None)
        if not (whole or files or kept.keys() & TYPES.keys()):
            there = ", ".join(file for pair in BPE_FILES for file in pair if lexists(folder / file))
            wanted, found = ", ".join([WHOLE, *map(" + ".join, BPE_FILES), *TYPES]), f"only {there}" if there else "none of them"
            raise InputError(f"{folder}: no tokenizer; looked for {wanted} and found {found}; copy the missing file there")
        opened: Tokenizer | None = None
        stated, usual = list(_stated(folder, config)), named in (GPT2, *GENERAL)
        if whole and usual:
            opened = _as_it_is(folder, whole, named, config, stated)
        elif files and usual:
            opened, named = _own_files(folder, files, config, stated), GPT2
        if opened is None:
            how = next((TYPES[file] for file in TYPES if file in kept), None) if usual and not whole else None
            opened, named = adapter.open_folder(folder, how)
        if "tokenizer_class" not in config and named != GPT2:  # what config.json says, or its absence, is not in other copies
            name = "PreTrainedTokenizerFast" if named in GENERAL else named
            kept[CONFIG] = (json.dumps({**config, "tokenizer_class": name}, indent=2) + "\n").encode()
        opened.kept = kept
        if isinstance(opened, LibraryTokenizer) and (lost := opened.unreachable()):
            warn_once(f"{folder}: {len(lost):,} tokens are made by no merge ({quoted(lost[0])} first); are the merges cut off?")
        return opened


def class_name(folder: Path) -> str:
    """Return the class that AutoTokenizer takes for a folder, without "Fast"; "" where the type of a model decides."""
    model = _object(folder / "config.json")
    named = _object(folder / CONFIG).get("tokenizer_class") or model.get("tokenizer_class")
    if isinstance(named, str):
        return named.removesuffix("Fast")
    return {None: GENERAL[0], "": GENERAL[0], "gpt2": GPT2}.get(model.get("model_type"), "")


def transformers_reads(folder: Path) -> bool:
    """Return whether AutoTokenizer knows the folder's own files: not OpenAI's names, nor vocab.json that no class claims."""
    return (folder / WHOLE).is_file() or ((folder / BPE_FILES[0][0]).is_file() and class_name(folder) == GPT2)


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file."""
    content = read_json(path) if lexists(path) else {}
    if not isinstance(content, dict) or (path.name == WHOLE and content and not isinstance(content.get("model"), dict)):
        raise InputError(f"{path} is not what that name says, a JSON object of the `tokenizers` library; fetch it again")
    return content


def _stated(folder: Path, config: Mapping[str, Any]) -> Iterator[Token]:
    """Yield the tokens that are stated beside tokenizer.json or vocab.json, in any of the files that have held them."""
    older = {} if DECODER in config else {MAP: _object(folder / MAP)}  # and ADDED: before transformers 5
    for file, said in {CONFIG: config, **older}.items():
        try:
            yield from _tokens(said)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            what = quoted(str(error))
            raise InputError(f"{folder / file}: names a token in no known form ({what}); it is damaged, fetch it again") from None
    if older:
        yield from ({"content": text, "id": i} for text, i in _object(folder / ADDED).items())


def _tokens(said: Mapping[str, Any]) -> Iterator[Token]:
    """Yield the tokens that one file states. Raises TypeError, ValueError or AttributeError: it holds other values."""
    for i, token in (said.get(DECODER) or {}).items():
        yield _known(token, FLAGS) | {"id": int(i)}
    extra = said.get("extra_special_tokens") or said.get("additional_special_tokens") or {}
    extra = extra if isinstance(extra, dict) else {f"{i}_token": token for i, token in enumerate(extra)}
    for role, token in {**said, **extra}.items():
        if token and role.endswith("_token") and (role in ROLES or isinstance(token, str | dict)):
            yield _known(token, PLACING) | {"role": role, "special": True}


def _known(value: Any, flags: Iterable[str]) -> Token:
    token = value if isinstance(value, dict) else {"content": value}
    if not isinstance(token.get("content"), str) or not all(isinstance(token.get(flag, True), bool) for flag in FLAGS):
        raise ValueError(value)
    return {key: token[key] for key in ("content", *flags) if key in token}


def _adds_nothing(stated: Token, added: Mapping[str, Token]) -> bool:
    """Return whether ``added``, the tokens by their text, holds a token so already."""
    there = added.get(stated["content"])
    return there is not None and all(there.get(key, value) == value for key, value in stated.items() if key != "role")


def _roles(stated: Iterable[Token], named: str) -> dict[str, str]:
    """Return the token of each role; GPT-2's class has the end of text for three of them."""
    own = ends(END_OF_TEXT if named == GPT2 else None)
    return own | {token["role"]: token["content"] for token in stated if token.get("role") in ROLES}


def _as_it_is(
    folder: Path, whole: Mapping[str, Any], named: str, config: Mapping[str, Any], stated: list[Token]
) -> LibraryTokenizer | None:
    """Return tokenizer.json as it is; None where the class would add tokens or replace one of its parts."""
    pipeline = Pipeline.from_str(read_text(folder / WHOLE))
    model, roles = whole["model"], _roles(stated, named)
    added = {each["content"]: each for each in whole.get("added_tokens") or ()}
    all_stated = [*stated, *({"content": text, "special": True} for text in roles.values())]
    if "fast_tokenizer_files" in config or not all(_adds_nothing(token, added) for token in all_stated):
        return None
    merges = as_pairs(model["merges"], str(folder / WHOLE)) if "merges" in model else None
    made = LibraryTokenizer(pipeline, roles=roles, merges=merges)
    if named == GPT2:  # builds its own pipeline from vocabulary and merges, and keeps the template alone
        ids = dict(model["vocab"])
        for text in sorted(added, key=lambda text: int(added[text]["id"])):
            ids.setdefault(text, len(ids))
        moved = len(config.get(DECODER, added)) != len(added) or any(ids[text] != token["id"] for text, token in added.items())
        if moved or not made.own or config.get("add_prefix_space"):
            return None
    return made


def _own_files(folder: Path, files: tuple[str, str], config: Mapping[str, Any], stated: list[Token]) -> LibraryTokenizer | None:
    """Return GPT-2's own two files; None where something is added to them."""
    # Only "\n" ends a line: Python's other line ends may be part of a token. The last line may lack it.
    lines = [line.removesuffix("\r") for line in read_text(folder / files[1]).split("\n")]
    merges = as_pairs([line for line in lines if line and not line.startswith("#version")], str(folder / files[1]))
    vocab, roles = _object(folder / files[0]), _roles(stated, GPT2)
    if len(twice := {i: token for token, i in vocab.items() if isinstance(i, int)}) < len(vocab):
        odd = next(token for token, i in vocab.items() if twice.get(i) != token)
        raise InputError(f"{folder / files[0]}: the id of {quoted(odd)} is no number of its own; fetch the file again")
    special = {*roles.values(), *(token["content"] for token in stated if token.get("special"))}
    added = {text: {**dict.fromkeys(PLACING, False), "special": True, "id": vocab[text]} for text in special if text in vocab}
    asked = any(config.get(key) for key in ("add_prefix_space", "add_bos_token", "add_eos_token"))
    made = made_bpe(vocab, merges, sorted(special), roles=roles, where=str(folder / files[0]))
    more = asked or len(added) < len(special) or not all(_adds_nothing(token, added) for token in stated)
    return None if more else made
