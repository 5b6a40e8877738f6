"""What the tests of diagnoses share."""

import pytest
from support.faulty import ONE, TWO
from support.faulty.loading import weights
from support.random_models import model_of

from gpt2 import GPT2


@pytest.fixture(scope="session")
def model() -> GPT2:
    """A tiny random GPT-2 of one block."""
    return model_of(ONE, weights(ONE))


@pytest.fixture(scope="session")
def two() -> GPT2:
    """A tiny random GPT-2 of two blocks."""
    return model_of(TWO, weights(TWO))
