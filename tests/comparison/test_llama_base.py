"""The file of llama.cpp's --kl-divergence-base: ids, log-probabilities to 16 bits, and which tokens they predict."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from support.llama_base import write_llama_base

from gpt2.comparison.llama_base import is_llama_base, read_llama_base
from gpt2.errors import InputError

IDS = np.random.default_rng(0).integers(0, 61, (3, 8))
LOGITS = np.random.default_rng(1).normal(0, 6, (3, 8, 61))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_llama_base(tmp_path / "base.kld", IDS, LOGITS)


def test_every_row_is_the_prediction_of_its_token(path: Path) -> None:
    """A row read for its neighbour's token, or with the padding of an odd vocabulary, gives a wrong model's figures."""
    base = read_llama_base(path)
    assert is_llama_base(path)
    assert base.ids.tolist() == IDS.flatten().tolist()
    spans = list(base.windows.of(len(base.ids)))
    assert [(span.start, span.first, span.end) for span in spans] == [(0, 4, 7), (8, 12, 15), (16, 20, 23)]
    exact = torch.from_numpy(LOGITS[:, 4:7].reshape(-1, 61)).log_softmax(-1)
    read = base.logits(slice(None))
    near = exact > exact.amax(1, keepdim=True) - 16
    assert (read - exact)[near].abs().max() < 16 / 65535
    assert (read[~near] >= exact[~near]).all()  # raised to the lowest that fits


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-10], "does not notice a full disk"),
        (lambda data: data + b"\0", "it is damaged"),
        (lambda data: data[:10], "is not a file of llama.cpp's"),
        (lambda data: data[:8] + struct.pack("<3i", 8, 0, 3) + data[20:], "states 3 chunks"),
        (lambda data: data[:20] + struct.pack("<i", 61) + data[24:], "outside its vocabulary"),
        (lambda data: data[:116] + struct.pack("<f", float("nan")) + data[120:], "row 0 holds no"),
    ],
)
def test_a_damaged_file_is_one_line(path: Path, change, says: str) -> None:
    """llama.cpp's writer ignores errors, so a file that is cut short is common; its rows would be another chunk's."""
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=says):
        read_llama_base(path).logits(slice(None))
