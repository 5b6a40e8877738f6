"""The eleventh set of programs, by an author who did not know the engine: right but for their faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import eleventh
from support.programs.checked import Dump, check

BATCH = {"encoded": "embedded", "ln1": "ln_1", "preatt": "scores", "att": "weights", "atty": "mixed", "attproj": "attended"}
BATCH |= {"residual2": "middle", "ln2": "ln_2", "fch": "up", "fch_gelu": "act", "fcproj": "fed", "residual3": "result"}
DUMPS = {
    "functional": Dump(without=("positions",), heads_in_width=False),
    "batch": Dump(
        names=BATCH | {"lnf": "final"},
        without=("ln1_mean", "ln1_rstd", "ln2_mean", "ln2_rstd"),
        absent=("q", "k", "v"),
    ),
    "stream": Dump(names={"context": "mixed", "hidden": "up", "active": "act", "out": "result"}, without=("positions",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", eleventh.FAULTS)
def test_each_program_of_the_eleventh_set_is_right_but_for_its_faults(program: str, tmp_path: Path) -> None:
    """A mistake in a program, or a switch that does nothing, would be counted as the engine's."""
    if reason := eleventh.missing(program):
        pytest.skip(f"this program was not run: {reason}")
    check(eleventh.EleventhBed(tmp_path / "bed", eleventh.SHAPES[0]), program, eleventh.FAULTS[program], DUMPS[program])
