"""A few hundred damaged inputs of every surface; twenty thousand by hand: `python -m support.surfaces`, from tests/."""

from pathlib import Path

import pytest
from support import surfaces


def test_damaged_inputs_are_read_or_refused_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each kind of input has fallen once: a traceback, several lines, or a wait."""
    tried, fallen = surfaces.fuzz(300, 7, tmp_path)
    assert tried >= 280
    assert not fallen


def test_a_fall_is_seen(tmp_path: Path) -> None:
    """Control: a reader that raises something else, or says more than a line."""
    assert "ZeroDivisionError" in surfaces.check(lambda: 1 // 0)
    assert surfaces.check(lambda: surfaces.read_npy(tmp_path / "no.npy")) == ""
