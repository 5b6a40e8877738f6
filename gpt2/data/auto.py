"""Read the tokenizer of a folder as transformers' `AutoTokenizer` does, with the `tokenizers` library alone.

The class that tokenizer_config.json names, else config.json, else GPT-2's, decides: it takes vocabulary, merges, template and
added tokens from `tokenizer.json`, and brings its own normaliser, pre-tokeniser and decoder; the general classes run that file as
it is. Without it the class reads vocab.json and merges.txt, vocab.txt or spiece.model.

Source: huggingface/transformers 5.24, models/auto/tokenization_auto.py, tokenization_utils_base.py (`_from_pretrained`),
tokenization_utils_tokenizers.py (`TokenizersBackend`), and the `__init__` of each class in :data:`CLASSES`.
"""

import base64
import json
from collections.abc import Callable, Mapping
from os.path import lexists
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Pipeline

from gpt2.config import quoted
from gpt2.data.bpe import as_pairs, byte_level_pipeline
from gpt2.data.byte_level import N_BYTES, Merges, byte_alphabet, state
from gpt2.data.files import END_OF_TEXT, TOKENIZER_FILES, read, read_json, read_text, warn_once
from gpt2.data.library import ROLES, LibraryTokenizer, library, template_around, text_of
from gpt2.data.pieces import PiecesTokenizer, pieces_of
from gpt2.data.tokenizer import Tokenizer
from gpt2.errors import InputError

WHOLE, CONFIG, ADDED, MAP = "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
BPE_FILES, OPENAI, VOCAB, PIECES = ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), "vocab.txt", "spiece.model"
SLOW = "GPTSw3Tokenizer"  # which transformers runs with SentencePiece itself
GENERAL = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")  # classes that run tokenizer.json as it is
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Token = AddedToken | str
Template = Callable[[Mapping[str, str], Pipeline], Any]  # (token of each role, pipeline) -> post-processor


class Parts(NamedTuple):
    """What a class takes from the files: vocabulary, merges, SentencePiece's table of characters, and tokenizer_config.json."""

    vocab: Any
    merges: Merges
    charsmap: Any
    config: dict[str, Any]

    @property
    def by_token(self) -> dict[str, int]:
        table: dict[str, int] = {pair[0]: i for i, pair in enumerate(self.vocab)} if isinstance(self.vocab, list) else self.vocab
        return table

    def unigram(self, unknown: int) -> Pipeline:
        pipeline = Pipeline(models.Unigram([(token, score) for token, score in self.vocab], unk_id=unknown, byte_fallback=False))
        if self.charsmap is not None:
            pipeline.normalizer = normalizers.Precompiled(self.charsmap)
        scheme = "always" if self.config.get("add_prefix_space", True) else "never"
        words, spaces = pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=scheme)
        pipeline.pre_tokenizer = pre_tokenizers.Sequence([words, spaces])
        pipeline.decoder = decoders.Metaspace(prepend_scheme=scheme)
        return pipeline


class Kind(NamedTuple):
    """A class of transformers: how it builds a pipeline, the tokens of its roles, and a template that it insists on."""

    build: Callable[[Parts], Pipeline]
    roles: Mapping[str, str]
    template: Template | None = None
    extra: Callable[[Mapping[str, Any]], list[Token]] = lambda config: []


def _byte_level(parts: Parts) -> Pipeline:
    return byte_level_pipeline(parts.by_token, parts.merges, prefix=bool(parts.config.get("add_prefix_space", False)))


def _bert(parts: Parts) -> Pipeline:
    config = parts.config
    pipeline = Pipeline(models.WordPiece(parts.by_token, unk_token=text_of(config.get("unk_token", "[UNK]"))))
    pipeline.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(prefix="##")
    return pipeline


def _t5(parts: Parts) -> Pipeline:
    return Parts(parts.vocab, (), parts.charsmap, {}).unigram(2)


def _albert(parts: Parts) -> Pipeline:
    pipeline, config = parts.unigram(1), parts.config
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [] if config.get("keep_accents", False) else [normalizers.NFKD(), normalizers.StripAccents()]
    steps += [normalizers.Lowercase()] if config.get("do_lower_case", True) else []
    steps += [] if parts.charsmap is None else [normalizers.Precompiled(parts.charsmap)]
    pipeline.normalizer = normalizers.Sequence(steps)
    ends = [text_of(config.get(role, default)) for role, default in (("cls_token", "[CLS]"), ("sep_token", "[SEP]"))]
    special = [(name, pipeline.token_to_id(end)) for name, end in zip(("[CLS]", "[SEP]"), ends, strict=True)]
    pipeline.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=special
    )
    return pipeline


def _llama(parts: Parts) -> Pipeline:
    prefix = parts.config.get("add_prefix_space")
    prefix = True if prefix is None else prefix
    pipeline = Pipeline(models.BPE(parts.by_token, list(parts.merges), fuse_unk=True, byte_fallback=True))
    scheme = ("always" if parts.config.get("legacy", False) else "first") if prefix else "never"
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    pipeline.decoder = decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=1)] if prefix else [])])
    return pipeline


def _around(first: str, last: str) -> Template:
    """Return a template that puts the tokens of two roles before and behind every text; "" for none."""

    def template(roles: Mapping[str, str], pipeline: Pipeline) -> Any:
        return template_around(roles[first] if first else None, roles[last] if last else None, pipeline)

    return template


def _sentinels(config: Mapping[str, Any]) -> list[Token]:
    count = config.get("extra_ids", 100)
    return [f"<extra_id_{i}>" for i in reversed(range(count if isinstance(count, int) and 0 <= count <= 10_000 else 100))]


_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
_BERT = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
_ALBERT = {**_BERT, "bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>"}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_ROBERTA = {**_LLAMA, "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>", "mask_token": "<mask>"}
_T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
CLASSES: dict[str, Kind] = {
    "GPT2Tokenizer": Kind(_byte_level, _GPT2),
    "RobertaTokenizer": Kind(_byte_level, _ROBERTA, _around("cls_token", "sep_token")),
    "BertTokenizer": Kind(_bert, _BERT, _around("cls_token", "sep_token")),
    "T5Tokenizer": Kind(_t5, _T5, _around("", "eos_token"), _sentinels),
    "AlbertTokenizer": Kind(_albert, _ALBERT),
    "XLMRobertaTokenizer": Kind(lambda parts: parts.unigram(3), _ROBERTA, _around("bos_token", "eos_token")),
    "LlamaTokenizer": Kind(_llama, _LLAMA),
}
CLASSES["MT5Tokenizer"] = CLASSES["T5Tokenizer"]


def open_folder(folder: Path) -> Tokenizer:
    """Return the folder's tokenizer. Raises InputError: its files are missing or damaged, or of a class that is not known."""
    with library(str(folder / WHOLE if lexists(folder / WHOLE) else folder)):  # any value may stand in a file
        return _open(folder)


def _open(folder: Path) -> Tokenizer:
    config, whole = _object(folder / CONFIG), _object(folder / WHOLE)
    name = class_name(folder, config)
    kind = CLASSES.get(name)
    if name == "LlamaTokenizer" and any("ByteLevel" in json.dumps(whole.get(step)) for step in ("pre_tokenizer", "decoder")):
        kind = None
    elif kind is None and name not in (*GENERAL, SLOW) and (whole or lexists(folder / BPE_FILES[0])):
        how = f"{WHOLE} is run as it is" if whole else "its files are read as GPT-2's"
        warn_once(f"{folder}: its tokenizer's class, {name}, is not known here; {how} (gpt2 verify compares)")
    config, roles, declared, extra = _declared(folder, config, whole)
    kept = {file: read(folder / file) for file in TOKENIZER_FILES if lexists(folder / file)}
    if "tokenizer_class" not in config and name != "GPT2Tokenizer":  # config.json says it, or nobody: other copies need it here
        kept[CONFIG] = (json.dumps({**_object(folder / CONFIG), "tokenizer_class": name}, indent=2) + "\n").encode()
    if name == SLOW and PIECES in kept:
        return PiecesTokenizer(folder / PIECES, roles, declared, extra, kept)
    if whole and kind is None:
        pipeline = Pipeline.from_str(kept[WHOLE].decode())
        merges: Merges = as_pairs(whole["model"].get("merges"), str(folder / WHOLE))
    else:
        kind = kind or CLASSES["GPT2Tokenizer"]
        parts, special = _parts(folder, name, kind, config, whole)
        pipeline, merges = kind.build(parts), parts.merges
        for step, built in (("normalizer", pipeline.normalizer), ("pre_tokenizer", pipeline.pre_tokenizer)):
            if (stated := (whole.get(step) or {}).get("type")) not in (None, state(built).get("type")):
                warn_once(f"{folder}: {name} replaces the {step} of {WHOLE} ({quoted(stated)}), as transformers does")
        pipeline.post_processor = _post_processor(whole) or pipeline.post_processor
        roles, extra = {**kind.roles, **roles}, extra or [*special, *kind.extra(config)]
    order = [*(role for role in ROLES if role in roles), *(role for role in roles if role not in ROLES)]
    named = _add(pipeline, {role: roles[role] for role in order}, declared, extra)
    asked = [end for end in ("bos", "eos") if f"add_{end}_token" in config and not whole]
    if asked or pipeline.post_processor is None:
        first, last = (f"{end}_token" if config.get(f"add_{end}_token") and end in asked else "" for end in ("bos", "eos"))
        pipeline.post_processor = _around(first if first in named else "", last if last in named else "")(named, pipeline)
    if kind is not None and kind.template is not None:
        pipeline.post_processor = kind.template(named, pipeline)
    own_merges = merges if isinstance(pipeline.model, models.BPE) else None
    tokenizer = LibraryTokenizer(pipeline, roles=named, merges=own_merges, kept=kept)
    if tokenizer.core is not None and tokenizer.merges is not None:
        _check(folder, tokenizer, tokenizer.merges, kept if whole else {})
    return tokenizer


def class_name(folder: Path, config: Mapping[str, Any] | None = None) -> str:
    """Return the class that reads the folder's tokenizer, without "Fast": the one it names, else the one that fits its files."""
    config = _object(folder / CONFIG) if config is None else config
    named = config.get("tokenizer_class") or _object(folder / "config.json").get("tokenizer_class")
    there = [name for name in (WHOLE, BPE_FILES[0], OPENAI[0], VOCAB, PIECES) if lexists(folder / name)]
    fits = {VOCAB: "BertTokenizer", PIECES: "T5Tokenizer"}.get(there[0] if there else "", "GPT2Tokenizer")
    name = named.removesuffix("Fast") if isinstance(named, str) else fits
    return fits if name in GENERAL and WHOLE not in there else name


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file."""
    content = read_json(path) if lexists(path) else {}
    if not isinstance(content, dict) or (path.name == WHOLE and content and not isinstance(content.get("model"), dict)):
        raise InputError(f"{path} is not what that name says, a JSON object of the `tokenizers` library; fetch it again")
    return content


def _token(value: Any, folder: Path, **flags: bool) -> Token:
    """Return an added token as a file writes it: its text, or an object with its flags."""
    if isinstance(value, str | AddedToken):
        return value
    try:
        return AddedToken(value["content"], **{flag: bool(value[flag]) for flag in FLAGS if flag in value} | flags)
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{folder / WHOLE} or {CONFIG}: {quoted(value)} is no added token; fetch it again") from None


def _declared(
    folder: Path, config: dict[str, Any], whole: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Token], dict[int, Token], list[Token]]:
    """Return the settings, the token of each role, the declared tokens by id, and further special ones."""
    config, declared = dict(config), dict[int, Token]()
    if "added_tokens_decoder" in config:
        declared = {int(i): _token(token, folder) for i, token in dict(config["added_tokens_decoder"]).items()}
    else:  # as before transformers 5
        for role, value in _object(folder / MAP).items():
            config[role] = _token(value, folder, special=True) if isinstance(value, dict) and "content" in value else value
        special = {text_of(config[role]) for role in ROLES if config.get(role)} | {text_of(token) for token in _extra(config)}
        for token, i in _object(folder / ADDED).items():
            declared[i] = AddedToken(token, normalized=token not in special, special=token in special)
        declared |= {token["id"]: _token(token, folder) for token in whole.get("added_tokens") or ()}
    known = {text_of(token): token for token in declared.values()}
    found = {role: config[role] for role in config if role.endswith("_token") and not role.startswith("add_")}
    extra = _extra(config)
    found |= extra if isinstance(extra, dict) else {}
    roles = {role: _token(value, folder) for role, value in found.items() if isinstance(value, str | dict | AddedToken)}
    roles = {role: known.get(text_of(token), token) if role in ROLES else token for role, token in roles.items()}
    return config, roles, declared, [] if isinstance(extra, dict) else [_token(token, folder) for token in extra]


def _extra(config: Mapping[str, Any]) -> Any:
    return config.get("extra_special_tokens") or config.get("additional_special_tokens") or []


def _add(pipeline: Pipeline, roles: Mapping[str, Token], declared: Mapping[int, Token], extra: list[Token]) -> dict[str, str]:
    """Add the declared tokens in the order of their ids, then those of roles, then further ones; return the roles' tokens."""
    named = {role: text_of(token) for role, token in roles.items()}
    known = {token.content for token in pipeline.get_added_tokens_decoder().values()}
    known |= {text_of(token) for token in declared.values()}
    tokens = [declared[i] for i in sorted(declared)]
    for more in [*roles.values(), *extra]:
        if text_of(more) not in known:
            tokens.append(more)
            known.add(text_of(more))
    added = []
    for token in tokens:
        if isinstance(token, AddedToken) and not token.special and token.content in named.values():
            token = AddedToken(token.content, **{flag: getattr(token, flag) for flag in FLAGS[:-1]}, special=True)
        added.append(AddedToken(token, special=True) if isinstance(token, str) else token)
    pipeline.add_tokens(added)
    return named


def _post_processor(whole: Mapping[str, Any]) -> Any:
    plain = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return Pipeline.from_str(json.dumps({**plain, "post_processor": whole.get("post_processor")})).post_processor


def _parts(folder: Path, name: str, kind: Kind, config: dict[str, Any], whole: Mapping[str, Any]) -> tuple[Parts, list[Token]]:
    """Return the vocabulary of `tokenizer.json`, else of other files, and the special tokens that it declares itself."""
    if whole:
        model, steps = whole["model"], whole.get("normalizer") or {}
        tables = [step.get("precompiled_charsmap") for step in steps.get("normalizers", [steps])]
        charsmap = next((base64.b64decode(table) for table in tables if table), None)
        return Parts(model.get("vocab"), as_pairs(model.get("merges"), str(folder / WHOLE)), charsmap, config), []
    for vocab, merges in (BPE_FILES, OPENAI) if kind.build is _byte_level else ():
        if lexists(folder / vocab) and lexists(folder / merges):
            # Only "\n" ends a line: Python's other line ends may be part of a token. The last line may lack it.
            lines = [line.removesuffix("\r") for line in read_text(folder / merges).split("\n")]
            pairs = as_pairs([line for line in lines if line and not line.startswith("#version")], str(folder / merges))
            table = _object(folder / vocab)
            if len(twice := {i: token for token, i in table.items() if isinstance(i, int)}) < len(table):
                odd = next(token for token, i in table.items() if twice.get(i) != token)
                raise InputError(f"{folder / vocab}: the id of {quoted(odd)} is no number of its own; fetch the file again")
            return Parts(table, pairs, None, config), []
    if kind.build is _bert and lexists(folder / VOCAB):
        lines = read_text(folder / VOCAB).removesuffix("\n").split("\n")
        return Parts({line.rstrip(): i for i, line in enumerate(lines)}, (), None, config), []
    if kind.build in (_t5, _albert) and lexists(folder / PIECES):
        proto = pieces_of(folder / PIECES)
        controls = [piece for piece in proto.pieces if piece.type in (3, 4)]
        special = [AddedToken(piece.piece, normalized=False, special=piece.type == 3) for piece in controls]
        scores = [(piece.piece, piece.score) for piece in proto.pieces] + [(text_of(token), 0.0) for token in kind.extra(config)]
        return Parts(scores, (), proto.normalizer_spec.precompiled_charsmap or None, config), [*special]
    there = ", ".join(file for file in (*BPE_FILES, *OPENAI, VOCAB, PIECES) if lexists(folder / file))
    if there and name not in CLASSES:
        raise InputError(f"{folder}: its tokenizer, a {name}, is not known here; save it as {WHOLE} with transformers")
    wanted = ", ".join([WHOLE, *(" + ".join(pair) for pair in (BPE_FILES, OPENAI)), VOCAB, PIECES])
    found = f"only {there}" if there else "none of them"
    raise InputError(f"{folder}: no tokenizer; looked for {wanted} and found {found}; copy the missing file there")


def _check(folder: Path, tokenizer: LibraryTokenizer, merges: Merges, kept: Mapping[str, bytes]) -> None:
    """Warn of tokens that no merge makes, and where vocab.json and merges.txt say something else than tokenizer.json."""
    vocab = tokenizer.vocab
    if len(vocab) > N_BYTES + len(merges) + len(tokenizer.added):
        made = {*byte_alphabet(), *(a + b for a, b in merges), *tokenizer.special_tokens, *tokenizer.matched}
        lost = [token for token in vocab if token not in made]
        warn_once(f"{folder}: {len(lost):,} tokens are made by no merge ({quoted(lost[0])} first); are the merges cut off?")
    if kept.keys() >= set(BPE_FILES):
        stated = {**_object(folder / BPE_FILES[0]), **_object(folder / ADDED)}
        lines = read_text(folder / BPE_FILES[1]).replace("\r\n", "\n").splitlines()
        same = "\n".join(" ".join(pair) for pair in merges) == "\n".join(line for line in lines if line[:8] != "#version")
        if stated != vocab or not same:
            odd = [token for token in {**vocab, **stated} if vocab.get(token) != stated.get(token)]
            what = f"about {quoted(odd[0])}" if odd else "about the merges"
            warn_once(f"{folder}: {WHOLE} and {' + '.join(BPE_FILES)} disagree {what}; {WHOLE} is read")
