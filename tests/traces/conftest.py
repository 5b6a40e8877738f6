"""The model that is traced."""

import pytest
from support.random_models import write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a small model of random weights; read only."""
    return str(write_checkpoint(tmp_path_factory.mktemp("model")))
