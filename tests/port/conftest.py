"""What the tests of diagnoses share."""

import pytest
from support.faulty import CONFIG, write

import gpt2


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("checkpoint"), CONFIG)


@pytest.fixture(scope="session")
def model(directory):
    """A tiny random GPT-2, from a file."""
    return gpt2.load(str(directory))
