"""The function or class of a user's file that builds a module."""

from pathlib import Path

import pytest
from torch import nn

from gpt2.measure.user_code import builder


class Mine(nn.Module):
    def __init__(self, n_layer: int = 2) -> None:
        super().__init__()
        self.n_layer = n_layer


@pytest.mark.parametrize(("build", "takes_folder"), [(Mine, False), (lambda: 0, False), (lambda folder: 0, True)])
def test_a_class_is_built_without_the_folder(build: type, takes_folder: bool) -> None:
    """`model.py:MyGPT`: a class with defaults got the checkpoint's folder as its number of layers, a TypeError of torch."""
    assert builder(build, Path("model.py"), "build") == (build, takes_folder)
