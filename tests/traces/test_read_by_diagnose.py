"""``gpt2 diagnose`` reads every form that ``gpt2 trace`` writes: ours is equal, a broken model's is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.checks import mostly_slow

import gpt2
from gpt2.cli.main import main

IDS = np.random.default_rng(0).integers(0, 300, (2, 9))


@pytest.fixture(scope="module")
def broken(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same weights, but for one block's bias that was left out."""
    module = gpt2.load(model)
    with torch.no_grad():
        module.h[1].mlp.c_fc.bias.zero_()
    return str(gpt2.save(module, None, tmp_path_factory.mktemp("broken")))


FORMS = (("t.safetensors", "float16"), ("t.npz", "float64"), ("t", "float32"), ("t.bin", "float32"))


@pytest.mark.parametrize(("name", "dtype"), mostly_slow(FORMS, 4))
def test_ours_is_equal_and_a_broken_one_is_not(model: str, broken: str, name: str, dtype: str, tmp_path: Path) -> None:
    """The reference has to pass its own judge, in every form and dtype, or nobody's program can."""
    given = {"ids": IDS[:, :-1], "targets": IDS[:, 1:], "gradients": True, "dtype": dtype}
    path = gpt2.trace(model, **given).save(tmp_path / name)
    assert main(["diagnose", str(path), "--model", model]) == 0
    path = gpt2.trace(broken, **given).save(tmp_path / name)
    assert main(["diagnose", str(path), "--model", model]) == 1
