"""A model and a text that the tests of comparisons share; none of them may change a file of theirs."""

from pathlib import Path

import pytest
from support.random_models import TEXT, write_checkpoint


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "witches.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same text as three documents."""
    (path := tmp_path_factory.mktemp("text") / "three.txt").write_text(
        "<|endoftext|>".join((TEXT[:60], TEXT[60:120], TEXT[120:]))
    )
    return str(path)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "model")
