"""Open a folder's tokenizer, with the ids that transformers' `AutoTokenizer` gives for that folder.

The class that tokenizer_config.json names, else config.json, else the one of its model type decides. The library `tokenizers`
runs `tokenizer.json` as it is, and GPT-2's vocab.json and merges.txt are read here, wherever that class does nothing else.
AutoTokenizer itself runs everything else (:mod:`gpt2.data.adapter`); importing it takes a second.

Source: huggingface/transformers 5.24, models/auto/tokenization_auto.py, tokenization_utils_base.py (`_from_pretrained`),
tokenization_utils_tokenizers.py (`TokenizersBackend`), models/gpt2/tokenization_gpt2.py.
"""

import json
from collections.abc import Iterator, Mapping
from os.path import lexists
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Pipeline

from gpt2.config import quoted
from gpt2.data import adapter
from gpt2.data.bpe import as_pairs, byte_level_pipeline
from gpt2.data.files import END_OF_TEXT, TOKENIZER_FILES, read, read_json, read_text, warn_once
from gpt2.data.library import ROLES, LibraryTokenizer, library, template_around
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import InputError

DECODER = "added_tokens_decoder"
WHOLE, CONFIG, ADDED, MAP = "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
BPE_FILES, OPENAI, VOCAB, PIECES = ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), "vocab.txt", "spiece.model"
VOCABULARIES, HIGHEST_ID = (BPE_FILES[0], OPENAI[0], ADDED), 10_000_000  # no file that is read has room for more
TYPES = {VOCAB: "bert", PIECES: "t5"}  # the model type whose class reads such a file, where no class is named
GPT2, GENERAL = (
    "GPT2Tokenizer",
    ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"),
)  # these run tokenizer.json as it is
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
OWN_MODEL: dict[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
}
OWN_MODEL |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
OWN_TOKEN = {**dict.fromkeys(FLAGS[:3], False), "special": True}  # nothing is normalised


class Stated(NamedTuple):
    """A token that stands beside the vocabulary, with the role, id and flags that a file states."""

    text: str
    role: str = ""
    id: int | None = None
    flags: Mapping[str, Any] = {}

    def adds_nothing(self, added: Mapping[str, Mapping[str, Any]]) -> bool:
        """Return whether ``added``, the tokens by their text, holds it so already."""
        there = added.get(self.text)
        if there is None or self.id not in (None, there["id"]):
            return False
        return all(there.get(flag, value) == value for flag, value in self.flags.items())


def open_folder(folder: Path) -> Tokenizer:
    """Return the folder's tokenizer. Raises InputError: its files are missing or damaged, or transformers does not read them."""
    with library(str(folder / WHOLE if lexists(folder / WHOLE) else folder)):  # any value may stand in a file
        kept = {file: read(folder / file) for file in TOKENIZER_FILES if lexists(folder / file)}
        config, whole, named = _object(folder / CONFIG), _object(folder / WHOLE), class_name(folder)
        files = next((pair for pair in (BPE_FILES, OPENAI) if all(lexists(folder / file) for file in pair)), None)
        opened: Tokenizer | None = None
        if whole:
            opened = _as_it_is(folder, named, config, whole)
        elif files and named in (GPT2, *GENERAL):
            opened, named = _own_files(folder, files, config), GPT2
        elif not files and not kept.keys() & {VOCAB, PIECES}:
            there = ", ".join(file for file in (*BPE_FILES, *OPENAI) if lexists(folder / file))
            wanted = ", ".join([WHOLE, *(" + ".join(pair) for pair in (BPE_FILES, OPENAI)), VOCAB, PIECES])
            found = f"only {there}" if there else "none of them"
            raise InputError(f"{folder}: no tokenizer; looked for {wanted} and found {found}; copy the missing file there")
        if opened is None:
            how = next((TYPES[file] for file in TYPES if file in kept and not whole and named in (GPT2, *GENERAL)), None)
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
    return (folder / WHOLE).is_file() or ((folder / BPE_FILES[0]).is_file() and class_name(folder) == GPT2)


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file."""
    content = read_json(path) if lexists(path) else {}
    if not isinstance(content, dict) or (path.name == WHOLE and content and not isinstance(content.get("model"), dict)):
        raise InputError(f"{path} is not what that name says, a JSON object of the `tokenizers` library; fetch it again")
    vocab = content.get("model", {}).get("vocab") if path.name == WHOLE else content if path.name in VOCABULARIES else None
    ids = vocab.values() if isinstance(vocab, dict) else ()
    if (highest := max((i for i in ids if isinstance(i, int)), default=0)) > HIGHEST_ID:
        raise InputError(f"{path}: has an id of {highest:,}, and no vocabulary is so large; it is damaged, fetch it again")
    if path.name in (CONFIG, MAP) and (key := next(_odd_tokens(content), None)):
        raise InputError(f"{path}: {key} is {quoted(content.get(key))}, which names no token; it is damaged, fetch it again")
    return content


def _odd_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the entries of a configuration that should state tokens, and hold something else."""
    several, extra = config.get(DECODER) or {}, config.get("extra_special_tokens") or []
    if not isinstance(several, dict) or not all(map(str.isdecimal, several)):
        yield DECODER
    elif not isinstance(extra, list | dict):
        yield "extra_special_tokens"
    for key, token in [*((role, config.get(role) or "") for role in ROLES), *((DECODER, each) for each in several.values())]:
        flags = token if isinstance(token, dict) else {"content": token}
        if not isinstance(flags.get("content"), str) or not all(isinstance(flags.get(flag, True), bool) for flag in FLAGS):
            yield key


def _stated(folder: Path, config: Mapping[str, Any]) -> Iterator[Stated]:
    """Yield the tokens that are stated beside tokenizer.json or vocab.json, in any of the files that have held them."""
    settings = dict(config)
    if DECODER in config:
        for i, token in config[DECODER].items():
            yield Stated(token["content"], "", int(i), {flag: token[flag] for flag in FLAGS if flag in token})
    else:  # as before transformers 5
        settings |= _object(folder / MAP)
        for text, i in _object(folder / ADDED).items():
            yield Stated(text, "", i)
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    settings |= extra if isinstance(extra, dict) else {f"{i}_token": token for i, token in enumerate(extra)}
    for role, token in settings.items():
        if token and role.endswith("_token") and not role.startswith("add_"):
            flags = {flag: token[flag] for flag in FLAGS[:3] if flag in token} if isinstance(token, dict) else {}
            yield Stated(token["content"] if isinstance(token, dict) else token, role, None, {**flags, "special": True})


def _roles(stated: list[Stated], named: str) -> dict[str, str]:
    """Return the token of each role; GPT-2's class has the end of text for three of them."""
    own = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT) if named == GPT2 else {}
    return {**own, **{token.role: token.text for token in stated if token.role in ROLES}}


def _as_it_is(folder: Path, named: str, config: Mapping[str, Any], whole: Mapping[str, Any]) -> LibraryTokenizer | None:
    """Return tokenizer.json as it is; None where the class would add tokens or replace one of its parts."""
    pipeline = Pipeline.from_str(read_text(folder / WHOLE))
    model, added = whole["model"], {token["content"]: token for token in whole.get("added_tokens") or ()}
    stated = list(_stated(folder, config))
    roles = _roles(stated, named)
    stated += [Stated(text, role, None, {"special": True}) for role, text in roles.items()]
    if (
        named not in (GPT2, *GENERAL)
        or "fast_tokenizer_files" in config
        or not all(token.adds_nothing(added) for token in stated)
    ):
        return None
    if named == GPT2:  # builds its own pipeline from vocabulary and merges, and keeps the template alone
        ids = dict(model["vocab"])
        for text in sorted(added, key=lambda text: int(added[text]["id"])):
            ids.setdefault(text, len(ids))
        steps = [whole.get(step) or {} for step in ("pre_tokenizer", "decoder")]
        own = {key: model.get(key) or OWN_MODEL[key] for key in OWN_MODEL} == OWN_MODEL and not whole.get("normalizer")
        own &= [step.get("type") for step in steps] == ["ByteLevel"] * 2 and steps[0].get("use_regex", True)
        own &= bool(steps[0].get("add_prefix_space")) == bool(config.get("add_prefix_space"))
        declared = config.get(DECODER, added)
        if not own or len(declared) != len(added) or any(ids[text] != token["id"] for text, token in added.items()):
            return None
    return LibraryTokenizer(
        pipeline, roles=roles, merges=as_pairs(model["merges"], str(folder / WHOLE)) if "merges" in model else None
    )


def _own_files(folder: Path, files: tuple[str, str], config: Mapping[str, Any]) -> LibraryTokenizer | None:
    """Return GPT-2's own two files; None where something is added to them."""
    # Only "\n" ends a line: Python's other line ends may be part of a token. The last line may lack it.
    lines = [line.removesuffix("\r") for line in read_text(folder / files[1]).split("\n")]
    merges = as_pairs([line for line in lines if line and not line.startswith("#version")], str(folder / files[1]))
    vocab = _object(folder / files[0])
    if len(twice := {i: token for token, i in vocab.items() if isinstance(i, int)}) < len(vocab):
        odd = next(token for token, i in vocab.items() if twice.get(i) != token)
        raise InputError(f"{folder / files[0]}: the id of {quoted(odd)} is no number of its own; fetch the file again")
    pipeline = byte_level_pipeline(vocab, merges)
    stated = list(_stated(folder, config))
    roles = _roles(stated, GPT2)
    special = {*roles.values(), *(token.text for token in stated if token.role or token.flags.get("special"))}
    plain = {text: {**OWN_TOKEN, "id": vocab[text]} for text in special if text in vocab}
    asked = any(config.get(key) for key in ("add_prefix_space", "add_bos_token", "add_eos_token"))
    if asked or not special <= plain.keys() or not all(token.adds_nothing(plain) for token in stated):
        return None
    pipeline.post_processor = template_around(None, None, pipeline)
    pipeline.add_tokens([AddedToken(text, special=True) for text in special])
    return LibraryTokenizer(pipeline, roles=roles, merges=merges)
