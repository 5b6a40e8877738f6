"""Texts too large for memory: the same tokens as in memory, made once, in order, and gone on with after a kill."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.commands import ASSET, alive, refusal
from support.training import killed

from gpt2.data import documents, from_directory, token_files
from gpt2.train.corpus import Corpus, corpus
from gpt2.train.recipe import Data, Recipe

TOKENIZER = from_directory(ASSET)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    rng, path = random.Random(1), tmp_path_factory.mktemp("table") / "table.jsonl"
    words = ["thou", "art", "  night", "é", "\n", "so", "speak", "no more"]
    with open(path, "w") as file:
        for number in range(900):
            row = {"q": f"{number}?", "text": " ".join(rng.choices(words, k=rng.randint(0, 60)))}
            file.write(json.dumps(row) + "\n")
    return path


def read(recipe: Recipe, large: int, how: str = "fork") -> Corpus:
    """The corpus, from token files if the text has more than ``large`` bytes. Processes that import nothing begin at once."""
    context = multiprocessing.get_context(how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda asked: context if asked == "spawn" else pytest.fail(asked))
        patch.setattr(token_files, "LARGE", large)
        patch.setattr(token_files, "GROUP", 3000)
        patch.setattr(token_files, "SAVE_EVERY", 2)
        return corpus(recipe, TOKENIZER)


@pytest.mark.parametrize("layout", [{}, {"prompt": "q", "padded": True}])
def test_token_files_hold_what_the_memory_would(recipe, table, tmp_path, layout):
    """Groups that come back in another order, or marks that do not belong to their ids, train another model in silence."""
    path = tmp_path / "table.jsonl"
    path.write_bytes(table.read_bytes())
    recipe = replace(recipe, data=Data(path=str(path), **layout))
    mapped, held = read(recipe, 0), read(recipe, 1 << 40)
    assert isinstance(mapped.train_ids, np.memmap)
    for name in ("train_ids", "val_ids", "train_marks", "val_marks"):
        mine, theirs = getattr(mapped, name), getattr(held, name)
        assert (mine is None and theirs is None) or np.array_equal(mine, theirs), name
    known = Counter({key: value for key, value in held.tally.items() if layout or key != "long"})  # of padded rows only
    assert mapped.tally == +known
    (folder,) = Path(f"{path}.tokens").iterdir()
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert read(recipe, 0).sha256 == mapped.sha256
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before  # made once
    ids = np.fromfile(folder / "train.bin", dtype="<u2")
    ids[5] += 1
    ids.tofile(folder / "train.bin")
    assert "these are not the token files" in refusal(read, recipe, 0)


def test_a_text_in_pieces_is_the_whole_text(recipe, tmp_path, monkeypatch):
    """A cut within a word, or a boundary that is cut in two, gives other tokens."""
    rng, path = random.Random(2), tmp_path / "long.txt"
    parts = ["word", " ", "  ", "\n\n", "a", "<|endoftext|>", "\n<|endoftext|>\n", "'s ", " \t", "é", "<|endof"]
    path.write_text("".join(rng.choices(parts, weights=[9, 9, 3, 2, 5, 0.04, 0.04, 3, 1, 1, 1], k=12000)), encoding="utf-8")
    recipe = replace(recipe, data=Data(path=str(path)))
    monkeypatch.setattr(documents, "PIECE", 200)
    monkeypatch.setattr("gpt2.data.batches.HASHED", 1)
    pieces = list(documents.documents([path], tally=Counter(), streamed=True))
    assert sum(piece.more for piece in pieces) > 10 < sum(not piece.more for piece in pieces)
    mapped, held = read(recipe, 0), read(recipe, 1 << 40)
    assert np.array_equal(mapped.train_ids, held.train_ids)
    assert np.array_equal(mapped.val_ids, held.val_ids)
    path.write_text("one " * 3000, encoding="utf-8")  # a single document: its end is held out
    alone = read(recipe, 0)
    assert "held out: the last part" in alone.notes[0]
    assert len(alone.val_ids) == pytest.approx(0.1 * len(alone.train_ids) / 0.9, abs=2)
    assert TOKENIZER.decode([*alone.train_ids, *alone.val_ids]) == "one " * 3000 + "<|endoftext|>"


def tokenized_and_killed(recipe: Recipe, children: Path) -> None:
    """Tokenize, and be killed behind the first progress that is saved; ``children`` gets the processes that tokenize."""
    save = token_files._save

    def save_and_end(*args):
        save(*args)
        tasks = Path("/proc/self/task").glob("*/children")  # Linux
        children.write_text(" ".join(each.read_text() for each in tasks))
        os.kill(os.getpid(), signal.SIGKILL)

    token_files._save = save_and_end
    read(recipe, 0, "spawn")


def test_killed_while_tokenizing(recipe, table, tmp_path):
    """After SIGKILL a byte behind the saved sizes would shift every later token; tokenizing processes waited for ever."""
    path = tmp_path / "table.jsonl"
    path.write_bytes(table.read_bytes())
    recipe = replace(recipe, data=Data(path=str(path)))
    killed(tokenized_and_killed, recipe, tmp_path / "children")
    children = (tmp_path / "children").read_text().split()
    assert children
    deadline = time.monotonic() + 120  # for those that wait for ever
    while any(map(alive, children)):
        assert time.monotonic() < deadline, "they still run"
        time.sleep(0.01)
    (folder,) = Path(f"{path}.tokens").iterdir()
    assert not (folder / "manifest.json").exists()
    with open(folder / "train.bin", "ab") as file:
        file.write(b"torn")
    assert json.loads((folder / "progress.json").read_text())["read"] > 0
    again, expected = read(recipe, 0), read(recipe, 1 << 40)
    assert np.array_equal(again.train_ids, expected.train_ids)
    assert np.array_equal(again.val_ids, expected.val_ids)
    assert again.tally == +Counter({key: value for key, value in expected.tally.items() if key != "long"})  # of padded rows only


def test_a_folder_that_cannot_be_written_names_the_way_out(recipe, table, tmp_path):
    """The text may lie on a read-only disk: a link to it, as the message says, has its token files beside it."""
    (tmp_path / "closed.jsonl").symlink_to(table)
    (tmp_path / "closed.jsonl.tokens").touch()  # stands in for a folder that cannot be written, as root may write everywhere
    says = refusal(read, replace(recipe, data=Data(path=str(tmp_path / "closed.jsonl"))), 0)
    assert "cannot write token files" in says
    assert "give a link to the text" in says
    (tmp_path / "link.jsonl").symlink_to(table)
    assert len(read(replace(recipe, data=Data(path=str(tmp_path / "link.jsonl"))), 0).train_ids) > 1000
    assert list(tmp_path.glob("link.jsonl.tokens/*/train.bin"))
