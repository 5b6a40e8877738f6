"""Fixtures: a text and a recipe so small that a run takes a fraction of a second."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2.train.loop import train
from gpt2.train.recipe import Data, NewModel, Optim, Recipe

WORDS = ["thou", "art", "a", "villain", "and", "the", "king", "doth", "sleep", "while", "night", "so", "speak", "no", "more"]
NAMES = ("HAMLET", "OPHELIA", "FIRST CLOWN")


def speeches(count: int) -> str:
    rng = random.Random(5)
    lines = lambda: "".join(f"{' '.join(rng.choices(WORDS, k=6))},\n" for _ in range(3))  # noqa: E731
    return "\n".join(f"{rng.choice(NAMES)}:\n{lines()}" for _ in range(count))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(speeches(40), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def recipe(text: Path) -> Recipe:
    """Twelve steps with dropout, evaluated every third step and saved every fourth, so that evaluations and saves differ."""
    return Recipe(
        name="tiny",
        steps=12,
        batch_size=4,
        context=16,
        dropout=0.1,
        log_every=1,
        eval_every=3,
        save_every=4,
        sample_tokens=4,
        device="cpu",
        data=Data(path=str(text), tokenizer="chars"),
        model=NewModel(n_layer=1, n_embd=16, n_head=2, n_positions=16),
        optim=Optim(lr=1e-2, min_lr=1e-3, warmup=3),
    )


@pytest.fixture
def quiet(recipe: Recipe) -> Recipe:
    """The same recipe without dropout."""
    return replace(recipe, dropout=0.0)


@pytest.fixture(scope="session")
def whole(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of the recipe; read only."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(recipe, folder).stopped == "finished"
    return folder


@pytest.fixture
def init(whole: Path, tmp_path: Path) -> Path:
    """A model to start a fine-tune from; a test may change it."""
    return Path(shutil.copytree(whole / "best", tmp_path / "init"))
