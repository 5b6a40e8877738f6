"""Positions are found where a program dumps no embeddings, from what its first block shows."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.programs import thirteenth

import gpt2

MUTANTS = {  # the row of the table for a token
    "every second row": lambda t: 2 * t,
    "a jump": lambda t: t + 7 * (t > 4),
}


class WithoutEmbeddings(thirteenth.ThirteenthBed):
    """A bed whose dumps hold neither embeddings nor mixtures."""

    NOT_DUMPED = (("embed", "pos_embed", "resid_pre", "z"),) * 5


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_positions_are_named_though_no_embeddings_are_dumped(mutant: str, tmp_path: Path) -> None:
    """The first value that was recorded was that of a norm, and no norm gives it from the right embeddings."""
    bed = WithoutEmbeddings(tmp_path / "bed", thirteenth.SHAPES[0])
    right = shutil.copytree(bed.model, tmp_path / "right")
    table, tokens = bed.weights["wpe.weight"], np.arange(bed.shape.tokens)
    table[tokens] = table[MUTANTS[mutant](tokens)]
    save_file(bed.weights, bed.model / "model.safetensors", metadata={"format": "pt"})
    dump = bed.dump("hooked", [], "full", "float32", seed=1)
    said = gpt2.diagnose(str(dump), gpt2.load(str(right)))
    assert [one.id for one in said.causes] == ["position-offset"], said.notes
