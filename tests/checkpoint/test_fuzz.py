"""Hundreds of damaged files: each is read, or refused in one line, in little time and memory."""

import json
from pathlib import Path

import pytest
from support import forks, fuzz


@pytest.mark.parametrize("count", [150, pytest.param(4000, marks=pytest.mark.slow)])
def test_damaged_inputs_are_read_or_refused_in_one_line(count: int) -> None:
    """A damaged byte must not cause an IndexError, a minute of parsing, gigabytes of memory, or wrong weights."""
    done = forks.run("-m", "support.fuzz", "--count", str(count), "--seed", str(count), timeout=900 + count)
    found = json.loads(done.stdout)
    assert found["fallen"] == []
    assert 0.05 * count < found["loaded"] < 0.9 * count
    assert len(found["refused"]) > 25


def test_a_fall_is_seen(tmp_path: Path) -> None:
    """Control: a reader that raises something else, says more than a line, or not what to do."""
    (file := tmp_path / "a").write_bytes(b"whole")
    wrongs = [None, ZeroDivisionError("x"), fuzz.InputError("no advice"), fuzz.InputError("a: b" * 999), fuzz.InputError("a: b")]
    for wrong, falls in zip(wrongs, (0, 1, 1, 1, 0), strict=True):

        def read(path: Path, wrong: Exception | None = wrong) -> None:
            if wrong is not None and path.read_bytes() != b"whole":
                raise wrong

        assert len(fuzz.fuzz({file: read}, 1, 0, lambda *_: b"damaged")["fallen"]) == falls
