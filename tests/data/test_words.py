"""Words as tokens: nothing unknown, nothing lost, and the same ids in transformers."""

import json
import random

import pytest

from gpt2 import data
from gpt2.data.chars import Chars
from gpt2.data.words import Words
from gpt2.errors import InputError

TEXT = "ROMEO:\nBut soft! What light, what light, through yonder window breaks?\n\n'Tis the east; I'll say't, and 1597 \r\n\t" * 3
STRANGE = TEXT + 'Naïve "café" \\ 日本 😀 <|endoftext|> \u3000\x00\x1c e\u0301 👍🏽 Ġthe    x \n\n  '


@pytest.fixture(scope="module")
def words() -> Words:
    return Words.from_text(TEXT, 256 + 12 + 1)


def test_vocabulary_is_bytes_then_the_most_frequent_words_then_the_end(words):
    assert words.n_vocab == 269
    assert words.token_bytes(256) == b" light"  # six times; those of three follow in the order of the text
    assert words.token_bytes(257) == b"ROMEO"
    assert words.token_bytes(words.eot) == b"<|endoftext|>"
    assert {words.token_bytes(i) for i in range(256)} == {bytes([i]) for i in range(256)}
    assert len(words.encode(" light")) == 1


def test_a_rare_word_is_spelt_and_not_lost(words):
    """With an unknown token, the words a model cannot read would be its cheapest, and its bits per byte a boast."""
    ids = words.encode(" wherefore light")
    assert len(ids) == len(" wherefore") + 1
    assert words.decode(ids) == " wherefore light"


def test_round_trips(words):
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices(STRANGE, k=rng.randrange(80)))
        ids = words.encode(text)
        assert words.decode(ids) == text
        assert words.decode_bytes(ids) == b"".join(map(words.token_bytes, ids)) == text.encode()
    assert words.eot not in words.encode("<|endoftext|>")  # text is data
    with pytest.raises(InputError, match="lone surrogate"):
        words.encode("\udc80")
    for bad in (-1, words.n_vocab):
        with pytest.raises(InputError, match=f"id {bad} is not in this vocabulary of 269 tokens"):
            words.decode([bad])


def test_saved_and_read_again(words, tmp_path):
    paths = words.save(tmp_path)
    assert sorted(paths) == sorted(tmp_path.iterdir())
    first = {path.name: path.read_bytes() for path in paths}
    again = data.from_directory(tmp_path)
    assert isinstance(again, Words)
    assert again.fingerprint == words.fingerprint != Words.from_text(TEXT, 260).fingerprint
    again.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    Chars.from_text(TEXT).save(tmp_path)
    with pytest.raises(InputError, match=r"chars\.json and words\.json, two tokenizers"):
        data.from_directory(tmp_path)


def test_transformers_gives_the_same_ids(words, tmp_path, monkeypatch):
    """GPT2Tokenizer, which the model's type suggests, would spell out every word."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    words.save(tmp_path, n_positions=32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(reference), reference.model_max_length, reference.eos_token_id) == (words.n_vocab, 32, words.eot)
    rng = random.Random(1)
    texts = [TEXT[:20], *("".join(rng.choices(STRANGE, k=rng.randint(1, 60))) for _ in range(1000))]
    texts += [" ".join(rng.choices(TEXT.split(), k=9)) for _ in range(200)]
    ids = reference(texts, split_special_tokens=True)["input_ids"]
    assert ids == [words.encode(text) for text in texts]
    assert [reference.decode(row) for row in ids] == texts
    assert any(i >= 256 for row in ids for i in row)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"words": "the"}', "holds no"),
        ('{"words": ["the", 3]}', "holds no"),
        ('{"words": ["the", "of", "the"]}', "'the' is listed twice, as words 0 and 2"),
        ('{"words": ["two words"]}', "'two words' is not one word"),
        ('{"words": ["a"]}', "'a' is not one word of two bytes"),
        ('{"words": ["a\\ud800"]}', "lone surrogate"),
    ],
)
def test_bad_files(tmp_path, content, message):
    (tmp_path / "words.json").write_text(content)
    with pytest.raises(InputError, match=message) as error:
        data.from_directory(tmp_path)
    assert "\n" not in str(error.value)


def test_sizes_that_the_text_cannot_give():
    with pytest.raises(InputError, match="vocab_size 256 is too small"):
        Words.from_text(TEXT, 256)
    with pytest.raises(InputError, match=r"only \d+ different words; ask for at most"):
        Words.from_text(TEXT, 9999)
