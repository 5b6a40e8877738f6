"""Characters as tokens: the same ids in transformers, and a plain word about a character that is not there."""

import random

import pytest

from gpt2 import data
from gpt2.data.bpe import train_bpe
from gpt2.data.chars import Chars
from gpt2.errors import InputError

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\r\n\t"
TEXT += 'Naïve "café" \\ 日本 😀 <|endoftext|> \u3000\x00 e\u0301 👍🏽'


@pytest.fixture
def chars() -> Chars:
    return Chars.from_text(TEXT)


def test_ids_are_sorted_characters(chars):
    assert [chars.decode([i]) for i in range(chars.n_vocab)] == sorted(set(TEXT))
    assert Chars.from_text("hello").encode("hole") == [1, 3, 2, 0]
    assert chars.eot is None


def test_round_trips(chars):
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices(TEXT, k=rng.randrange(80)))
        ids = chars.encode(text)
        assert len(ids) == len(text)
        assert chars.decode(ids) == text
        assert chars.decode_bytes(ids) == b"".join(map(chars.token_bytes, ids)) == text.encode()


def test_unknown_character_is_named(chars):
    with pytest.raises(InputError, match=r"'Z' \(U\+005A\) at position 3 .*leave it out, or use a vocabulary") as error:
        chars.encode("we Z")
    assert "\n" not in str(error.value)


def test_ids_of_arrays_and_ids_out_of_range(chars):
    import numpy as np

    assert chars.decode(np.array(chars.encode("we"))) == "we"
    assert chars.encode("") == []
    assert chars.decode([]) == ""
    for bad in (-1, chars.n_vocab):
        with pytest.raises(InputError, match=f"id {bad} is not in this vocabulary of {chars.n_vocab} tokens"):
            chars.decode([bad])


def test_saved_and_read_again(chars, tmp_path):
    paths = chars.save(tmp_path)
    assert sorted(paths) == sorted(tmp_path.iterdir())
    first = {path.name: path.read_bytes() for path in paths}
    again = data.from_directory(tmp_path)
    assert isinstance(again, Chars)
    assert again.fingerprint == chars.fingerprint != Chars.from_text("other").fingerprint
    again.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_transformers_gives_the_same_ids(chars, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    chars.save(tmp_path, n_positions=32)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(reference), reference.model_max_length) == (chars.n_vocab, 32)
    rng = random.Random(1)
    texts = [TEXT[:20], *("".join(rng.choices(TEXT, k=rng.randint(1, 30))) for _ in range(2000))]
    ids = reference(texts)["input_ids"]
    assert ids == [chars.encode(text) for text in texts]
    assert [reference.decode(row) for row in ids] == texts
    with pytest.raises(Exception, match=r"(?i)unk"):
        reference("Z")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no"),
        ('{"characters": ["a"]}', "holds no"),
        ('{"characters": ""}', "no characters"),
        ('{"characters": "aba"}', r"'a' \(U\+0061\) is listed twice, with ids 0 and 2"),
        ('{"characters": "a\\ud800"}', "lone surrogate"),
    ],
)
def test_bad_files(tmp_path, content, message):
    (tmp_path / "chars.json").write_text(content)
    with pytest.raises(InputError, match=message) as error:
        data.from_directory(tmp_path)
    assert str(tmp_path / "chars.json") in str(error.value)


def test_bad_text():
    for text, message in [("", "no characters"), ("a\udc80", "lone surrogate")]:
        with pytest.raises(InputError, match=message):
            Chars.from_text(text)


def test_two_tokenizers_in_one_directory(chars, tmp_path):
    """After saving one over the other nobody can know which the model was made with."""
    chars.save(tmp_path)
    train_bpe("", 257).save(tmp_path)
    with pytest.raises(InputError, match=r"chars\.json and vocab\.json, two tokenizers"):
        data.from_directory(tmp_path)
