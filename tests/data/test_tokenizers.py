"""Every tokenizer: decoding restores the text, transformers gives the same ids, and characters and words refuse bad input."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from support.checks import content, refused
from support.commands import refusal

from gpt2 import data
from gpt2.data import Tokenizer
from gpt2.data.bpe import chars_of, train_bpe, words_of
from gpt2.errors import InputError

ROMEO = (
    "ROMEO:\nBut soft! What light, what light, through yonder window breaks?\n\n'Tis the east; I'll say't, and 1597 \r\n\t" * 3
)
ODD = 'Naïve "café" \\ 日本 😀 <|endoftext|> \u3000\x00\x1c e\u0301 👍🏽 Ġthe    x \n\n  '
# How each tokenizer is made from a text, and the characters that it must encode.
TOKENIZERS = {
    "bpe": (train_bpe(ROMEO * 3, 300), ROMEO + ODD),
    "chars": (chars_of(ROMEO + ODD), ROMEO + ODD),
    "words": (words_of(ROMEO * 3, 256 + 12 + 1), ROMEO + ODD),
}


@pytest.fixture(params=TOKENIZERS)
def drawn(request: pytest.FixtureRequest) -> tuple[Tokenizer, list[str]]:
    """A tokenizer and a thousand texts."""
    tokenizer, letters = TOKENIZERS[request.param]
    rng = random.Random(0)
    texts = [ROMEO[:20], *("".join(rng.choices(letters, k=rng.randint(1, 60))) for _ in range(1000))]
    return tokenizer, [*texts, *(" ".join(rng.choices(ROMEO.split(), k=9)) for _ in range(200))]


def test_ids_are_sorted_characters() -> None:
    chars, letters = TOKENIZERS["chars"]
    assert [chars.decode([i]) for i in range(chars.n_vocab)] == sorted(set(letters))
    assert chars_of("hello").encode("hole") == [1, 3, 2, 0]
    assert chars_of("hello").fingerprint != chars.fingerprint
    assert chars.eot is None
    text = "we know, and so I say it to you"
    assert len(chars.encode(text)) == len(text)


def test_a_vocabulary_of_words_is_bytes_then_the_most_frequent_words_then_the_end() -> None:
    words, _ = TOKENIZERS["words"]
    assert words.n_vocab == 269
    assert words_of(ROMEO, 260).fingerprint != words.fingerprint
    assert words.token_bytes(256) == b" light"  # six times; words with three occurrences follow in the order of the text
    assert (words.token_bytes(257), words.token_bytes(words.eot)) == (b"ROMEO", b"<|endoftext|>")
    assert {words.token_bytes(i) for i in range(256)} == {bytes([i]) for i in range(256)}
    assert len(words.encode(" light")) == 1
    assert words.eot not in words.encode("<|endoftext|>"), "text is data"


def test_round_trips(drawn) -> None:
    """With an unknown token, words outside the vocabulary would cost nothing, and bits per byte would be too low."""
    tokenizer, texts = drawn
    for text in ["", *texts]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.decode(np.array(ids, dtype=int)) == text
        assert tokenizer.decode_bytes(ids) == b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    for bad in (-1, tokenizer.n_vocab):
        says = f"id {bad} is not in this vocabulary of {tokenizer.n_vocab}"
        refused(lambda bad=bad: tokenizer.decode([bad]), says, error=InputError)


def test_saved_and_read_again(drawn, tmp_path: Path) -> None:
    tokenizer, _ = drawn
    paths = tokenizer.save(tmp_path)
    assert sorted(paths) == sorted(tmp_path.iterdir())
    first, again = content(tmp_path), data.from_directory(tmp_path)
    assert type(again) is type(tokenizer)
    assert again.fingerprint == tokenizer.fingerprint
    again.save(tmp_path)
    assert content(tmp_path) == first


def test_transformers_gives_the_same_ids(drawn, tmp_path: Path) -> None:
    """GPT2Tokenizer, the default for this model type, would split every word into characters."""
    from transformers import AutoTokenizer

    tokenizer, texts = drawn
    tokenizer.save(tmp_path, n_positions=32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(reference), reference.model_max_length, reference.eos_token_id) == (tokenizer.n_vocab, 32, tokenizer.eot)
    ids = reference(texts, split_special_tokens=True)["input_ids"]
    assert ids == [tokenizer.encode(text) for text in texts]
    assert [reference.decode(row) for row in ids] == texts
    if tokenizer.letters:
        with pytest.raises(Exception, match=r"(?i)unk"):
            reference("Z")
    else:
        assert any(i >= 256 for row in ids for i in row)


def test_bad_text() -> None:
    chars, words = TOKENIZERS["chars"][0], TOKENIZERS["words"][0]
    where = "'Z' (U+005A) at position 3"
    refused(lambda: chars.encode("we Z"), where, "leave it out, or use a vocabulary", error=InputError)
    refused(lambda: chars_of(""), "no characters", error=InputError)
    refused(lambda: chars_of("a\udc80"), "lone surrogate", error=InputError)
    refused(lambda: words.encode("\udc80"), "lone surrogate", error=InputError)
    refused(lambda: words_of(ROMEO, 9999), "different words; ask for at most", error=InputError)
    with pytest.raises(InputError, match="vocab_size 256 is too small"):
        words_of(ROMEO, 256)


def word_level(folder: Path, vocab: dict[str, int], **parts: object) -> Path:
    """A folder whose tokenizer.json has a vocabulary of words, and these parts around it."""
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts}))
    return folder


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_an_id_that_no_vocabulary_has_is_refused_before_a_list_is_made(name: str, tmp_path: Path, monkeypatch) -> None:
    """An id of 500,000,000 made a list of as many entries: 4 GB for a file of 100 bytes."""
    vocab = {"a": 0, "<|endoftext|>": 1, "b": 500_000_000}
    monkeypatch.setattr(data.byte_level, "core", None)  # not reached: the library itself makes such a list there
    if name == "vocab.json":
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        (tmp_path / "merges.txt").write_text("")
    else:
        word_level(tmp_path, vocab)
    said = refusal(data.from_directory, tmp_path)
    assert name in said
    assert "an id of 500,000,000, and no vocabulary is so large" in said


def replace(old: dict[str, str], new: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": old, "content": new}


@pytest.mark.parametrize(
    "steps",
    [
        [replace({"String": "a"}, "aa")] * 40,
        [replace({"Regex": "[aA]"}, "AA"), {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}] * 40,
        [replace({"String": "a"}, "a" * 1_000_000)] * 2,
    ],
)
def test_a_text_that_grows_is_refused_before_it_fills_the_memory(steps: list[dict[str, object]], tmp_path: Path) -> None:
    """40 steps that double a text made the library ask for a terabyte, which aborts the process: no error could be caught."""
    normalizer = {"type": "Sequence", "normalizers": steps}
    said = refusal(data.from_directory, word_level(tmp_path, {"a": 0}, normalizer=normalizer))
    assert "its normaliser makes a text over 1,000 times as long" in said
    normalizer = {"type": "Sequence", "normalizers": [replace({"String": "a"}, "aa")] * 9}
    assert data.from_directory(word_level(tmp_path, {"a": 0}, normalizer=normalizer)).encode("a") == [0]


@pytest.mark.parametrize("part", ["decoder", "template"])
def test_a_decoder_or_a_template_that_multiplies_a_text_is_refused(part: str, tmp_path: Path) -> None:
    """They made a terabyte of three ids, as 40 steps of a normaliser did. Control: a template with the text once."""
    whole = {"Sequence": {"id": "A", "type_id": 0}}
    once = {"type": "TemplateProcessing", "single": [whole], "pair": [whole], "special_tokens": {}}
    parts = {
        "decoder": {"decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "aa")] * 40}},
        "template": {"post_processor": {"type": "Sequence", "processors": [{**once, "single": [whole] * 2}] * 40}},
    }
    said = refusal(data.from_directory, word_level(tmp_path, {"a": 0}, **parts[part]))
    assert f"its {part} makes a text over 1,000 times as long" in said
    assert data.from_directory(word_level(tmp_path, {"a": 0}, post_processor=once)).encode_prompt("a") == [0]


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("tokenizer_config.json", {"eos_token": 5}),
        ("tokenizer_config.json", {"eos_token": {"special": True}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"0": {"content": "a", "lstrip": 7}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": 5}),
        ("tokenizer_config.json", {"extra_special_tokens": 5}),
        ("special_tokens_map.json", {"unk_token": ["a"]}),
    ],
)
def test_an_error_beside_tokenizer_json_names_its_file(name: str, entries: dict[str, object], tmp_path: Path) -> None:
    """It was said that tokenizer.json, or the folder, cannot be read: people fetched the wrong file again."""
    (word_level(tmp_path, {"a": 0}) / name).write_text(json.dumps(entries))
    assert f"{tmp_path / name}: names a token in no known form" in refusal(data.from_directory, tmp_path)


def test_a_panic_while_text_is_encoded_or_decoded_is_one_line(tmp_path: Path) -> None:
    """The panics of the library are no Exception: those of lengths and decoding were tracebacks."""
    split = {
        "pre_tokenizer": {"type": "FixedLength", "length": 0},
        "decoder": {"type": "Strip", "content": "a", "start": 9, "stop": 9},
    }
    tokenizer = data.from_directory(word_level(tmp_path, {"a": 0}, **split))
    for call in (lambda: tokenizer.encode("a b"), lambda: tokenizer.lengths("a b"), lambda: tokenizer.decode([0, 0])):
        assert "the tokenizer: the tokenizers library cannot read it" in refusal(call)


def test_a_tokenizer_is_called_as_the_field_calls_one() -> None:
    """``tok(text, return_tensors="pt").input_ids`` is what scripts written for transformers say; ours was not callable."""
    tokenizer = TOKENIZERS["words"][0]
    assert (len(tokenizer), tokenizer.eos_token_id) == (269, tokenizer.eos)
    ids = [tokenizer.encode(text) for text in ("a", "what light")]
    assert tokenizer("a") == {"input_ids": ids[0], "attention_mask": [1] * len(ids[0])}
    both = tokenizer(["a", "what light"], return_tensors="pt")
    pads = [tokenizer.eot] * (len(ids[1]) - len(ids[0]))
    assert both.input_ids.tolist() == [pads + ids[0], ids[1]], "padded on the left, as generate takes it"
    assert both.attention_mask[0].tolist() == [0 for _ in pads] + [1 for _ in ids[0]]
    assert all("use decode" in refusal(tokenizer, odd) for odd in ([1, 2], 5, None, {"a": 1}))
    assert all(refusal(wrong) for wrong in (lambda: tokenizer.decode(both.input_ids), lambda: tokenizer.encode(None)))
