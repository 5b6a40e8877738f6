"""What a recipe trains on: texts by their tokenizers, and token files."""

from dataclasses import replace

import numpy as np
import pytest

from gpt2.data import from_directory
from gpt2.data.chars import Chars
from gpt2.errors import InputError
from gpt2.train.corpus import corpus
from gpt2.train.loop import Evaluated, Started, train
from gpt2.train.recipe import Data


@pytest.mark.parametrize(("tokenizer", "size"), [("chars", 0), ("words", 270), ("bpe", 270)])
def test_every_tokenizer_trains_saves_and_counts_the_same_bytes(recipe, text, tmp_path, tokenizer, size):
    """Bits per byte compare only if every tokenizer is charged for the same bytes; and what is saved must open again."""
    data = Data(path=str(text), tokenizer=tokenizer, vocab_size=size or 2048)
    events = []
    train(replace(recipe, steps=2, data=data), tmp_path / "run", report=events.append)
    score = next(event.val for event in events if isinstance(event, Evaluated))
    held_out = text.read_text()[-len(text.read_text()) // 10 :]
    assert abs(score.bytes - len(held_out.encode())) < 20  # all but the first token, which nothing predicts
    again = from_directory(tmp_path / "run" / "best")
    assert again.decode(again.encode(held_out)) == held_out
    assert again.fingerprint == corpus(replace(recipe, data=data)).tokenizer.fingerprint


@pytest.fixture
def files(text, tmp_path):
    """The same text as token files, with their tokenizer beside them."""
    folder = tmp_path / "tokens"
    whole = text.read_text()
    chars = Chars.from_text(whole)
    chars.save(folder)
    cut = int(0.9 * len(whole))
    for name, part in (("train.bin", whole[:cut]), ("val.bin", whole[cut:])):
        np.array(chars.encode(part), dtype="<u2").tofile(folder / name)
    return folder


def test_token_files_train_as_their_text_does(recipe, files, tmp_path, stored, told):
    """Mapped uint16 and int32 in memory must give the same windows, or a corpus is not what it was."""
    train(recipe, tmp_path / "text")
    mapped = replace(recipe, data=Data(tokens=str(files)))
    assert isinstance(corpus(mapped).train_ids, np.memmap)
    train(mapped, tmp_path / "files")
    assert stored(tmp_path / "files") == stored(tmp_path / "text")
    assert told(tmp_path / "files") == told(tmp_path / "text")


def test_token_files_that_changed_are_another_run(recipe, files, tmp_path):
    mapped = replace(recipe, data=Data(tokens=str(files)))
    train(mapped, tmp_path / "run")
    ids = np.fromfile(files / "train.bin", dtype="<u2")
    ids[7] = (ids[7] + 1) % 10
    ids.tofile(files / "train.bin")
    with pytest.raises(InputError, match="the text is not the one this run began with"):
        train(mapped, tmp_path / "run")


def test_token_files_without_a_tokenizer_are_refused(recipe, files):
    for name in ("chars.json", "tokenizer.json", "tokenizer_config.json"):
        (files / name).unlink()
    with pytest.raises(InputError, match="no tokenizer in it") as error:
        corpus(replace(recipe, data=Data(tokens=str(files))))
    assert "\n" not in str(error.value)


def test_evaluations_are_cut_to_the_tokens_asked_for(recipe, tmp_path):
    events = []
    train(replace(recipe, steps=1, eval_tokens=50), tmp_path / "run", report=events.append)
    assert next(event.val_tokens for event in events if isinstance(event, Started)) == 50
    assert {event.val.tokens for event in events if isinstance(event, Evaluated)} == {49}
