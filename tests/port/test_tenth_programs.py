"""The tenth set of programs, by an author who did not know the engine: right but for their faults, at each value they show."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import tenth
from support.programs.checked import Dump, check

WITHOUT = ("mean", "rstd", "causal", "position", "positions", "token")  # what our model does not show
DUMPS = {
    "modules": Dump(without=WITHOUT, heads_in_width=False),
    "kvcache": Dump(without=WITHOUT, heads_after_tokens=True),
    "prefill": Dump(without=WITHOUT),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", tenth.FAULTS)
def test_each_program_of_the_tenth_set_is_right_but_for_its_faults(program: str, tmp_path: Path) -> None:
    """A mistake in a program, or a switch that does nothing, would be counted as the engine's."""
    if reason := tenth.missing(program):
        pytest.skip(f"this program was not run: {reason}")
    check(tenth.TenthBed(tmp_path / "bed", tenth.SHAPES[0]), program, tenth.FAULTS[program], DUMPS[program])
