"""Positions are found where a program dumps no embeddings, from what its first block shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.programs import seventh

import gpt2

EMBEDDINGS_LEFT_OUT = 4  # a seed of which the dump holds neither embeddings nor mixtures
MUTANTS = {  # the row of the table for a token
    "every second row": (lambda t: 2 * t, "position-offset"),
    "a jump": (lambda t: t + 7 * (t > 4), "position-offset"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_positions_are_named_though_no_embeddings_are_dumped(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first value that was recorded was that of a norm, and no norm gives it from the right embeddings."""
    rows, cause = MUTANTS[mutant]
    bed = seventh.SeventhBed(tmp_path / "bed", seventh.SHAPES[0])
    monkeypatch.setattr(seventh.student.GPT2, "positions", lambda self, ids: self.wpe[rows(np.arange(ids.shape[1]))])
    said = gpt2.diagnose(str(bed.dump("student", [], "full", "float32", EMBEDDINGS_LEFT_OUT)), gpt2.load(str(bed.model)))
    assert [one.id for one in said.causes] == [cause], said.notes
